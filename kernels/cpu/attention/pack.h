// Copies of one tile of queries, keys or values in the order in which `multiply` reads them.
//
// A tile of keys is read once for every block of rows, so reordering it once pays. Keys become [head_dim, keys], so
// that a vector holds one coordinate of LANES keys; values stay [keys, head_dim]. Missing keys and coordinates are 0.
#pragma once

#include "call.h"
#include "multiply.h"

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// LANES elements of an operand, from `column` (in elements) of a row of `head_dim` numbers.
template <class T>
inline Words load_elements(Singles, const T* row, int64_t column, int64_t head_dim) {
    return (Words)load_some(row + column, head_dim - column);
}

#if defined(__AVX512BF16__)
inline Words load_elements(Pairs, const BFloat16* row, int64_t column, int64_t head_dim) {
    const int64_t left = head_dim - 2 * column;
    if (left >= 2 * LANES) return load<Words>(row + 2 * column);
    BFloat16 whole[2 * LANES] = {};
    if (left > 0) std::memcpy(whole, row + 2 * column, left * sizeof(BFloat16));
    return load<Words>(whole);
}
#endif

// How many elements hold `values` numbers.
template <class Operand>
inline int64_t elements(int64_t values) {
    return round_up(values, Operand::VALUES) / Operand::VALUES;
}

// One row of queries -> to[depth], padded to whole vectors.
template <class Operand, class T>
inline void pack_query(const T* row, int64_t head_dim, typename Operand::Element* to) {
    for (int64_t column = 0; column < elements<Operand>(head_dim); column += LANES)
        store(to + column, load_elements(Operand{}, row, column, head_dim));
}

// keys[n] rows -> to[depth][TILE_KEYS], by squares of LANES x LANES.
template <class Operand, class T>
inline void pack_keys(const T* const* keys, int64_t n, int64_t head_dim, typename Operand::Element* to) {
    for (int64_t first = 0; first < TILE_KEYS; first += LANES)
        for (int64_t column = 0; column < elements<Operand>(head_dim); column += LANES) {
            Words square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i)
                square[i] = first + i < n ? load_elements(Operand{}, keys[first + i], column, head_dim) : Words{};
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) store(to + (column + i) * TILE_KEYS + first, square[i]);
        }
}

// values[n] rows -> to[TILE_KEYS / VALUES][width], `width` being head_dim rounded up to whole vectors.
template <class T>
inline void pack_values(Singles, const T* const* values, int64_t n, int64_t head_dim, float* to) {
    const int64_t width = round_up(head_dim, LANES);
    for (int64_t j = 0; j < TILE_KEYS; ++j)
        for (int64_t column = 0; column < width; column += LANES)
            store(to + j * width + column, j < n ? load_some(values[j] + column, head_dim - column) : Floats{});
}

#if defined(__AVX512BF16__)
// An element pairs two keys: the lower half is the first one's.
inline void pack_values(Pairs, const BFloat16* const* values, int64_t n, int64_t head_dim, uint32_t* to) {
    const int64_t width = round_up(head_dim, LANES);
    for (int64_t j = 0; j < TILE_KEYS; j += 2)
        for (int64_t column = 0; column < width; column += LANES) {
            // A bfloat16 as float32 has its bits in the upper half.
            const int64_t left = head_dim - column;
            const Words lower = j < n ? (Words)load_some(values[j] + column, left) : Words{};
            const Words upper = j + 1 < n ? (Words)load_some(values[j + 1] + column, left) : Words{};
            store(to + j / 2 * width + column, lower >> 16 | upper);
        }
}
#endif
