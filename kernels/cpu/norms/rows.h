// What both norms do with a row: go through it by vectors, add its residual, sum it up; and the rows over the threads.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "../elements.h"
#include "call.h"

constexpr int64_t LEAST_NUMBERS = 1 << 16;   // of a thread's work; fewer are done before another thread has woken up
constexpr int64_t STREAMED_BYTES = 8 << 20;  // more will not be in the caches any more when it is read
constexpr int64_t ROW_IN_CACHE = 8192;       // numbers of a row that the first-level cache holds
constexpr int64_t SUMMED_NUMBERS = 64 * LANES;  // of a row that are summed up for themselves

// What is called in two places is inlined only when told so; where it is, a count of LANES is known to be that.
#define INLINED __attribute__((always_inline))

// Call f(column, count) for each vector of a row; count < LANES for the last one, when the row ends within it.
template <class F>
INLINED inline void each_vector(int64_t size, F f) {
    int64_t column = 0;
    for (; column + LANES <= size; column += LANES) f(column, int64_t(LANES));
    if (column < size) f(column, size - column);
}

inline Floats first_lanes(Floats x, int64_t count) { return lane_numbers() < int32_t(count) ? x : Floats{}; }

// The sums of each of terms(numbers) over a row. Four of each, as an addition has to wait for the one before it; and of
// so many numbers at a time, as each addition to a large sum is rounded, and those of equal numbers all to one side.
// Fetches the row `ahead` meanwhile.
template <class T, class... Terms>
inline std::array<float, sizeof...(Terms)> sums_over(const T* row, const T* ahead, int64_t size, Terms... terms) {
    constexpr int COUNT = sizeof...(Terms);
    Floats totals[COUNT] = {};
    int64_t column = 0;
    while (column < size) {
        Floats sums[4][COUNT] = {};
        const int64_t end = std::min(size, column + SUMMED_NUMBERS);
        for (; column + 4 * LANES <= end; column += 4 * LANES)
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const Floats x = load_floats(row + column + v * LANES);
                __builtin_prefetch(ahead + column + v * LANES);
                int term = 0;
                ((sums[v][term++] += terms(x)), ...);
            }
        for (; column < end; column += LANES) {
            const int64_t count = std::min<int64_t>(LANES, end - column);
            const Floats x = load_some(row + column, count);
            int term = 0;
            ((sums[0][term++] += first_lanes(terms(x), count)), ...);
        }
        for (int t = 0; t < COUNT; ++t) totals[t] += (sums[0][t] + sums[1][t]) + (sums[2][t] + sums[3][t]);
    }
    std::array<float, COUNT> total;
    for (int t = 0; t < COUNT; ++t) total[t] = sum_of_lanes(totals[t])[0];
    return total;
}

// The same, number by number in float64, for rows that float32 cannot sum up.
template <class T, class Term>
inline double careful_sum_over(const T* row, int64_t size, Term term) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += term(double(load_some(row + i, 1)[0]));
    return sum;
}

// Where float32's squares are trustworthy: not overflown, not lost below the smallest number. False for NaN.
inline bool float32_suffices(float mean_square) { return mean_square > 1e-30f && mean_square < 1e37f; }

// Writes a row; where `streams`, past the caches, and fetches the row `ahead` meanwhile.
template <class T>
struct Writer {
    T* const row;
    const bool streams;
    const T* const ahead;

    void operator()(int64_t column, Floats x, int64_t count) const {
        if (count < LANES) return store_some(row + column, x, count);
        if (!streams) return store_floats(row + column, x);
        stream(row + column, to_elements(row, x));
        __builtin_prefetch(ahead + column);
    }
};

// Whether rows are written past the caches: where the caches could not hold them all, but one fits the first level.
template <class T>
inline bool streams_rows(const NormCall& call) {
    const auto fits = [](const void* start) { return reinterpret_cast<uintptr_t>(start) % VECTOR_BYTES == 0; };
    return call.rows * call.size * int64_t(sizeof(T)) >= STREAMED_BYTES && call.size <= ROW_IN_CACHE &&
           call.size % LANES == 0 && fits(call.out) && fits(call.sum);
}

// row := x + residual, rounded; streamed to `sum` as well where that is another place.
template <class T>
inline void add_rows(const T* x, const T* residual, int64_t size, T* row, T* sum) {
    each_vector(size, [=](int64_t column, int64_t count) INLINED {
        const Floats added = load_some(x + column, count) + load_some(residual + column, count);
        store_some(row + column, added, count);
        if (sum != row) stream(sum + column, to_elements(sum, added));
    });
}

// normalise(row, row ahead, writer of its result) for each row, by one thread, whatever the other rows are: its result
// does not depend on them. As long as a row is computed, the next one of x, and of the residual, is on its way.
template <class T, class Normalise>
inline void each_row(const NormCall& call, Normalise normalise) {
    const int64_t most = std::min(call.rows, call.rows * call.size / LEAST_NUMBERS);
    const int64_t threads = std::clamp<int64_t>(call.threads, 1, std::max<int64_t>(1, most));
    const bool streams = streams_rows<T>(call);
    const auto row_of = [](const void* start, int64_t stride, int64_t r) { return (T*)start + r * stride; };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        alignas(VECTOR_BYTES) T in_cache[ROW_IN_CACHE];  // what is streamed cannot be read again soon
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < call.rows; ++r) {
            const int64_t next = std::min(r + 1, call.rows - 1);
            const T* row = row_of(call.x, call.x_stride, r);
            if (call.residual) {
                T* const sum = row_of(call.sum, call.size, r);
                T* const added = streams ? in_cache : sum;
                add_rows<T>(row, row_of(call.residual, call.residual_stride, r), call.size, added, sum);
                row = added;
            }
            normalise(row, row_of(call.x, call.x_stride, next),
                      Writer<T>{row_of(call.out, call.size, r), streams,
                                row_of(call.residual, call.residual_stride, next)});
        }
        if (streams) finish_streaming();
    }
}
