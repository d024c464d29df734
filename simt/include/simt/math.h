// Device maths functions that the C library does not have. The fast ones (__expf) are computed
// exactly: on the CPU machine a kernel is as accurate as it can be.
#pragma once
#include <math.h>

#include <cstdint>
#include <cstring>

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
SIMT_FN double normcdf(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
SIMT_FN float normcdff(float x) { return static_cast<float>(normcdf(static_cast<double>(x))); }
SIMT_FN float fdividef(float a, float b) { return a / b; }
SIMT_FN float norm3df(float a, float b, float c) { return sqrtf(a * a + b * b + c * c); }
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
SIMT_FN int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
SIMT_FN int __float2int_rz(float x) { return static_cast<int>(x); }
SIMT_FN int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
SIMT_FN int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
SIMT_FN unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
SIMT_FN unsigned __float2uint_rz(float x) { return static_cast<unsigned>(x); }
SIMT_FN float __int2float_rn(int x) { return static_cast<float>(x); }
SIMT_FN float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
SIMT_FN float __double2float_rn(double x) { return static_cast<float>(x); }
SIMT_FN float __ll2float_rn(long long x) { return static_cast<float>(x); }

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
