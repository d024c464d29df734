// What the toolkit's 16-bit types have for the GPU only: computed in float, rounded once.
// SIMT_DEFINE_HALF(type, pair, ...) gives both <cuda_fp16.h> and <cuda_bf16.h> the same functions.
#pragma once
#include "math.h"

#define SIMT_HALF_FUNCTION(T, T2, to_float, from_float, name, pair_name, expression) \
  SIMT_FN T name(T h) {                                                              \
    const float x = to_float(h);                                                     \
    return from_float(expression);                                                   \
  }                                                                                  \
  SIMT_FN T2 pair_name(T2 h) { return T2(name(T(h.x)), name(T(h.y))); }

// a * b + c in double is exact for these types, so rounding it is the only rounding.
#define SIMT_DEFINE_HALF(T, T2, to_float, from_float, from_double, half2)                \
  SIMT_FN T __hfma(T a, T b, T c) {                                                      \
    return from_double(static_cast<double>(to_float(a)) * to_float(b) + to_float(c));    \
  }                                                                                      \
  SIMT_FN T __hfma_sat(T a, T b, T c) {                                                  \
    return from_float(__saturatef(to_float(__hfma(a, b, c))));                           \
  }                                                                                      \
  SIMT_FN T __hfma_relu(T a, T b, T c) {                                                 \
    return from_float(fmaxf(0.f, to_float(__hfma(a, b, c))));                            \
  }                                                                                      \
  SIMT_FN T2 __hfma2(T2 a, T2 b, T2 c) {                                                 \
    return T2(__hfma(T(a.x), T(b.x), T(c.x)), __hfma(T(a.y), T(b.y), T(c.y)));           \
  }                                                                                      \
  SIMT_FN T2 __hfma2_sat(T2 a, T2 b, T2 c) {                                             \
    return T2(__hfma_sat(T(a.x), T(b.x), T(c.x)), __hfma_sat(T(a.y), T(b.y), T(c.y)));   \
  }                                                                                      \
  SIMT_FN T2 __hfma2_relu(T2 a, T2 b, T2 c) {                                            \
    return T2(__hfma_relu(T(a.x), T(b.x), T(c.x)), __hfma_relu(T(a.y), T(b.y), T(c.y))); \
  }                                                                                      \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hsqrt, h2sqrt, sqrtf(x))               \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hrsqrt, h2rsqrt, 1.f / sqrtf(x))       \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hrcp, h2rcp, 1.f / x)                  \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hexp, h2exp, expf(x))                  \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hexp2, h2exp2, exp2f(x))               \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hexp10, h2exp10, exp10f(x))            \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hlog, h2log, logf(x))                  \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hlog2, h2log2, log2f(x))               \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hlog10, h2log10, log10f(x))            \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hsin, h2sin, sinf(x))                  \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hcos, h2cos, cosf(x))                  \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, htanh, h2tanh, tanhf(x))               \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, htanh_approx, h2tanh_approx, tanhf(x)) \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hceil, h2ceil, ceilf(x))               \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hfloor, h2floor, floorf(x))            \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, htrunc, h2trunc, truncf(x))            \
  SIMT_HALF_FUNCTION(T, T2, to_float, from_float, hrint, h2rint, nearbyintf(x))          \
  SIMT_FN int half2##int_rn(T h) { return static_cast<int>(nearbyintf(to_float(h))); }   \
  SIMT_FN int half2##int_rd(T h) { return static_cast<int>(floorf(to_float(h))); }       \
  SIMT_FN int half2##int_ru(T h) { return static_cast<int>(ceilf(to_float(h))); }        \
  SIMT_FN unsigned half2##uint_rn(T h) { return static_cast<unsigned>(nearbyintf(to_float(h))); }
