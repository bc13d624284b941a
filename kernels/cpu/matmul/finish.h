// From float32 totals to the output: bias, gate, rounding.
#pragma once

#include "../functions.h"
#include "call.h"
#include "../elements.h"

// x / (1 + e^-x), by e^-|x|, which cannot overflow.
inline Floats silu(Floats x) {
    const Floats size = as_floats(as_ints(x) & 0x7fffffff);
    const Floats e = exp2_nonpositive(size * -1.4426950408889634f);
    return x * (x < 0.0f ? e : spread(1.0f)) / (1.0f + e);
}

// Write the first `count` of LANES numbers to `out`, from element `at` on.
inline void store_as(int64_t type, void* out, int64_t at, Floats x, int64_t count) {
    switch (type) {
        case FLOAT32: return store_some(static_cast<float*>(out) + at, x, count);
        case BFLOAT16: return store_some(static_cast<BFloat16*>(out) + at, x, count);
        default: return store_some(static_cast<Float16*>(out) + at, x, count);
    }
}
