// Device maths functions that the C library does not have. The fast ones (__expf) are computed
// exactly: on the CPU machine a kernel is as accurate as it can be.
#pragma once
#include <math.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "machine.h"

// ---- fast forms ----
// Macros, because the C library declares some of these very names for itself.
#define __expf(x) ::expf(x)
#define __exp10f(x) ::exp10f(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __log10f(x) ::log10f(x)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)
#define __tanf(x) ::tanf(x)
#define __powf(x, y) ::powf(x, y)
#define __sincosf(x, s, c) ::sincosf(x, s, c)
SIMT_FN float __fdividef(float a, float b) { return a / b; }
#define __tanhf(x) ::tanhf(x)
SIMT_FN float __saturatef(float x) { return !(x > 0) ? 0.f : x > 1 ? 1.f : x; }

// ---- functions beyond the C library ----
SIMT_FN float rsqrtf(float x) { return 1.f / sqrtf(x); }
SIMT_FN double rsqrt(double x) { return 1. / sqrt(x); }
SIMT_FN float rcbrtf(float x) { return 1.f / cbrtf(x); }
SIMT_FN float sinpif(float x) { return static_cast<float>(sin(M_PI * static_cast<double>(x))); }
SIMT_FN float cospif(float x) { return static_cast<float>(cos(M_PI * static_cast<double>(x))); }
SIMT_FN double sinpi(double x) { return sin(M_PI * x); }
SIMT_FN double cospi(double x) { return cos(M_PI * x); }
SIMT_FN void sincospif(float x, float* s, float* c) {
  *s = sinpif(x);
  *c = cospif(x);
}
SIMT_FN double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
SIMT_FN float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }
SIMT_FN float fdividef(float a, float b) { return a / b; }
SIMT_FN float norm3df(float a, float b, float c) { return sqrtf(a * a + b * b + c * c); }
SIMT_FN float norm4df(float a, float b, float c, float d) {
  return sqrtf(a * a + b * b + c * c + d * d);
}
SIMT_FN float rnorm3df(float a, float b, float c) { return 1.f / norm3df(a, b, c); }
SIMT_FN float rhypotf(float a, float b) { return 1.f / hypotf(a, b); }

// ---- one rounding, to nearest ----
SIMT_FN float __fadd_rn(float a, float b) { return a + b; }
SIMT_FN float __fsub_rn(float a, float b) { return a - b; }
SIMT_FN float __fmul_rn(float a, float b) { return a * b; }
SIMT_FN float __fdiv_rn(float a, float b) { return a / b; }
SIMT_FN float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_FN float __fsqrt_rn(float x) { return sqrtf(x); }
SIMT_FN float __frcp_rn(float x) { return 1.f / x; }
SIMT_FN float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
SIMT_FN double __dadd_rn(double a, double b) { return a + b; }
SIMT_FN double __dsub_rn(double a, double b) { return a - b; }
SIMT_FN double __dmul_rn(double a, double b) { return a * b; }
SIMT_FN double __ddiv_rn(double a, double b) { return a / b; }
SIMT_FN double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
SIMT_FN double __dsqrt_rn(double x) { return sqrt(x); }
SIMT_FN double __drcp_rn(double x) { return 1. / x; }

// ---- conversions ----
namespace simt {
// What does not fit becomes the nearest number that does, and NaN becomes 0, as on the GPU.
template <class Integer>
SIMT_FN Integer to_integer(double x) {
  using Limits = std::numeric_limits<Integer>;
  if (!(x > static_cast<double>(Limits::min()))) return x != x ? 0 : Limits::min();
  return x < static_cast<double>(Limits::max()) ? static_cast<Integer>(x) : Limits::max();
}
}  // namespace simt

#define SIMT_CONVERSIONS(Float, Integer, float_name, integer_name) \
  SIMT_FN Integer __##float_name##2##integer_name##_rn(Float x) {  \
    return ::simt::to_integer<Integer>(nearbyint(x));              \
  }                                                                \
  SIMT_FN Integer __##float_name##2##integer_name##_rz(Float x) {  \
    return ::simt::to_integer<Integer>(trunc(x));                  \
  }                                                                \
  SIMT_FN Integer __##float_name##2##integer_name##_rd(Float x) {  \
    return ::simt::to_integer<Integer>(floor(x));                  \
  }                                                                \
  SIMT_FN Integer __##float_name##2##integer_name##_ru(Float x) {  \
    return ::simt::to_integer<Integer>(ceil(x));                   \
  }                                                                \
  SIMT_FN Float __##integer_name##2##float_name##_rn(Integer x) { return static_cast<Float>(x); }
SIMT_CONVERSIONS(float, int, float, int)
SIMT_CONVERSIONS(float, unsigned, float, uint)
SIMT_CONVERSIONS(float, long long, float, ll)
SIMT_CONVERSIONS(float, unsigned long long, float, ull)
SIMT_CONVERSIONS(double, int, double, int)
SIMT_CONVERSIONS(double, unsigned, double, uint)
SIMT_CONVERSIONS(double, long long, double, ll)
SIMT_CONVERSIONS(double, unsigned long long, double, ull)
#undef SIMT_CONVERSIONS
SIMT_FN float __double2float_rn(double x) { return static_cast<float>(x); }

// ---- min and max of every pair of types that CUDA has them for ----
#define SIMT_MIN_MAX(A, B, R)                                                             \
  SIMT_FN R min(A a, B b) {                                                               \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); \
  }                                                                                       \
  SIMT_FN R max(A a, B b) {                                                               \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); \
  }
SIMT_MIN_MAX(int, int, int)
SIMT_MIN_MAX(unsigned, unsigned, unsigned)
SIMT_MIN_MAX(int, unsigned, unsigned)
SIMT_MIN_MAX(unsigned, int, unsigned)
SIMT_MIN_MAX(long, long, long)
SIMT_MIN_MAX(unsigned long, unsigned long, unsigned long)
SIMT_MIN_MAX(long, unsigned long, unsigned long)
SIMT_MIN_MAX(unsigned long, long, unsigned long)
SIMT_MIN_MAX(long long, long long, long long)
SIMT_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
SIMT_MIN_MAX(long long, unsigned long long, unsigned long long)
SIMT_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef SIMT_MIN_MAX
// A NaN loses against a number, as on the GPU.
SIMT_FN float min(float a, float b) { return fminf(a, b); }
SIMT_FN float max(float a, float b) { return fmaxf(a, b); }
SIMT_FN double min(double a, double b) { return fmin(a, b); }
SIMT_FN double max(double a, double b) { return fmax(a, b); }
SIMT_FN double min(float a, double b) { return fmin(a, b); }
SIMT_FN double max(float a, double b) { return fmax(a, b); }
SIMT_FN double min(double a, float b) { return fmin(a, b); }
SIMT_FN double max(double a, float b) { return fmax(a, b); }
SIMT_FN unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
SIMT_FN unsigned umax(unsigned a, unsigned b) { return a < b ? b : a; }
