// A small kernel for each feature of CUDA C++ that the CPU machine has. Run in every mode: fast,
// checked, with the threads in other orders, with the portable context switch.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>
#include <mma.h>

#include "harness.h"

namespace cg = cooperative_groups;
namespace wmma = nvcuda::wmma;

// ---- grids and blocks ----

__global__ void write_indices(int* out) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = 1000 * block + thread;
}
TEST(three_dimensions) {
  Array<int> out(2 * 3 * 4 * 60);
  write_indices<<<dim3(2, 3, 4), dim3(5, 4, 3)>>>(out);
  for (int i = 0; i < 24 * 60; i++) EQUAL(out[i], 1000 * (i / 60) + i % 60);
}

__global__ void leave_early(int* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = i;
}
TEST(odd_sizes) {
  for (int n : {1, 31, 32, 33, 255, 257, 1000}) {
    Array<int> out(n, -1);
    leave_early<<<(n + 255) / 256, 256>>>(out, n);
    for (int i = 0; i < n; i++) EQUAL(out[i], i);
  }
}

// ---- values of class types, passed and returned ----
// A compiler may let the call itself read or write the array: the checker must see it all the same.

struct Partial {
  float count, mean, m2;
};
__device__ __noinline__ Partial joined(Partial a, Partial b) {
  const float n = a.count + b.count, d = b.mean - a.mean;
  return {n, a.mean + d * b.count / n, a.m2 + b.m2 + d * d * a.count * b.count / n};
}
__global__ void join_partials(const float* x, float* mean) {
  __shared__ Partial s[64];
  const int t = threadIdx.x;
  s[t] = joined(Partial{1, x[t], 0}, Partial{1, x[t + 64], 0});
  for (int step = 32; step > 0; step /= 2) {
    __syncthreads();
    if (t < step) s[t] = joined(s[t], s[t + step]);
  }
  if (t == 0) *mean = s[0].mean;
}
TEST(structs_from_functions_in_shared_memory) {
  Array<float> x(128), mean(1);
  for (int i = 0; i < 128; i++) x[i] = i;
  join_partials<<<1, 64>>>(x, mean);
  NEAR(mean[0], 63.5, 1e-4);
}

template <class T>
__global__ void halves_from_functions(const float* in, T* out) {
  __shared__ T s[32], u[32], v[32], w[32];
  const int t = threadIdx.x;
  s[t] = T(in[t]);
  __syncwarp();
  u[t] = __shfl_xor_sync(~0u, s[t], 1);
  v[t] = __hfma(s[t], s[t], s[t]);
  __syncwarp();
  w[t ^ 1] = cg::tiled_partition<32>(cg::this_thread_block()).shfl(v[t], t);
  __syncwarp();
  out[t] = u[t ^ 1] + w[t ^ 1];
}
TEST(halves_from_functions_in_shared_memory) {
  Array<float> in(32);
  for (int i = 0; i < 32; i++) in[i] = i % 8;
  Array<__half> h(32);
  Array<__nv_bfloat16> b(32);
  halves_from_functions<<<1, 32>>>(in.p, h.p);
  halves_from_functions<<<1, 32>>>(in.p, b.p);
  for (int i = 0; i < 32; i++) {
    EQUAL(static_cast<float>(h[i]), i % 8 * (i % 8) + 2.f * (i % 8));
    EQUAL(static_cast<float>(b[i]), i % 8 * (i % 8) + 2.f * (i % 8));
  }
}

// ---- shared memory and barriers ----

