// The two matrix products of attention, as one register-blocked kernel.
//
// A block of ROWS x (VECTORS * LANES) sums stays in registers while the inner dimension passes by: each step loads
// VECTORS vectors of b, spreads ROWS numbers of a, and multiplies each with each. That is ROWS * VECTORS multiply-adds
// for ROWS + VECTORS loads, enough for the arithmetic units, and not the loads, to set the pace.
#pragma once

#include "../elements.h"

#if defined(__AVX512F__)
constexpr int ROWS = 6, MOST_VECTORS = 4;  // 24 sums, 4 vectors of b, 1 of a: 29 of 32 registers
#else
constexpr int ROWS = 6, MOST_VECTORS = 2;  // 12 sums, 2 vectors of b, 1 of a: 15 of 16 registers
#endif

// An operand is how a matrix element is held, and how two vectors of them are multiplied and added to sums.
//
// Singles: an element is one float32.
struct Singles {
    using Element = float;
    static constexpr int VALUES = 1;
    static Floats multiply_add(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }
};

// Pairs: an element is two neighbours of the inner dimension in bfloat16. One instruction multiplies two pairs and adds
// both products to a float32 sum: twice the work, half the bytes.
#if defined(__AVX512BF16__)
struct Pairs {
    using Element = uint32_t;
    static constexpr int VALUES = 2;
    static Floats multiply_add(Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#endif

// The operand that products of tensors of type T are computed with.
template <class T>
struct OperandFor {
    using Type = Singles;
};
#if defined(__AVX512BF16__)
template <>
struct OperandFor<BFloat16> {
    using Type = Pairs;
};
#endif

// c = c * keep + a b for ROWS rows and VECTORS vectors of columns. a is [ROWS, inner] with a_stride from row to row, b
// [inner, ...] with b_stride, c [ROWS, ...] with c_stride. `keep` has one factor for each row; null: c = a b.
template <class Operand, int VECTORS>
inline void multiply_block(const typename Operand::Element* a, int64_t a_stride, const typename Operand::Element* b,
                           int64_t b_stride, int64_t inner, float* c, int64_t c_stride, const float* keep) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = keep ? load<Floats>(c + r * c_stride + v * LANES) * keep[r] : Floats{};

    for (int64_t i = 0; i < inner; ++i) {
        Words b_row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) b_row[v] = load<Words>(b + i * b_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                sums[r][v] = Operand::multiply_add(sums[r][v], (Words)spread(a[r * a_stride + i]), b_row[v]);
    }

#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
}

// The same for any number of vectors of columns: as many as fit into registers at a time, then half as many, then one.
template <class Operand, int VECTORS = MOST_VECTORS>
inline void multiply(const typename Operand::Element* a, int64_t a_stride, const typename Operand::Element* b,
                     int64_t b_stride, int64_t inner, int64_t vectors, float* c, int64_t c_stride, const float* keep) {
    for (; vectors >= VECTORS; vectors -= VECTORS, b += VECTORS * LANES, c += VECTORS * LANES)
        multiply_block<Operand, VECTORS>(a, a_stride, b, b_stride, inner, c, c_stride, keep);
    if constexpr (VECTORS > 1)
        multiply<Operand, VECTORS / 2>(a, a_stride, b, b_stride, inner, vectors, c, c_stride, keep);
}
