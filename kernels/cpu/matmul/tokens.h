// A block of tokens in the order in which `multiply` reads it.
#pragma once

#include "unpack.h"

// The input of TOKENS tokens side by side, and what the zeros of the weight are multiplied with.
struct TokenBlock {
    const uint32_t* elements;  // [in / VALUES][TOKENS]
    const float* sums;         // [groups][TOKENS], each over the inputs of a group
};

// Elements of the operand from numbers of type T that lie side by side.
template <class T>
inline void copy_elements(Singles, const T* row, int64_t in, uint32_t* to, int64_t step) {
    for (int64_t i = 0; i < in; i += LANES) {
        float some[LANES];
        store(some, load_some(row + i, in - i));
        for (int64_t j = 0; j < std::min<int64_t>(LANES, in - i); ++j) std::memcpy(to + (i + j) * step, some + j, 4);
    }
}

#if defined(__AVX512BF16__)
inline void copy_elements(Pairs, const BFloat16* row, int64_t in, uint32_t* to, int64_t step) {
    if (step == 1) return void(std::memcpy(to, row, in * sizeof *row));
    for (int64_t i = 0; i < in / 2; ++i) std::memcpy(to + i * step, row + 2 * i, 4);
}
#endif

template <class T>
inline float sum_of(const T* row, int64_t count) {
    Floats sum{};
    for (int64_t i = 0; i < count; i += LANES) sum += load_some(row + i, count - i);
    return sum_of_lanes(sum)[0];
}

// Lay out `count` tokens, the first of which starts at `x`, as a block of `width`, the missing ones 0. `row` is room
// for one token.
template <class Operand, class T>
inline void pack_tokens(const Weight& weight, const T* x, int64_t stride, int64_t count, int64_t width,
                        uint32_t* elements, float* sums, T* row) {
    const int64_t groups = weight.in / weight.group, inner = weight.in / Operand::VALUES;
    if (count < width) {
        std::memset(elements, 0, inner * width * sizeof *elements);
        std::memset(sums, 0, groups * width * sizeof *sums);
    }
    for (int64_t t = 0; t < count; ++t, x += stride) {
        const T* from = x;
        if (weight.columns) {
            for (int64_t i = 0; i < weight.in; ++i) row[i] = x[weight.columns[i]];
            from = row;
        }
        copy_elements(Operand{}, from, weight.in, elements + t, width);
        for (int64_t g = 0; g < groups; ++g) sums[g * width + t] = sum_of(from + g * weight.group, weight.group);
    }
}
