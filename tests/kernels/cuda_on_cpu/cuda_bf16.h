#pragma once

#include "cuda_on_cpu.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
    const uint32_t word = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    if (x != x) return {uint16_t(word >> 16 | 0x40)};
    return {uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16)};  // to the nearest, to even in the middle
}
