// What Python hands to the kernel: a packed weight, and one product with it, as plain numbers and pointers.
#pragma once

#include <cstdint>

// A weight [out, in] of small integers, in panels of PANEL_ROWS rows. The last one is filled up with zeros. A panel is
// one run of bytes, in which follow one another:
//
//   codes   [in / inputs of a word][PANEL_ROWS] words of 32 bits: in each, the codes of neighbouring inputs of a row.
//           A code c stands there as c - 2^(bits - 1) in two's complement; see unpack.h for which bits are whose.
//   scales  [groups][PANEL_ROWS] float16
//   zeros   [groups][PANEL_ROWS] bytes: the codes that stand for 0
//
// and then nothing up to a multiple of 64 bytes. w[o, i] = scale * (code - zero), those of row o and input i's group.
struct Weight {
    const uint8_t* panels;
    const int32_t* columns;  // the weight's input i is column columns[i] of x; null: column i
    int64_t bits;            // 4 or 8
    int64_t in, out;
    int64_t group;  // how many neighbouring inputs have one scale; a multiple of 8
};

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// out[tokens, weight.out] = x[tokens, weight.in] w^T + bias, with float32 sums, rounded once. `gated`: the first half
// of the rows are the gates of the other half, and out[tokens, weight.out / 2] = silu(gate) * other. weight.out is then
// a multiple of 2 * PANEL_ROWS.
struct Call {
    const void* x;
    void* out;
    const float* bias;         // [weight.out]; null: none
    int64_t x_type, out_type;  // a Type each
    int64_t x_stride;          // elements from one token to the next; those of one token follow one another
    int64_t tokens;
    int64_t gated;
    int64_t threads;
};

constexpr int64_t PANEL_ROWS = 16;