__global__ void reverse_static(int* x) {
  __shared__ int s[256];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
__global__ void reverse_dynamic(int* x) {
  extern __shared__ int d[];
  d[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = d[blockDim.x - 1 - threadIdx.x];
}
extern __shared__ unsigned char file_scope[];
__shared__ int file_scope_counter;
__global__ void reverse_file_scope(int* x) {
  int* s = reinterpret_cast<int*>(file_scope);
  if (threadIdx.x == 0) file_scope_counter = 0;
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  atomicAdd(&file_scope_counter, 1);
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];
}
TEST(shared_memory) {
  Array<int> x(200);
  for (int i = 0; i < 200; i++) x[i] = i;
  reverse_static<<<1, 200>>>(x);
  for (int i = 0; i < 200; i++) EQUAL(x[i], 199 - i);
  reverse_dynamic<<<1, 200, 800>>>(x);
  for (int i = 0; i < 200; i++) EQUAL(x[i], i);
  reverse_file_scope<<<1, 200, 800>>>(x);
  for (int i = 0; i < 200; i++) EQUAL(x[i], 199 - i);
}

template <typename T, int N>
struct Box {
  T v[N];
};
template <typename T, int N>
__global__ void shared_declarations(T* out) {
  __shared__ Box<T, N> a, b[2];
  __shared__ alignas(16) T c[N];
  __shared__ __align__(16) T d[N];
  __shared__ union {
    float f;
    int i;
  } u;
  extern __shared__ T rows[][4];
  if (threadIdx.x == 0) u.i = 0x3f800000;
  const int t = threadIdx.x;
  a.v[t] = b[1].v[t] = c[t] = d[t] = rows[t][3] = T(t);
  __syncthreads();
  out[t] = a.v[t] + b[1].v[N - 1 - t] + c[0] + d[0] + rows[N - 1][3] + static_cast<T>(u.f);
}
TEST(shared_declarations) {
  Array<float> out(64);
  shared_declarations<float, 64><<<1, 64, 64 * 4 * sizeof(float)>>>(out.p);
  for (int i = 0; i < 64; i++) EQUAL(out[i], 63 + 63 + 1);
}

__global__ void tree_sum(const float* x, float* out, int n) {
  extern __shared__ float s[];
  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  s[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int k = blockDim.x / 2; k > 0; k >>= 1) {
    if (t < k) s[t] += s[t + k];
    __syncthreads();
  }
  if (t == 0) atomicAdd(out, s[0]);
}
TEST(tree_reduction) {
  Array<float> x(10000, 1.f), out(1);
  tree_sum<<<40, 256, 1024>>>(x, out, 10000);
  EQUAL(out[0], 10000.f);
}

__global__ void block_votes(int* out) {
  const int third = __syncthreads_count(threadIdx.x % 3 == 0);
  const int all = __syncthreads_and(threadIdx.x < 100);
  const int any = __syncthreads_or(threadIdx.x == 77);
  const int again = __syncthreads_count(threadIdx.x < 10);
  out[threadIdx.x] = third + 1000 * all + 10000 * any + 100000 * again;
}
TEST(block_votes) {
  Array<int> out(99);
  block_votes<<<1, 99>>>(out);
  for (int i = 0; i < 99; i++) EQUAL(out[i], 33 + 1000 + 10000 + 1000000);
}

constexpr int kTile = 16;
__global__ void matmul(const float* A, const float* B, float* C, int n) {
  __shared__ float a[kTile][kTile], b[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  float sum = 0;
  for (int k = 0; k < n; k += kTile) {
    a[y][x] = A[row * n + k + x];
    b[y][x] = B[(k + y) * n + column];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; i++) sum += a[y][i] * b[i][x];
    __syncthreads();
  }
  C[row * n + column] = sum;
}
TEST(tiled_matmul) {
  const int n = 48;
  Array<float> a(n * n), b(n * n), c(n * n);
  for (int i = 0; i < n * n; i++) a[i] = i % 7 - 3, b[i] = i % 5 - 2;
  matmul<<<dim3(3, 3), dim3(kTile, kTile)>>>(a, b, c, n);
  for (int i = 0; i < n; i++) {
    for (int j = 0; j < n; j++) {
      float want = 0;
      for (int k = 0; k < n; k++) want += a[i * n + k] * b[k * n + j];
      EQUAL(c[i * n + j], want);
    }
  }
}

// ---- warps ----

__global__ void shuffles(int* out) {
  const int lane = threadIdx.x % 32;
  int* mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(~0u, lane, 5);
  mine[1] = __shfl_up_sync(~0u, lane, 3);
  mine[2] = __shfl_down_sync(~0u, lane, 3);
  mine[3] = __shfl_xor_sync(~0u, lane, 1);
  mine[4] = __shfl_sync(~0u, lane, 1, 8);
  mine[5] = __shfl_down_sync(~0u, lane, 2, 4);
  mine[6] = static_cast<int>(__shfl_xor_sync(~0u, 1e10 + lane, 16) - 1e10);
  if (lane < 16) {
    mine[7] = __shfl_sync(0x0000ffffu, lane, 3);
  } else {
    mine[7] = __shfl_sync(0xffff0000u, lane, 20);
  }
}
TEST(shuffles) {
  Array<int> out(64 * 8);
  shuffles<<<1, 64>>>(out);
  for (int i = 0; i < 64; i++) {
    const int lane = i % 32;
    int* mine = out + i * 8;
    EQUAL(mine[0], 5);
    EQUAL(mine[1], lane < 3 ? lane : lane - 3);
    EQUAL(mine[2], lane > 28 ? lane : lane + 3);
    EQUAL(mine[3], lane ^ 1);
    EQUAL(mine[4], lane / 8 * 8 + 1);
    EQUAL(mine[5], lane % 4 < 2 ? lane + 2 : lane);
    EQUAL(mine[6], lane ^ 16);
    EQUAL(mine[7], lane < 16 ? 3 : 20);
  }
}

__global__ void votes(unsigned* out) {
  const int lane = threadIdx.x;
  unsigned* mine = out + lane * 10;
  mine[0] = __ballot_sync(~0u, lane & 1);
  mine[1] = __any_sync(~0u, lane == 7);
  mine[2] = __all_sync(~0u, lane < 32);
  mine[3] = __match_any_sync(~0u, lane / 4);
  int same;
  mine[4] = __match_all_sync(~0u, 42, &same);
  mine[5] = __reduce_add_sync(~0u, lane);
  mine[6] = __reduce_max_sync(~0u, static_cast<unsigned>(lane));
  mine[7] = __reduce_xor_sync(~0u, static_cast<unsigned>(lane));
  __syncwarp();
  mine[8] = __activemask();
  if (lane < 10) {
    mine[9] = __popc(__activemask());
  } else {
    mine[9] = 100 + __popc(__activemask());
  }
}
TEST(votes) {
  Array<unsigned> out(320);
  votes<<<1, 32>>>(out);
  for (unsigned lane = 0; lane < 32; lane++) {
    unsigned* mine = out + lane * 10;
    EQUAL(mine[0], 0xaaaaaaaau);
    EQUAL(mine[1], 1u);
    EQUAL(mine[2], 1u);
    EQUAL(mine[3], 0xfu << (lane / 4 * 4));
    EQUAL(mine[4], ~0u);
    EQUAL(mine[5], 496u);
    EQUAL(mine[6], 31u);
    EQUAL(mine[7], 0u);
    EQUAL(mine[8], ~0u);
    EQUAL(mine[9], lane < 10 ? 10u : 122u);
  }
}

__global__ void warp_sums(const float* x, float* out) {
  float v = x[threadIdx.x];
  for (int step = 16; step; step >>= 1) v += __shfl_xor_sync(0xffffffff, v, step);
  __shared__ float of_warp[32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0.f;
    for (int step = 16; step; step >>= 1) v += __shfl_down_sync(0xffffffff, v, step);
    if (threadIdx.x == 0) *out = v;
  }
}
TEST(two_level_reduction) {
  Array<float> x(1024), out(1);
  for (int i = 0; i < 1024; i++) x[i] = i;
  warp_sums<<<1, 1024>>>(x, out);
  EQUAL(out[0], 523776.f);
}

// ---- atomics ----

__global__ void all_atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d,
                            __half2* h, __nv_bfloat162* b) {
  atomicAdd(&i[0], 1);
  atomicSub(&i[1], 2);
  atomicMax(&i[2], static_cast<int>(threadIdx.x));
  atomicMin(&i[3], static_cast<int>(threadIdx.x));
  atomicOr(&i[4], 1 << threadIdx.x % 8);
  atomicAnd(&i[5], ~(1 << threadIdx.x % 8));
  atomicXor(&i[6], 1);
  atomicInc(&u[0], 9);
  atomicDec(&u[1], 9);
  atomicExch(&u[2], 7u);
  atomicAdd(&l[0], 1ull << 33);
  atomicAdd(f, 0.5f);
  atomicAdd(d, 0.25);
  atomicAdd(h, __half2(1.f, 2.f));
  atomicAdd(b, __nv_bfloat162(1.f, 2.f));
  unsigned old = u[3], seen;  // an atomicAdd made of atomicCAS
  do {
    seen = old;
    old = atomicCAS(&u[3], seen, seen + 3);
  } while (old != seen);
  if (threadIdx.x < 3) atomicCAS_block(&u[4], 7u, 8u);  // only the first of them finds a 7
}
TEST(atomics) {
  Array<int> i(7);
  i[3] = 1000, i[5] = 0xff;
  Array<unsigned> u(5);
  u[4] = 7;
  Array<unsigned long long> l(1);
  Array<float> f(1);
  Array<double> d(1);
  Array<__half2> h(1, __half2(0.f, 0.f));
  Array<__nv_bfloat162> b(1, __nv_bfloat162(0.f, 0.f));
  all_atomics<<<1, 100>>>(i, u, l, f, d, h, b);
  const int want[] = {100, -200, 99, 0, 255, 0, 0};
  for (int k = 0; k < 7; k++) EQUAL(i[k], want[k]);
  EQUAL(u[0], 0u);
  EQUAL(u[1], 0u);
  EQUAL(u[2], 7u);
  EQUAL(u[3], 300u);
  EQUAL(u[4], 8u);
  EQUAL(l[0], 100ull << 33);
  EQUAL(f[0], 50.f);
  EQUAL(d[0], 25.);
  EQUAL(__high2float(h[0]), 200.f);
  EQUAL(__low2float(b[0]), 100.f);
}

