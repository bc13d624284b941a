// LayerNorm (Ba et al. 2016): (x - mean) / sqrt(variance + eps) * weight + bias.
#pragma once

#include "rows.h"

// The mean is `mean` + `rest`: next to a large mean, float32 alone would lose what a small deviation is made of.
struct Moments {
    float mean, rest, inverse_deviation;
};

inline Moments moments(double mean, double variance, double eps) {
    const float rounded = float(mean);
    return {rounded, float(mean - rounded), float(1 / std::sqrt(variance + eps))};
}

// Two passes: a mean, then the deviations from it, whose own mean tells how far off the first one was.
template <class T>
inline Moments moments_of(const T* row, const T* ahead, int64_t size, double eps) {
    const float mean = sums_over(row, ahead, size, [](Floats x) { return x; })[0] / size;
    const auto [sum, squares] = sums_over(
        row, ahead, size, [=](Floats x) { return x - mean; }, [=](Floats x) { return (x - mean) * (x - mean); });
    const float rest = sum / size, variance = squares / size - rest * rest;
    // Deviations below a millionth of the mean are as small as the error of the mean, and the difference above loses them.
    if (float32_suffices(variance + float(eps)) && !(variance < 1e-12f * mean * mean))
        return {mean, rest, 1 / std::sqrt(variance + float(eps))};

    const double exact = careful_sum_over(row, size, [](double x) { return x; }) / size;
    return moments(exact, careful_sum_over(row, size, [=](double x) { return (x - exact) * (x - exact); }) / size, eps);
}

template <class T>
inline void layer_norm(const NormCall& call) {
    const T* const weight = static_cast<const T*>(call.weight);
    const T* const bias = static_cast<const T*>(call.bias);
    each_row<T>(call, [=, size = call.size, eps = call.eps](const T* row, const T* ahead, Writer<T> write) {
        const Moments m = moments_of(row, ahead, size, eps);
        each_vector(size, [=](int64_t column, int64_t count) INLINED {
            Floats y = ((load_some(row + column, count) - m.mean) - m.rest) * m.inverse_deviation;
            if (weight) y *= load_some(weight + column, count);
            if (bias) y += load_some(bias + column, count);
            write(column, y, count);
        });
    });
}
