// One work item: a tile of queries against all tiles of keys that it visits (FlashAttention-2, algorithm 1).
#pragma once

#include <cmath>

#include "few_rows.h"
#include "packed_rows.h"
#include "softmax.h"

// The memory that one thread works in, cut from one piece.
template <class T, class Element>
struct Workspace {
    Element* queries;        // [rows, depth]
    Element* keys;           // [depth, TILE_KEYS]
    Element* values;         // [TILE_KEYS, width]
    Element* probabilities;  // [ROWS, TILE_KEYS]
    float* scores;           // [ROWS, TILE_KEYS]
    float* sums;             // [rows, width], the numerators
    RowState* states;        // [rows]
    T* unpacked_keys;        // [TILE_KEYS, width]
    T* unpacked_values;      // [TILE_KEYS, width]

    // Returns the bytes needed; with `base` null, that is all it is good for.
    int64_t lay_out(char* base, int64_t rows, int64_t depth, int64_t width) {
        int64_t used = 0;
        auto take = [&](auto*& pointer, int64_t count) {
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
            used = round_up(used + count * int64_t(sizeof(*pointer)), 64);
        };
        take(queries, rows * depth);
        take(keys, depth * TILE_KEYS);
        take(values, TILE_KEYS * width);
        take(probabilities, ROWS * TILE_KEYS);
        take(scores, ROWS * TILE_KEYS);
        take(sums, rows * width);
        take(states, rows);
        take(unpacked_keys, TILE_KEYS * width);
        take(unpacked_values, TILE_KEYS * width);
        return used;
    }
};

template <class T>
class Attention {
    using Operand = typename OperandFor<T>::Type;
    using Element = typename Operand::Element;
    using Work = Workspace<T, Element>;

   public:
    explicit Attention(const Call& call)
        : call_(call),
          group_(call.q_heads / call.kv_heads),
          inner_(elements<Operand>(call.head_dim)),
          depth_(round_up(inner_, LANES)),
          width_(round_up(call.head_dim, LANES)),
          stored_(call.scale_place ? call.scale_place + 1 : call.head_dim),
          rule_{float(call.scale * LOG2_E), float(call.softcap * LOG2_E),
                call.softcap != 0 ? float(1 / (call.softcap * LOG2_E)) : 0, call.slopes != nullptr} {}

    int64_t workspace_bytes(int64_t most_rows) const {
        return Work{}.lay_out(nullptr, round_up(most_rows, ROWS), depth_, width_);
    }

    // The floats of a part: for each row the numerators, the largest score and the denominator.
    int64_t part_size(int64_t most_rows) const { return most_rows * (width_ + 2); }

    // Does one item in the thread's own `memory`. Its result goes to the output, or to its place in `parts`.
    void attend(const Item& item, char* memory, float* parts, int64_t part_size) const {
        const Sequence& s = call_.sequences[item.sequence];
        const int64_t rows = item.queries * group_, padded = round_up(rows, ROWS);
        Work w;
        w.lay_out(memory, padded, depth_, width_);
        start(item, s, rows, padded, w);
        switch (rows) {
            case 1: visit_tiles<1>(item, s, rows, w); break;
            case 2: visit_tiles<2>(item, s, rows, w); break;
            case 3: visit_tiles<3>(item, s, rows, w); break;
            case 4: visit_tiles<4>(item, s, rows, w); break;
            default: visit_tiles<0>(item, s, rows, w);
        }
        if (item.part < 0)
            finish(item, s, rows, w);
        else
            keep_part(rows, w, parts + item.part * part_size);
    }