__global__ void histogram(const unsigned char* x, int* out, int n) {
  __shared__ int s[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) s[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&s[x[i]], 1);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&out[i], s[i]);
}
TEST(histogram) {
  Array<unsigned char> x(10000);
  Array<int> out(256);
  int want[256] = {};
  for (int i = 0; i < 10000; i++) want[x[i] = static_cast<unsigned char>(i * 7)]++;
  histogram<<<8, 64>>>(x, out, 10000);
  for (int i = 0; i < 256; i++) EQUAL(out[i], want[i]);
}

// ---- types and functions ----

__device__ float square(float x) { return x * x; }
template <class T>
__device__ __forceinline__ T twice(T x) {
  return x + x;
}
__device__ __noinline__ int not_inlined(int x) { return x + 1; }
__constant__ float coefficients[4];
__device__ int device_counter;
constexpr float kTable[3] = {1, 10, 100};
enum class Mode { kAdd, kMultiply };

template <Mode mode, int kTimes>
__global__ void __launch_bounds__(128, 2) language(const float* __restrict__ x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = __ldg(x + i);
#pragma unroll
  for (int k = 0; k < kTimes; k++) {
    if constexpr (mode == Mode::kAdd) {
      v += coefficients[k % 4];
    } else {
      v *= kTable[k % 3];
    }
  }
  auto lambda = [&](float w) { return square(w) + twice(1.f) + not_inlined(1); };
  y[i] = lambda(v);
  atomicAdd(&device_counter, 1);
}
TEST(language) {
  Array<float> x(100), y(100);
  for (int i = 0; i < 100; i++) x[i] = i;
  const float c[4] = {1, 2, 3, 4};
  EQUAL(cudaMemcpyToSymbol(coefficients, c, sizeof c), cudaSuccess);
  const int zero = 0;
  cudaMemcpyToSymbol(device_counter, &zero, sizeof zero);
  language<Mode::kAdd, 4><<<1, 128>>>(x.p, y.p, 100);
  for (int i = 0; i < 100; i++) EQUAL(y[i], float((i + 10) * (i + 10) + 4));
  language<Mode::kMultiply, 2><<<1, 128>>>(x.p, y.p, 100);
  EQUAL(y[2], 404.f);
  int counted;
  cudaMemcpyFromSymbol(&counted, device_counter, sizeof counted);
  EQUAL(counted, 200);
}

