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

// One element as float32, in all lanes.
inline Floats spread_element(const float* from) { return spread(*from); }
inline Floats spread_element(const BFloat16* from) { return (Floats)(spread(uint32_t(from->bits)) << 16); }
inline Floats spread_element(const Float16* from) {
    const Halves bits = from->bits - Halves{};
    return load_floats(reinterpret_cast<const Float16*>(&bits));
}

// LANES numbers rounded to elements.
template <class T>
inline void store_numbers(T* to, Floats x) {
    store_floats(to, x);
}

#if defined(__AVX512BF16__)
// One instruction instead of seven. It takes what is below the normal numbers, 1e-38, for 0.
inline void store_numbers(BFloat16* to, Floats x) { store(to, (Halves)_mm512_cvtneps_pbh((__m512)x)); }
#endif

// Writes the numbers of the tile's `n` rows to `to`, [TILE_KEYS, width], and lets `rows` point there.
template <class T>
inline void unpack_rows(const T** rows, int64_t n, int64_t head_dim, int64_t scale_place, T* to, int64_t width) {
    for (int64_t j = 0; j < n; ++j, to += width) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(rows[j]);
        const Floats scale = spread_element(rows[j] + scale_place);
        int64_t c = 0;
        for (; c + LANES <= head_dim; c += LANES) store_numbers(to + c, load_codes(codes + c) * scale);
        if (c < head_dim) {
            int8_t last[LANES] = {};
            std::memcpy(last, codes + c, head_dim - c);
            store_numbers(to + c, load_codes(last) * scale);
        }
        rows[j] = to;
    }
    std::fill(rows + n, rows + TILE_KEYS, rows[n - 1]);
}
