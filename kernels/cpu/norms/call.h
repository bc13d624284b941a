// What Python hands to the kernels: one norm over the rows of a matrix as plain numbers and pointers.
//
// Rows hold `size` numbers that follow one another, of the type that the function's name says, as have weight and bias.
#pragma once

#include <cstdint>

struct NormCall {
    const void* x;         // row r lies at x + r * x_stride
    const void* residual;  // the same with its own stride; null: none is added
    const void* weight;    // [size]; null: 1
    const void* bias;      // [size]; null: 0. RMSNorm has none
    void* out;             // [rows, size]
    void* sum;             // [rows, size]: gets x + residual, which is what is normalised then

    int64_t x_stride, residual_stride;
    int64_t rows, size;
    double eps;
    int64_t threads;
};