__global__ void vectors(const float4* a, const int2* b, float4* out) {
  const float4 v = a[threadIdx.x];
  const int2 w = b[threadIdx.x];
  out[threadIdx.x] = make_float4(v.x + w.x, v.y + w.y, v.z, v.w);
}
TEST(vector_types) {
  Array<float4> a(32, make_float4(1, 2, 3, 4)), out(32);
  Array<int2> b(32, make_int2(10, 20));
  vectors<<<1, 32>>>(a, b, out);
  EQUAL(out[31].y, 22.f);
  EQUAL(out[31].w, 4.f);
}

__global__ void halves(const __half* x, __half* y, const __nv_bfloat162* b, __nv_bfloat162* c) {
  const int i = threadIdx.x;
  y[i] = __hfma(x[i], __float2half(2.f), hexp(__float2half(0.f))) + hsqrt(__float2half(4.f));
  const __half2 pair = __hfma2(__half2half2(x[i]), __float2half2_rn(2.f), __float2half2_rn(1.f));
  if (__hgt(__low2half(pair), __float2half(1000.f))) y[i] = __float2half(0.f);
  c[i] = __hadd2(__hmul2(b[i], b[i]), h2rsqrt(__float2bfloat162_rn(0.25f)));
  const float2 f = __bfloat1622float2(c[i]);
  if (f.x < 0) c[i] = __hmax2(c[i], b[i]);
  const __half warp = __shfl_xor_sync(~0u, x[i], 1);
  if (__half2float(warp) < -1) y[i] = warp;
}
TEST(half_types) {
  Array<__half> x(32, __float2half(3.f)), y(32, __float2half(0.f));
  Array<__nv_bfloat162> b(32, __float2bfloat162_rn(3.f)), c(32, __float2bfloat162_rn(0.f));
  halves<<<1, 32>>>(x, y, b, c);
  EQUAL(__half2float(y[5]), 9.f);
  EQUAL(__high2float(c[5]), 11.f);
}

