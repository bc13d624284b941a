// The two products for a handful of query rows, as when one token is decoded, straight from where keys and values lie.
//
// `multiply` reads a tile of keys once for every block of rows; with one block, packing the tile would cost more than
// multiplying it. Here each key and value is read once, and memory sets the pace: while the keys of a tile are used,
// its values are fetched (`ahead`), and while these are used, the next tile's keys.
#pragma once

#include "key_tile.h"
#include "pack.h"

// scores[R, TILE_KEYS] = queries[R, depth] k^T for n keys; what lies behind the n-th is 0.
template <class Operand, int R, class T>
inline void score_few_rows(const typename Operand::Element* queries, int64_t depth, const T* const* keys, int64_t n,
                           int64_t head_dim, const T* const* ahead, float* scores) {
    for (int64_t first = 0; first < TILE_KEYS; first += LANES) {
        Words products[R][LANES] = {};  // of one key each, still to be added up over the lanes
        const int64_t here = std::min<int64_t>(LANES, n - first);
        for (int64_t i = 0; i < here; ++i) {
            prefetch_row(ahead[first + i], head_dim);
            Floats sums[R] = {};
            for (int64_t column = 0; column < depth; column += LANES) {
                const Words key = load_elements(Operand{}, keys[first + i], column, head_dim);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    sums[r] = Operand::multiply_add(sums[r], load<Words>(queries + r * depth + column), key);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) products[r][i] = (Words)sums[r];
        }
        for (int r = 0; r < R; ++r) {
            transpose(products[r]);  // now vector i holds lane i of every key
            Floats total{};
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) total += (Floats)products[r][i];
            store(scores + r * TILE_KEYS + first, total);
        }
    }
}

// sums[R, width] = sums * keep + probabilities[R, TILE_KEYS] v for n values, for VECTORS vectors of columns.
template <int R, int VECTORS, class T>
inline void add_columns(const float* probabilities, const T* const* values, int64_t n, int64_t column,
                        int64_t head_dim, const T* const* ahead, float* sums, int64_t width, const float* keep) {
    Floats total[R][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) total[r][v] = load<Floats>(sums + r * width + column + v * LANES) * keep[r];
    for (int64_t j = 0; j < n; ++j) {
        if (column == 0) prefetch_row(ahead[j], head_dim);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t from = column + v * LANES;
            const Floats value = load_some(values[j] + from, head_dim - from);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) total[r][v] += value * probabilities[r * TILE_KEYS + j];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store(sums + r * width + column + v * LANES, total[r][v]);
}

// The same for all columns.
template <int R, class T>
inline void add_few_rows(const float* probabilities, const T* const* values, int64_t n, int64_t head_dim,
                         const T* const* ahead, float* sums, int64_t width, const float* keep) {
    int64_t column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
        add_columns<R, 4>(probabilities, values, n, column, head_dim, ahead, sums, width, keep);
    for (; column < width; column += LANES)
        add_columns<R, 1>(probabilities, values, n, column, head_dim, ahead, sums, width, keep);
}