    // Adds up the parts of one query tile: each weighs 2^(its largest score - the largest of all).
    void merge(const Merge& merge, const float* parts, int64_t part_size, float* row_sums) const {
        const Sequence& s = call_.sequences[merge.item.sequence];
        const int64_t rows = merge.item.queries * group_;
        for (int64_t r = 0; r < rows; ++r) {
            const float* first = parts + merge.first_part * part_size + r * (width_ + 2);
            float largest = -INFINITE, sum = 0;
            for (int64_t i = 0; i < merge.count; ++i) largest = std::fmax(largest, first[i * part_size + width_]);
            std::memset(row_sums, 0, width_ * sizeof(float));
            for (int64_t i = 0; i < merge.count; ++i) {
                const float* part = first + i * part_size;
                const float weight = largest == -INFINITE ? 0 : std::exp2(part[width_] - largest);
                sum += weight * part[width_ + 1];
                for (int64_t c = 0; c < width_; c += LANES)
                    store(row_sums + c, load<Floats>(row_sums + c) + load<Floats>(part + c) * weight);
            }
            write_row(merge.item, s, r, row_sums, largest, sum);
        }
    }

   private:
    int64_t query_of(const Item& item, int64_t row) const { return item.first_query + row / group_; }
    int64_t head_of(const Item& item, int64_t row) const { return item.kv_head * group_ + row % group_; }

    // Pack the queries and set the sums to 0. Neighbouring rows are the heads of one query, then the next query's, so
    // that a block of rows has nearly one position. Padding rows repeat the last one; nobody reads their result.
    void start(const Item& item, const Sequence& s, int64_t rows, int64_t padded, Work& w) const {
        for (int64_t r = 0; r < padded; ++r) {
            const int64_t row = std::min(r, rows - 1), query = query_of(item, row), head = head_of(item, row);
            const T* from = static_cast<const T*>(call_.q) + s.first_q;
            pack_query<Operand>(from + query * call_.q_stride.row + head * call_.q_stride.head, call_.head_dim,
                                w.queries + r * depth_);
            const float slope = call_.slopes ? call_.slopes[s.first_slope + head] * LOG2_E : 0;
            w.states[r] = {Floats{}, -INFINITE, slope, query + s.kv_len - s.q_len};
        }
        std::memset(w.sums, 0, padded * width_ * sizeof(float));
    }

    // All tiles of an item. The next one is looked up, and fetched, before the present one is worked on.
    // FEW: the item has just that many rows, so keys and values are read from where they lie, or were unpacked; 0: it has
    // more.
    template <int FEW>
    void visit_tiles(const Item& item, const Sequence& s, int64_t rows, Work& w) const {
        KeyTile<T> next;
        if (item.first_tile < item.end_tile) next = find_tile<T>(call_, item, s, item.first_tile);
        for (int64_t entry = item.first_tile; entry < item.end_tile; ++entry) {
            KeyTile<T> tile = next;
            const bool packed = call_.scale_place != 0;
            if (packed) {
                unpack_rows(tile.keys, tile.n, call_.head_dim, call_.scale_place, w.unpacked_keys, width_);
                unpack_rows(tile.values, tile.n, call_.head_dim, call_.scale_place, w.unpacked_values, width_);
            }
            if (FEW == 0) {
                pack_keys<Operand>(tile.keys, tile.n, call_.head_dim, w.keys);
                pack_values(Operand{}, tile.values, tile.n, call_.head_dim, w.values);
            }
            if (entry + 1 < item.end_tile) next = find_tile<T>(call_, item, s, entry + 1);
            for (int64_t j = 0; (FEW == 0 || packed) && j < TILE_KEYS; ++j) {
                prefetch_row(next.keys[j], stored_);
                prefetch_row(next.values[j], stored_);
            }
            const KeyTile<T>& ahead = packed ? tile : next;  // what is fetched in between: fetched already, if packed
            for (int64_t block = 0; block < rows; block += ROWS) visit_block<FEW>(block, rows, tile, ahead, w);
        }
    }