__global__ void maths(float* out) {
  int n = 0;
  out[n++] = rsqrtf(4.f);
  out[n++] = __expf(1.f);
  out[n++] = fmaf(2.f, 3.f, 4.f);
  out[n++] = erff(0.5f);
  out[n++] = __fdividef(1.f, 4.f);
  out[n++] = tanhf(0.5f) + __tanhf(0.5f);
  out[n++] = fmaxf(1.f, NAN) + max(2, 3) + min(2.f, 1.f);
  out[n++] = __logf(M_E) + __powf(2.f, 3.f);
  out[n++] = normcdff(0.f) + __saturatef(7.f);
  out[n++] = __popc(0xff) + __clz(1) + __ffs(8) + __brev(1u) / 2147483648u;
  out[n++] = __int_as_float(__float_as_int(1.5f)) + __umulhi(1u << 31, 4u);
  out[n++] = isinf(INFINITY) + isnan(NAN) + signbit(-1.f) + (warpSize == 32);
  out[n++] = __fmaf_rn(1.f, 2.f, 3.f) + __float2int_rn(2.5f) + __byte_perm(0x11223344, 0, 0x0123) % 2;
}
TEST(maths) {
  Array<float> out(13);
  maths<<<1, 1>>>(out);
  const double want[] = {0.5, M_E, 10, erf(0.5), 0.25, 2 * tanh(0.5), 1 + 3 + 1, 1 + 8, 0.5 + 1,
                         8 + 31 + 4 + 1, 1.5 + 2, 4, 5 + 2 + 1};
  for (int i = 0; i < 13; i++) NEAR(out[i], want[i], 1e-6 * (1 + want[i]));
}

__global__ void conversions(double* out) {
  int n = 0;
  out[n++] = __float2int_rd(-1.5f) + __float2uint_ru(1.25f) + __double2ll_rn(2.5);
  out[n++] = __double2int_rz(-2.9) + __ull2double_rn(1ull << 40);
  out[n++] = __float2int_rz(1e20f);
  out[n++] = __float2uint_rn(-3.f) + __float2int_rn(NAN);
  out[n++] = static_cast<double>(__float2ll_rz(-1e30f));
  out[n++] = __brevll(1ull) == 1ull << 63;
  out[n++] = static_cast<double>(__mul64hi(-(1ll << 62), 8));
  out[n++] = __hiloint2double(__double2hiint(1.1), __double2loint(1.1));
  out[n++] = sinpi(0.5) + cospi(1.) + norm4df(1, 1, 1, 1) + rnorm3df(2, 2, 1);
  float s, c;
  sincospif(0.5f, &s, &c);
  out[n++] = s + c;
}
TEST(conversions) {
  Array<double> out(10);
  conversions<<<1, 1>>>(out);
  const double want[] = {-2 + 2 + 2, -2 + double(1ull << 40), 2147483647., 0, -9223372036854775808.,
                         1, -2, 1.1, 1 - 1 + 2 + 1 / 3., 1};
  for (int i = 0; i < 10; i++) NEAR(out[i], want[i], 1e-6);
}

__global__ void odds_and_ends(long long* out, float* f) {
  const long long before = clock64();
  __nanosleep(100);
  out[0] = clock64() - before;
  assert(threadIdx.x < 1);
  __stcs(f, __ldcg(f) + 1);
  __threadfence();
  if (threadIdx.x == 99) __trap();
}
TEST(clock_and_hints) {
  Array<long long> out(1, -1);
  Array<float> f(1, 1.f);
  odds_and_ends<<<1, 1>>>(out, f);
  EQUAL(out[0] >= 0, true);
  EQUAL(f[0], 2.f);
}

