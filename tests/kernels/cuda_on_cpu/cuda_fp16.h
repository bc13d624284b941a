#pragma once

#include "cuda_on_cpu.h"

struct __half {
    _Float16 value;
};
inline float __half2float(__half x) { return x.value; }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
