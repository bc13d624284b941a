// The three element types of tensors, and how they become float32 and come back.
//
// bfloat16 is the upper half of a float32. float16 has 5 exponent bits: processors convert it (F16C), and where they do
// not, we do, on the bits.
#pragma once

#include "vec.h"

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// 16 bits to 32 and back; the upper 16 must be 0. GCC 12 makes five instructions of __builtin_convertvector here.
inline Words widen(Halves x) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}

inline Halves narrow(Words x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#else
    return __builtin_convertvector(x, Halves);
#endif
}

// LANES elements at any address, as float32.
inline Floats load_floats(const float* from) { return load<Floats>(from); }

inline Floats load_floats(const BFloat16* from) {
    return (Floats)(widen(load<Halves>(from)) << 16);
}

inline Floats load_floats(const Float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)load<Halves>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)load<Halves>(from));
#else
    // Shifted into place, the exponent is too small by 127 - 15, also for numbers below the normal ones. Multiplying
    // mends it for all but infinity and NaN, whose exponent field must become all ones.
    const Words half = widen(load<Halves>(from));
    const Floats number = (Floats)((half & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112
    const Words special = (Words)(number >= 65536.0f) & 0x7f800000;
    return (Floats)((Words)number | special | (half & 0x8000) << 16);
#endif
}

// LANES float32 rounded to the nearest element, to even in the middle. What is pointed to only names the type.
inline Floats to_elements(const float*, Floats x) { return x; }

// The float32 whose upper half is x as bfloat16, but for its lower half.
inline Words nearest_bfloat16(Floats x) {
    const Words bits = (Words)x;
    const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
    const Words quiet_nan = bits | 0x400000;  // rounding could carry a NaN to infinity
    return x == x ? rounded : quiet_nan;
}

inline Halves to_elements(const BFloat16*, Floats x) { return narrow(nearest_bfloat16(x) >> 16); }

inline Halves to_elements(const Float16*, Floats x) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const Words sign = (Words)x & 0x80000000u;
    const Words size = (Words)x ^ sign;
    // Below 2^-14, adding 1/2 leaves float16's last bit in the last place of the sum, and the addition rounds.
    const Words small = (Words)((Floats)size + 0.5f) - 0x3f000000u;
    const Words normal = (size - ((127u - 15) << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const Words special = size > 0x7f800000u ? spread(0x7e00u) : spread(0x7c00u);
    Words half = size < 0x38800000u ? small : normal;
    half = size >= 0x47800000u ? special : half;
    return narrow(half | sign >> 16);
#endif
}

template <class T>
inline void store_floats(T* to, Floats x) {
    store(to, to_elements(to, x));
}

// LANES float32 as an element of type T holds them.
template <class T>
inline Floats rounded(Floats x) {
    const auto elements = to_elements((const T*)nullptr, x);
    return load_floats((const T*)&elements);
}

template <>
inline Floats rounded<BFloat16>(Floats x) {
    return (Floats)(nearest_bfloat16(x) & 0xffff0000);
}

// Read and write the first `count` of LANES elements; the others are 0 when read and left alone when written.
template <class T>
inline Floats load_some(const T* from, int64_t count) {
    if (count >= LANES) return load_floats(from);
    T whole[LANES] = {};
    if (count > 0) std::memcpy(whole, from, count * sizeof(T));
    return load_floats(whole);
}

template <class T>
inline void store_some(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store_floats(to, x);
    T whole[LANES];
    store_floats(whole, x);
    std::memcpy(to, whole, count * sizeof(T));
}
