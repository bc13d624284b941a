// From scores to probabilities, for a block of rows and one tile of keys, with the online softmax carried along.
//
// Scores are kept in base 2: exp(s) = 2^(s * log2 e), which saves a multiplication for each score, as s has to be
// multiplied by the scale anyway.
#pragma once

#include "../functions.h"
#include "pack.h"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int SCORE_VECTORS = TILE_KEYS / LANES;

// What the online softmax remembers of a row: see vllm_teach.attention.online_softmax.
struct RowState {
    Floats sum;        // of 2^(score - largest), lane by lane: the lanes are added up at the end, once
    float largest;     // the largest score so far; -inf before the first
    float slope;       // ALiBi's, times log2 e
    int64_t position;  // the query's position among the keys
};

// Which keys of the tile a row may see: those in [first, last], and of them those whose byte is not 0.
struct RowMask {
    int32_t first, last;
    const uint8_t* bytes;  // [TILE_KEYS]; null: all
};

// What stands between q k^T and the softmax, beyond the scale; see vllm_teach.attention.scores.
struct ScoreRule {
    float scale;        // times log2 e
    float softcap;      // times log2 e; 0: none
    float inverse_cap;  // 1 / softcap. Not scale / softcap, which could be infinite, and infinity times 0 is NaN.
    bool alibi;
};

// scores[TILE_KEYS] := softcap, ALiBi and mask of q k^T, in base 2. `first_key` is the tile's.
inline void modify_scores(float* scores, const ScoreRule& rule, const RowState& row, int64_t first_key, RowMask mask) {
    for (int i = 0; i < SCORE_VECTORS; ++i) {
        Floats s = load<Floats>(scores + i * LANES);
        s = rule.softcap != 0 ? tanh(s * rule.scale * rule.inverse_cap) * rule.softcap : s * rule.scale;
        const Ints key = lane_numbers() + i * LANES;
        if (rule.alibi) {
            const Floats ahead = __builtin_convertvector(key, Floats) + float(first_key - row.position);
            s -= as_floats(as_ints(ahead) & 0x7fffffff) * row.slope;
        }
        Ints visible = (key >= mask.first) & (key <= mask.last);
        if (mask.bytes) visible &= __builtin_convertvector(load<Bytes>(mask.bytes + i * LANES), Ints) != 0;
        store(scores + i * LANES, visible ? s : spread(-INFINITE));
    }
}

inline void store_probabilities(float* to, const Floats* p) {
    for (int i = 0; i < SCORE_VECTORS; ++i) store(to + i * LANES, p[i]);
}

#if defined(__AVX512BF16__)
inline void store_probabilities(uint32_t* to, const Floats* p) {
    for (int i = 0; i < SCORE_VECTORS; i += 2)  // two vectors become one of 16 pairs
        store(to + i / 2 * LANES, (Words)_mm512_cvtne2ps_pbh((__m512)p[i + 1], (__m512)p[i]));
}
#endif

// scores[COUNT, TILE_KEYS] * scale -> probabilities relative to each row's largest score so far, which may rise. `keep`
// gets the factors by which what was summed before must be multiplied. `scores` are scaled in place, so that each has
// one value: recomputed with a fused multiply-add, the largest one could exceed itself. Two loops, so that the rows'
// long chains of dependent instructions, a maximum over lanes and then an exponential, run side by side.
template <class Operand, int COUNT>
inline void update_block(float* scores, float scale, RowState* rows, typename Operand::Element* probabilities,
                         float* keep) {
    Floats shift[COUNT];
    for (int r = 0; r < COUNT; ++r) {
        Floats top = spread(-INFINITE);
#pragma GCC unroll 16
        for (int i = 0; i < SCORE_VECTORS; ++i) {
            float* const from = scores + r * TILE_KEYS + i * LANES;
            const Floats s = load<Floats>(from) * scale;
            store(from, s);
            top = larger(top, s);
        }
        const Floats before = spread(rows[r].largest), now = largest_lane(larger(before, top));
        shift[r] = now == -INFINITE ? Floats{} : now;  // with no key seen, -inf - -inf would be NaN
        rows[r].largest = now[0];
        keep[r] = exp2_nonpositive(before - shift[r])[0];
    }
    for (int r = 0; r < COUNT; ++r) {
        Floats p[SCORE_VECTORS], sum{};
#pragma GCC unroll 16
        for (int i = 0; i < SCORE_VECTORS; ++i) {
            p[i] = exp2_nonpositive(load<Floats>(scores + r * TILE_KEYS + i * LANES) - shift[r]);
            sum += p[i];
        }
        store_probabilities(probabilities + r * (TILE_KEYS / Operand::VALUES), p);
        rows[r].sum = rows[r].sum * keep[r] + sum;
    }
}
