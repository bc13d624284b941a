// 2^x and tanh for whole vectors. libm's take one number at a time.
#pragma once

#include "vec.h"

// An n for which 2^n becomes 0: AVX-512's instruction rounds, and without it the exponent field 0 is a zero.
#if defined(__AVX512F__)
constexpr float LEAST_EXPONENT = -200;
#else
constexpr float LEAST_EXPONENT = -127;
#endif

// 2^x for x <= 0, with a relative error below 2e-7; exactly 0 far below, as for -inf, exactly 1 for 0, NaN for NaN.
//
// x = n + f with a whole n and |f| <= 1/2. 2^f is the polynomial 1 + c1 f + ... + c5 f^5 whose largest relative error
// on [-1/2, 1/2] is least: 9e-8 before rounding. 2^n is the float whose exponent field is n + 127.
inline Floats exp2_nonpositive(Floats x) {
    x = larger(spread(LEAST_EXPONENT), x);
    const Floats round = spread(12582912.0f);  // 1.5 * 2^23: a float that large has no bits for fractions
    const Floats shifted = x + round;
    const Floats f = x - (shifted - round);
    Floats p = spread(1.3264727e-3f);
    p = p * f + 9.671513e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.93147e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)(shifted - round));  // p * 2^n
#else
    return p * as_floats((as_ints(shifted) - as_ints(round) + 127) << 23);
#endif
}

// tanh, within 4 units in the last place: x + x^3 * polynomial(x^2) (Cephes) near 0, where 1 - 2 / (e^2x + 1) would
// lose digits, and that formula elsewhere.
inline Floats tanh(Floats x) {
    const Floats size = as_floats(as_ints(x) & 0x7fffffff);
    const Floats e = exp2_nonpositive(size * -2.885390082f);  // e^(-2 |x|)
    const Floats far = (1.0f - e) / (1.0f + e);
    const Floats x2 = x * x;
    Floats p = spread(-5.70498872745e-3f);
    p = p * x2 + 2.06390887954e-2f;
    p = p * x2 - 5.37397155531e-2f;
    p = p * x2 + 1.33314422036e-1f;
    p = p * x2 - 3.33332819422e-1f;
    const Floats near = p * x2 * x + x;
    const Floats signed_far = as_floats(as_ints(far) | (as_ints(x) & spread(INT32_MIN)));
    return size < 0.625f ? near : signed_far;
}
