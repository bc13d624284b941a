// Vectors of the machine's width, and what they can do. The kernels are written with these alone, and so compile for
// every instruction set: GCC and Clang turn + and * on them into the instructions of the target.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;  // 32 registers
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;  // 16 registers
#else
constexpr int VECTOR_BYTES = 16;  // SSE2, NEON and others
#endif
constexpr int LANES = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));

constexpr float INFINITE = __builtin_inff();

// Read or write a whole vector at any address; memcpy of a fixed size becomes one instruction.
template <class Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
inline void store(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

// Write a whole vector to a multiple of its own size past the caches, where there is such a store: for what is too much
// to stay in them until it is read. A plain store would read the old values first. Ends with `finish_streaming`.
template <class Vector>
inline void stream(void* to, Vector vector) {
#if defined(__AVX512F__)
    if constexpr (sizeof vector == 64) return _mm512_stream_si512((__m512i*)to, (__m512i)vector);
#endif
#if defined(__AVX__)
    if constexpr (sizeof vector == 32) return _mm256_stream_si256((__m256i*)to, (__m256i)vector);
#endif
#if defined(__SSE2__)
    if constexpr (sizeof vector == 16) return _mm_stream_si128((__m128i*)to, (__m128i)vector);
#endif
    store(to, vector);
}

// Let other threads see what this one has streamed.
inline void finish_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// The same value in all lanes. x - 0 is x for every x; x + 0 is not for -0, and would cost an addition.
inline Floats spread(float x) { return x - Floats{}; }
inline Ints spread(int32_t x) { return x - Ints{}; }
inline Words spread(uint32_t x) { return x - Words{}; }

inline Floats as_floats(Ints bits) { return (Floats)bits; }
inline Ints as_ints(Floats floats) { return (Ints)floats; }

// The larger of two, lane by lane; the second where one of them is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);  // GCC 12 makes two instructions of the line below
#else
    return a > b ? a : b;
#endif
}

// 0, 1, 2, ... in the lanes.
template <int... I>
inline Ints count_up(std::integer_sequence<int, I...>) {
    return Ints{I...};
}
inline Ints lane_numbers() { return count_up(std::make_integer_sequence<int, LANES>{}); }

// SHUFFLE(a, b, i...): lane n of the result is lane i_n of a, or lane i_n - LANES of b.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE  // GCC before 12
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <int DISTANCE, int... I>
inline Floats lanes_at_distance(Floats a, std::integer_sequence<int, I...>) {
    return SHUFFLE(a, a, (I ^ DISTANCE)...);
}

// The largest lane, or the sum of all lanes, in every lane: log2(LANES) steps, each with the lanes DISTANCE away.
template <int DISTANCE = LANES / 2>
inline Floats largest_lane(Floats a) {
    a = larger(a, lanes_at_distance<DISTANCE>(a, std::make_integer_sequence<int, LANES>{}));
    if constexpr (DISTANCE > 1) return largest_lane<DISTANCE / 2>(a);
    return a;
}

template <int DISTANCE = LANES / 2>
inline Floats sum_of_lanes(Floats a) {
    a += lanes_at_distance<DISTANCE>(a, std::make_integer_sequence<int, LANES>{});
    if constexpr (DISTANCE > 1) return sum_of_lanes<DISTANCE / 2>(a);
    return a;
}

// One step of a transposition: of each pair of rows DISTANCE apart, swap the off-diagonal squares of that size.
template <int DISTANCE, int... I>
inline void swap_squares(Words* rows, std::integer_sequence<int, I...>) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) {
        if (r & DISTANCE) continue;
        Words a = rows[r], b = rows[r + DISTANCE];
        rows[r] = SHUFFLE(a, b, (I & DISTANCE ? LANES + I - DISTANCE : I)...);
        rows[r + DISTANCE] = SHUFFLE(a, b, (I & DISTANCE ? LANES + I : I + DISTANCE)...);
    }
}

// Transpose LANES vectors in place: log2(LANES) rounds of swaps, in registers.
template <int DISTANCE = LANES / 2>
inline void transpose(Words* rows) {
    swap_squares<DISTANCE>(rows, std::make_integer_sequence<int, LANES>{});
    if constexpr (DISTANCE > 1) transpose<DISTANCE / 2>(rows);
}
