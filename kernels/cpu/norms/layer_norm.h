// LayerNorm (Ba et al. 2016): (x - mean) / sqrt(variance + eps) * weight + bias.
#pragma once

#include "rows.h"

// A row becomes (x * scale - mean - rest) * inverse_deviation. The mean is in two parts: next to a large one, float32
// alone would lose what a small deviation is made of. The scale is 1, but where two huge numbers may lie too far apart.
struct Moments {
    float scale, mean, rest, inverse_deviation;
};

inline Moments moments(double mean, double variance, double eps) {
    const double deviation = std::sqrt(variance + eps);
    const float scale = deviation > 1e30 ? 0x1p-64f : 1;
    const float rounded = float(mean * scale);
    return {scale, rounded, float(mean * scale - rounded), float(1 / (deviation * scale))};
}

// Two passes: a mean, then the deviations from it, whose own mean tells how far off the first one was.
template <class T>
inline Moments moments_of(const T* row, const T* ahead, int64_t size, double eps) {
    const float mean = sums_over(row, ahead, size, [](Floats x) { return x; })[0] / size;
    const auto [sum, squares] = sums_over(
        row, ahead, size, [=](Floats x) { return x - mean; }, [=](Floats x) { return (x - mean) * (x - mean); });
    const float rest = sum / size, variance = squares / size - rest * rest;
    // Deviations below a millionth of the mean are as small as its error, and the difference above loses them.
    if (float32_suffices(variance + float(eps)) && !(variance < 1e-12f * mean * mean))
        return {1, mean, rest, 1 / std::sqrt(variance + float(eps))};

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
            Floats y = (load_some(row + column, count) * m.scale - m.mean - m.rest) * m.inverse_deviation;
            if (weight) y *= load_some(weight + column, count);
            if (bias) y += load_some(bias + column, count);
            write(column, y, count);
        });
    });
}
