// The product of a few vectors of rows with a block of tokens, in registers.
//
// VECTORS * TOKENS sums stay in registers while the inputs pass by. Each word of codes is read from memory and unpacked
// once for all TOKENS. Within a group codes alone are multiplied, as whole numbers that nothing rounds; at its end the
// sum is multiplied by the scale, and the zero, times the sum of the group's inputs, taken off:
//
//   sum over i of scale (code_i - zero) x_i  =  scale (sum over i of code_i x_i  -  zero * sum over i of x_i)
//
// Every sum is added up in the same order whatever VECTORS and TOKENS are, so that a token's result does not depend on
// its neighbours to the last bit.
#pragma once

#include "tokens.h"

// totals[VECTORS][TOKENS][LANES] = the rows of codes[v], the vectors numbers[v] of their panels, times the tokens. What
// lies `ahead` bytes further is fetched meanwhile, as it comes next.
template <class Operand, int BITS, int VECTORS, int TOKENS>
inline void multiply(const Panels<BITS>& panels, const Weight& weight, const uint8_t* const* codes,
                     const int64_t* numbers, int64_t ahead, const TokenBlock& tokens, float* totals) {
    constexpr int WORDS_ELEMENTS = WORD_INPUTS<BITS> / Operand::VALUES;
    const uint32_t* x = tokens.elements;
    std::memset(totals, 0, VECTORS * TOKENS * VECTOR_BYTES);
    int64_t at = 0;  // bytes from a panel's start
    for (int64_t group = 0; group < panels.groups; ++group) {
        Floats sums[VECTORS][TOKENS] = {};
        const int64_t end = at + weight.group / WORD_INPUTS<BITS> * Panels<BITS>::WORD_STEP;
        for (; at < end; at += Panels<BITS>::WORD_STEP, x += WORDS_ELEMENTS * TOKENS) {
            Words words[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                words[v] = load<Words>(codes[v] + at);
                __builtin_prefetch(codes[v] + at + ahead);
            }
#pragma GCC unroll 8
            for (int i = 0; i < WORDS_ELEMENTS; ++i)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) {
                    const Words unpacked = Operand::template unpack<BITS>(words[v], i);
#pragma GCC unroll 24
                    for (int t = 0; t < TOKENS; ++t)
                        sums[v][t] = Operand::multiply_add(sums[v][t], spread(x[i * TOKENS + t]), unpacked);
                }
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const Floats scale = panels.scales(codes[v], numbers[v], group);
            const Floats zero = panels.zeros(codes[v], numbers[v], group);
#pragma GCC unroll 24
            for (int t = 0; t < TOKENS; ++t) {
                float* const total = totals + (v * TOKENS + t) * LANES;
                const Floats sum = sums[v][t] - zero * tokens.sums[group * TOKENS + t];
                store(total, load<Floats>(total) + scale * sum);
            }
        }
    }
}
