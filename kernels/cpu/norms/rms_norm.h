// RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean of x^2 + eps) * weight.
//
// As in transformers, the normalised number is rounded to the elements' type before it is multiplied by the weight.
#pragma once

#include "rows.h"

template <class T>
inline float inverse_rms(const T* row, const T* ahead, int64_t size, double eps) {
    const float square = sums_over(row, ahead, size, [](Floats x) { return x * x; })[0] / size + float(eps);
    if (float32_suffices(square)) return 1 / std::sqrt(square);
    return float(1 / std::sqrt(careful_sum_over(row, size, [](double x) { return x * x; }) / size + eps));
}

template <class T>
inline void rms_norm(const NormCall& call) {
    const T* const weight = static_cast<const T*>(call.weight);
    each_row<T>(call, [=, size = call.size, eps = call.eps](const T* row, const T* ahead, Writer<T> write) {
        const float scale = inverse_rms(row, ahead, size, eps);
        each_vector(size, [=](int64_t column, int64_t count) INLINED {
            Floats y = load_some(row + column, count) * scale;
            if (weight) y = rounded<T>(y) * load_some(weight + column, count);
            write(column, y, count);
        });
    });
}
