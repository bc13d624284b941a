// Keys and values of an INT8 cache (vllm_teach/kvcache/quantized_storage.py) as numbers, one tile at a time.
//
// A row begins with head_dim codes, and its element `scale_place` is the scale. The numbers of a tile stay in the
// first-level cache and are what an uncompressed cache would hold: from here on nothing differs.
#pragma once

#include "key_tile.h"

typedef int8_t Codes __attribute__((vector_size(LANES)));

// LANES codes as float32.
inline Floats load_codes(const int8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)load<Codes>(from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<Codes>(from), Ints), Floats);
#endif
}

// Writes the numbers of the tile's `n` rows to `to`, [TILE_KEYS, width], and lets `rows` point there.
template <class T>
inline void unpack_rows(const T** rows, int64_t n, int64_t head_dim, int64_t scale_place, T* to, int64_t width) {
    for (int64_t j = 0; j < n; ++j, to += width) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(rows[j]);
        const float scale = load_some(rows[j] + scale_place, 1)[0];
        int64_t c = 0;
        for (; c + LANES <= head_dim; c += LANES) store_floats(to + c, load_codes(codes + c) * scale);
        if (c < head_dim) {
            int8_t last[LANES] = {};
            std::memcpy(last, codes + c, head_dim - c);
            store_floats(to + c, load_codes(last) * scale);
        }
        rows[j] = to;
    }
    std::fill(rows + n, rows + TILE_KEYS, rows[n - 1]);
}