__global__ void says() { printf("hello from thread %d\n", threadIdx.x); }
TEST(printf) { says<<<1, 1>>>(); }

// ---- cooperative groups ----

__global__ void groups(int* out) {
  auto block = cg::this_thread_block();
  auto warp = cg::tiled_partition<32>(block);
  auto four = cg::tiled_partition<4>(warp);
  int* mine = out + block.thread_rank() * 8;
  mine[0] = cg::reduce(four, static_cast<int>(threadIdx.x), cg::plus<int>());
  mine[1] = cg::reduce(warp, static_cast<int>(threadIdx.x), cg::greater<int>());
  mine[2] = cg::inclusive_scan(four, 1);
  mine[3] = cg::exclusive_scan(warp, 1);
  mine[4] = four.shfl(static_cast<int>(four.thread_rank()), 2) + 10 * four.meta_group_rank();
  mine[5] = warp.any(warp.thread_rank() == 3) + 2 * four.ballot(four.thread_rank() == 1);
  if (threadIdx.x % 3 == 0) {
    auto some = cg::coalesced_threads();
    mine[6] = 100 * some.size() + some.thread_rank();
    mine[7] = cg::reduce(some, 1, cg::plus<int>());
  }
  block.sync();
}
TEST(cooperative_groups) {
  Array<int> out(64 * 8);
  groups<<<1, 64>>>(out);
  for (int i = 0; i < 64; i++) {
    int* mine = out + i * 8;
    EQUAL(mine[0], 4 * (i / 4 * 4) + 6);
    EQUAL(mine[1], i / 32 * 32 + 31);
    EQUAL(mine[2], i % 4 + 1);
    EQUAL(mine[3], i % 32);
    EQUAL(mine[4], 2 + 10 * (i / 4));
    EQUAL(mine[5], 1 + 4);
    if (i % 3 == 0) {
      const int first = i / 32 * 32;
      int size = 0, rank = 0;
      for (int k = first; k < first + 32; k++) size += k % 3 == 0, rank += k % 3 == 0 && k < i;
      EQUAL(mine[6], 100 * size + rank);
      EQUAL(mine[7], size);
    }
  }
}