    // One tile of keys for a block of rows of queries: scores, softmax, and the product with the values.
    template <int FEW>
    void visit_block(int64_t block, int64_t rows, const KeyTile<T>& tile, const KeyTile<T>& next, Work& w) const {
        constexpr int COUNT = FEW ? FEW : ROWS;
        RowState* states = w.states + block;
        // Positions rise with the rows, so the first and the last row tell what all of them see of the tile.
        const int64_t first = states[0].position - tile.first_key, last = states[COUNT - 1].position - tile.first_key;
        if (first - call_.left >= tile.n || last + call_.right < 0) return;
        Shown seen = Shown::ALL;
        if (tile.masks) {
            const int64_t first_query = block / group_, last_query = std::min(block + COUNT - 1, rows - 1) / group_;
            seen = shown(tile.masks + first_query * TILE_KEYS, last_query - first_query + 1);
            if (seen == Shown::NOTHING) return;
        }
        const bool whole = seen == Shown::ALL && tile.n == TILE_KEYS && last - call_.left <= 0 &&
                           first + call_.right >= TILE_KEYS - 1;
        const bool plain = whole && rule_.softcap == 0 && !rule_.alibi;

        if constexpr (FEW)
            score_few_rows<Operand, FEW>(w.queries, depth_, tile.keys, tile.n, call_.head_dim, tile.values, w.scores);
        else
            multiply<Operand>(w.queries + block * depth_, depth_, w.keys, TILE_KEYS, inner_, SCORE_VECTORS, w.scores,
                              TILE_KEYS, nullptr);
        for (int r = 0; r < COUNT && !plain; ++r)
            modify_scores(w.scores + r * TILE_KEYS, rule_, states[r], tile.first_key,
                          mask_of(states[r], std::min(block + r, rows - 1), tile));
        float keep[COUNT];
        const float scale = plain ? rule_.scale : 1.0f;
        if constexpr (FEW) {
            float* const probabilities = w.scores;  // they take the scores' place
            update_block<Singles, COUNT>(w.scores, scale, states, probabilities, keep);
            add_few_rows<FEW>(probabilities, tile.values, tile.n, call_.head_dim, next.keys, w.sums, width_, keep);
        } else {
            update_block<Operand, COUNT>(w.scores, scale, states, w.probabilities, keep);
            multiply<Operand>(w.probabilities, TILE_KEYS / Operand::VALUES, w.values, width_,
                              TILE_KEYS / Operand::VALUES, width_ / LANES, w.sums + block * width_, width_, keep);
        }
    }

    RowMask mask_of(const RowState& state, int64_t row, const KeyTile<T>& tile) const {
        const int64_t position = state.position - tile.first_key;
        return {int32_t(std::clamp<int64_t>(position - call_.left, 0, TILE_KEYS)),
                int32_t(std::clamp<int64_t>(position + call_.right, -1, tile.n - 1)),
                tile.masks ? tile.masks + row / group_ * TILE_KEYS : nullptr};
    }

    void finish(const Item& item, const Sequence& s, int64_t rows, const Work& w) const {
        for (int64_t r = 0; r < rows; ++r)
            write_row(item, s, r, w.sums + r * width_, w.states[r].largest, sum_of_lanes(w.states[r].sum)[0]);
    }

    void keep_part(int64_t rows, const Work& w, float* part) const {
        for (int64_t r = 0; r < rows; ++r, part += width_ + 2) {
            std::memcpy(part, w.sums + r * width_, width_ * sizeof(float));
            part[width_] = w.states[r].largest;
            part[width_ + 1] = sum_of_lanes(w.states[r].sum)[0];
        }
    }

    // out = numerators / denominator, rounded once; a row that has seen no key gives 0 and a log-sum-exp of -inf.
    void write_row(const Item& item, const Sequence& s, int64_t row, const float* sums, float largest,
                   float sum) const {
        const int64_t query = query_of(item, row), head = head_of(item, row);
        T* out = static_cast<T*>(call_.out) + s.first_out + query * call_.out_stride.row + head * call_.out_stride.head;
        const float inverse = sum == 0 ? 0 : 1 / sum;
        for (int64_t c = 0; c < call_.head_dim; c += LANES)
            store_some(out + c, load<Floats>(sums + c) * inverse, call_.head_dim - c);
        const double ln_2 = 0.6931471805599453;
        call_.lse[s.first_lse + head * call_.lse_head_stride + query] = (largest + std::log2(double(sum))) * ln_2;
    }

    const Call& call_;
    const int64_t group_;
    const int64_t inner_;   // elements of a query or key
    const int64_t depth_;   // the same, rounded up to whole vectors
    const int64_t width_;   // numbers of a value, rounded up to whole vectors
    const int64_t stored_;  // elements of a key or value where it lies
    const ScoreRule rule_;
};