__global__ void async_copies(const float* x, float* out) {
  __shared__ float s[128];
  __shared__ float t[128];
  __pipeline_memcpy_async(&s[4 * threadIdx.x], &x[4 * threadIdx.x], 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  auto block = cg::this_thread_block();
  cg::memcpy_async(block, t, x, sizeof t);
  cg::wait(block);
  for (int k = 0; k < 4; k++) {
    const int i = 4 * threadIdx.x + k;
    out[i] = s[127 - i] + t[i];
  }
}
TEST(asynchronous_copies) {
  Array<float> x(128), out(128);
  for (int i = 0; i < 128; i++) x[i] = i;
  async_copies<<<1, 32>>>(x, out);
  for (int i = 0; i < 128; i++) EQUAL(out[i], 127.f);
}

// ---- clusters ----

__global__ void __cluster_dims__(4, 1, 1) cluster_sum(const int* x, int* out) {
  __shared__ int total;
  auto cluster = cg::this_cluster();
  if (threadIdx.x == 0) total = 0;
  cluster.sync();
  atomicAdd(cluster.map_shared_rank(&total, 0), x[blockIdx.x * blockDim.x + threadIdx.x]);
  cluster.sync();
  if (threadIdx.x == 0) {
    out[blockIdx.x] = *cluster.map_shared_rank(&total, 0) + 1000 * cluster.block_rank();
  }
  cluster.sync();
}
__global__ void cluster_ring(float* out) {
  extern __shared__ float mine[];
  auto cluster = cg::this_cluster();
  mine[threadIdx.x] = cluster.block_rank() * 100 + threadIdx.x;
  cluster.sync();
  const unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
  out[blockIdx.x * blockDim.x + threadIdx.x] =
      cluster.map_shared_rank(mine, next)[blockDim.x - 1 - threadIdx.x];
  cluster.sync();
}
TEST(clusters) {
  Array<int> x(8 * 32, 1), out(8);
  cluster_sum<<<8, 32>>>(x, out);
  for (int i = 0; i < 8; i++) EQUAL(out[i], 128 + 1000 * (i % 4));

  Array<float> ring(16 * 64);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(16);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = 64 * sizeof(float);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = 16;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  EQUAL(cudaLaunchKernelEx(&config, cluster_ring, ring.p), cudaErrorInvalidValue);
  cudaGetLastError();
  int fitting = 0, largest = 0;
  EQUAL(cudaOccupancyMaxActiveClusters(&fitting, cluster_ring, &config),
        cudaErrorInvalidClusterSize);
  cudaGetLastError();
  cudaFuncSetAttribute(cluster_ring, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  EQUAL(cudaOccupancyMaxActiveClusters(&fitting, cluster_ring, &config), cudaSuccess);
  EQUAL(fitting, 16);  // 8 multiprocessors with 32 blocks each
  EQUAL(cudaOccupancyMaxPotentialClusterSize(&largest, cluster_ring, &config), cudaSuccess);
  EQUAL(largest, 16);
  config.dynamicSmemBytes = 100 << 10;  // two blocks a multiprocessor
  cudaOccupancyMaxActiveClusters(&fitting, reinterpret_cast<const void*>(cluster_ring), &config);
  EQUAL(fitting, 1);
  config.dynamicSmemBytes = 64 * sizeof(float);
  EQUAL(cudaLaunchKernelEx(&config, cluster_ring, ring.p), cudaSuccess);
  for (int i = 0; i < 16 * 64; i++) {
    EQUAL(ring[i], float((i / 64 + 1) % 16 * 100 + 63 - i % 64));
  }
}

// ---- tensor cores ----

template <class T, class Sum, int M, int N, int K, class LayoutB>
__global__ void wmma_tile(const T* a, const T* b, Sum* c) {
  wmma::fragment<wmma::matrix_a, M, N, K, T, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, T, LayoutB> fb;
  wmma::fragment<wmma::accumulator, M, N, K, Sum> fc;
  wmma::fill_fragment(fc, Sum(1));
  for (int k = 0; k < 2 * K; k += K) {
    wmma::load_matrix_sync(fa, a + k, 2 * K);
    if constexpr (std::is_same_v<LayoutB, wmma::row_major>) {
      wmma::load_matrix_sync(fb, b + k * N, N);
    } else {
      wmma::load_matrix_sync(fb, b + k, 2 * K);
    }
    wmma::mma_sync(fc, fa, fb, fc);
  }
  for (int i = 0; i < fc.num_elements; i++) fc.x[i] = fc.x[i] * Sum(2);
  wmma::store_matrix_sync(c, fc, N, wmma::mem_row_major);
}
template <class T, class Sum, int M, int N, int K, class LayoutB>
void check_wmma() {
  Array<T> a(M * 2 * K), b(2 * K * N);
  Array<Sum> c(M * N);
  for (size_t i = 0; i < a.n; i++) a[i] = static_cast<T>(static_cast<float>(i % 5));
  for (size_t i = 0; i < b.n; i++) b[i] = static_cast<T>(static_cast<float>(i % 3));
  wmma_tile<T, Sum, M, N, K, LayoutB><<<1, 32>>>(a.p, b.p, c.p);
  no_error();
  const bool row = std::is_same_v<LayoutB, wmma::row_major>;
  for (int m = 0; m < M; m++) {
    for (int n = 0; n < N; n++) {
      double want = 1;
      for (int k = 0; k < 2 * K; k++) {
        want += static_cast<float>(a[m * 2 * K + k]) *
                static_cast<float>(row ? b[k * N + n] : b[n * 2 * K + k]);
      }
      EQUAL(static_cast<double>(static_cast<float>(c[m * N + n])), 2 * want);
    }
  }
}
TEST(wmma) {
  check_wmma<__half, float, 16, 16, 16, wmma::row_major>();
  check_wmma<__half, float, 16, 16, 16, wmma::col_major>();
  check_wmma<__half, __half, 16, 16, 16, wmma::row_major>();
  check_wmma<__nv_bfloat16, float, 32, 8, 16, wmma::row_major>();
  check_wmma<__half, float, 8, 32, 16, wmma::col_major>();
  check_wmma<signed char, int, 16, 16, 16, wmma::row_major>();
  EQUAL(wmma::__float_to_tf32(1.f + 1.f / 4096), 1.f);
}

// ---- progress ----

__global__ void chained_sums(const int* x, int* sums, volatile int* flags) {
  // Every block waits for the one before it, as a decoupled look-back does.
  __shared__ int before;
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) {
      before = 0;
    } else {
      while (flags[blockIdx.x - 1] == 0) {
      }
      __threadfence();
      before = sums[blockIdx.x - 1];
    }
    sums[blockIdx.x] = before + x[blockIdx.x];
    __threadfence();
    flags[blockIdx.x] = 1;
  }
}
TEST(blocks_wait_for_earlier_blocks) {
  Array<int> x(500, 1), sums(500), flags(500);
  chained_sums<<<500, 32>>>(x, sums, flags);
  EQUAL(sums[499], 500);
}

__global__ void warps_wait_for_warps(int* out) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    while (flag == 0) {
    }
    *out = 5;
  }
  if (threadIdx.x == 63) flag = 1;
}
TEST(threads_wait_for_later_threads) {
  Array<int> out(1);
  warps_wait_for_warps<<<1, 64>>>(out);
  EQUAL(out[0], 5);
}

__global__ void lock_and_add(int* lock, int* value) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  __threadfence();
  *value = *value + 1;
  __threadfence();
  atomicExch(lock, 0);
}
TEST(spin_lock) {
  Array<int> lock(1), value(1);
  lock_and_add<<<20, 32>>>(lock, value);
  EQUAL(value[0], 640);
}

// ---- the runtime API ----

__global__ void big_shared(float* out) {
  extern __shared__ float s[];
  s[20000] = 3;
  out[0] = s[20000];
}
TEST(opting_in_to_shared_memory) {
  Array<float> out(1);
  big_shared<<<1, 1, 100000>>>(out);
  EQUAL(cudaGetLastError(), cudaErrorInvalidValue);
  EQUAL(cudaFuncSetAttribute(big_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 100000),
        cudaSuccess);
  big_shared<<<1, 1, 100000>>>(out);
  no_error();
  EQUAL(out[0], 3.f);
  EQUAL(cudaFuncSetAttribute(big_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 300 << 10),
        cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST(launch_limits) {
  // The codes of CUDA 13 on an H200.
  Array<int> out(1);
  auto refused = [&](dim3 grid, dim3 block, size_t shared = 0) {
    write_indices<<<grid, block, shared>>>(out);
    return cudaGetLastError();
  };
  EQUAL(refused(1, 2048), cudaErrorInvalidValue);
  EQUAL(refused(1, dim3(1, 1, 65)), cudaErrorInvalidValue);
  EQUAL(refused(dim3(1, 70000), 32), cudaErrorInvalidValue);
  EQUAL(refused(0, 32), cudaErrorInvalidValue);
  EQUAL(refused(1, 32, 60 << 10), cudaErrorInvalidValue);
  EQUAL(cudaGetLastError(), cudaSuccess);
}

TEST(runtime_api) {
  int count, device, value;
  EQUAL(cudaGetDeviceCount(&count), cudaSuccess);
  EQUAL(count, 1);
  EQUAL(cudaGetDevice(&device), cudaSuccess);
  EQUAL(cudaSetDevice(1), cudaErrorInvalidDevice);
  cudaGetLastError();
  cudaDeviceProp p;
  EQUAL(cudaGetDeviceProperties(&p, 0), cudaSuccess);
  EQUAL(p.warpSize, 32);
  cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  EQUAL(value, 232448);
  int blocks;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, big_shared, 256, 50000);
  EQUAL(blocks, 4);
  Array<int> a(10, 3), b(10);
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  cudaMemcpyAsync(b, a, 40, cudaMemcpyDeviceToDevice, stream);
  cudaMemsetAsync(a, 0, 40, stream);
  cudaStreamSynchronize(stream);
  EQUAL(a[9] + b[9], 3);
  cudaEvent_t from, to;
  cudaEventCreate(&from);
  cudaEventCreate(&to);
  cudaEventRecord(from, stream);
  write_indices<<<1, 1, 0, stream>>>(b);
  cudaEventRecord(to, stream);
  cudaEventSynchronize(to);
  float ms = -1;
  cudaEventElapsedTime(&ms, from, to);
  EQUAL(ms >= 0, true);
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  cudaStreamDestroy(stream);
  EQUAL(strcmp(cudaGetErrorString(cudaErrorInvalidValue), "invalid argument"), 0);
  EQUAL(strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue"), 0);
}
