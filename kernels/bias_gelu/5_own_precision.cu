// 5_own_precision.cu: the 16-bit types get an error function of their own precision
// Before : rung 4 calls erff, right to 24 bits, for results that keep 8 or 11: arithmetic takes
//          longer than memory
// Idea   : 1 − Φ(|h|) is 2 to a power that a polynomial of degree 5 gives to 4 digits: five FMAs
//          and one ex2 instruction. float32 and float64 keep the exact functions
// Cost   : 2·n·sizeof(T) bytes forward, 3·n backward; bound by memory        Legal: any
// Result : 0.96 of copy, 6.22x rung 1, 3.81x eager  (H200, bfloat16 (8192, 8192) contiguous none)
// Try    : leave out the term of highest degree: lab.check finds no fault. Which values are wrong?

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#ifndef ROWS
#define ROWS 4  // rows in flight, forward
#endif
#ifndef BACK_BLOCKS
#define BACK_BLOCKS 1056  // backward: 8 for each of 132 SMs; more would only write more sums
#endif
constexpr int BLOCK = 128;
constexpr int64_t MAX_GRID_Y = 65535;

template <typename T>
constexpr int BACK_ROWS = sizeof(T) == 2 ? 3 : 2;  // backward, where a row is two loads

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T at[N];
};

// e^x and 1/x to 22 bits in one instruction each; __expf and __fdividef take four, to be right for
// denormals as well.
#ifdef __SIMT_CPU__
__device__ float fast_exp2(float x) { return exp2f(x); }
__device__ float fast_reciprocal(float x) { return 1.0f / x; }
#else
__device__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

template <typename A>
struct Phi {
  A value, slope;  // Φ(h) and Φ'(h): GELU(h) = h·Φ(h), its derivative Φ(h) + h·Φ'(h)
};

// T is what the result is stored as.
template <typename T, bool TANH, typename A>
__device__ Phi<A> phi(A h) {
  constexpr bool FAST = sizeof(T) == 2;
  constexpr A LOG2_E = A(1.4426950408889634), DENSITY_0 = A(0.39894228040143268);
  if constexpr (TANH) {  // (1 + tanh(u/2)) / 2 is the logistic function 1 / (1 + e^-u): no tanh
    constexpr A U = A(1.5957691216057307);  // u = U·(h + 0.044715·h³)
    A s;
    if constexpr (FAST) {
      s = fast_reciprocal(1.0f + fast_exp2(h * (-LOG2_E * U - LOG2_E * U * 0.044715f * h * h)));
    } else {
      s = A(1) / (A(1) + exp(-U * (h + A(0.044715) * h * h * h)));
    }
    return {s, s * (A(1) - s) * (U + U * A(0.134145) * h * h)};
  } else if constexpr (FAST) {
    // The logarithm of 1 − Φ(|h|) to base 2, fitted so that what is computed is off by at most 4e-4
    // of itself for |h| ≤ 4, and by 7e-5 for |h| ≤ 1: the small values left of 0 keep their digits.
    // Further left they lose them, a third of one at -8; but those are below 2e-6.
    const float a = fabsf(h);
    float p = -3.19489257e-4f * a + 5.9118131e-3f;
    p = p * a - 0.0488787992f;
    p = p * a - 0.46275748f;
    p = p * a - 1.15002042f;
    p = p * a - 1.00004698f;
    const float tail = fast_exp2(p);
    return {h < 0 ? tail : 1.0f - tail, DENSITY_0 * fast_exp2(h * h * (-0.5f * LOG2_E))};
  } else {
    return {A(0.5) * (A(1) + erf(h * A(0.70710678118654752))), DENSITY_0 * exp(A(-0.5) * h * h)};
  }
}

template <typename T, typename A, int N>
__device__ void load_bias(const T* bias, A (&b)[N]) {
  const auto p = *reinterpret_cast<const Pack<T, N>*>(bias);
#pragma unroll
  for (int k = 0; k < N; ++k) b[k] = static_cast<A>(p.at[k]);
}

// Thread (x, y) of a block has one pack of columns and rows y, y + blockDim.y, … of the block's.
template <typename T, typename A, int N, bool TANH>
__global__ void __launch_bounds__(BLOCK)
    forward_kernel(const T* x, const T* bias, T* out, int64_t rows, int64_t cols) {
  using P = Pack<T, N>;
  const int64_t c = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (c >= cols) return;
  A b[N];
  load_bias(bias + c, b);
  const int64_t stride = blockDim.y;
  int64_t r = int64_t{blockIdx.y} * ROWS * stride + threadIdx.y;
  for (; r < rows; r += gridDim.y * ROWS * stride) {
    P h[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      // Below the last row, the last row again: a load without a condition is one instruction.
      h[j] = *reinterpret_cast<const P*>(x + min(r + j * stride, rows - 1) * cols + c);
    }
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (r + j * stride >= rows) break;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A v = A(h[j].at[k]) + b[k];
        h[j].at[k] = static_cast<T>(v * phi<T, TANH>(v).value);
      }
      *reinterpret_cast<P*>(out + (r + j * stride) * cols + c) = h[j];
    }
  }
}

template <typename T, typename A, int N, bool TANH>
__global__ void __launch_bounds__(BLOCK)
    backward_kernel(const T* grad, const T* x, const T* bias, T* dx, A* workspace, int64_t rows,
                    int64_t cols) {
  using P = Pack<T, N>;
  __shared__ A sums[BLOCK * N];
  const int64_t c = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  const int64_t stride = blockDim.y;
  A sum[N] = {};
  if (c < cols) {
    A b[N];
    load_bias(bias + c, b);
    int64_t r = int64_t{blockIdx.y} * BACK_ROWS<T> * stride + threadIdx.y;
    for (; r < rows; r += gridDim.y * BACK_ROWS<T> * stride) {
      P g[BACK_ROWS<T>], h[BACK_ROWS<T>];
#pragma unroll
      for (int j = 0; j < BACK_ROWS<T>; ++j) {
        const int64_t i = min(r + j * stride, rows - 1) * cols + c;
        g[j] = *reinterpret_cast<const P*>(grad + i);
        h[j] = *reinterpret_cast<const P*>(x + i);
      }
#pragma unroll
      for (int j = 0; j < BACK_ROWS<T>; ++j) {
        if (r + j * stride >= rows) break;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const A v = A(h[j].at[k]) + b[k];
          const Phi<A> f = phi<T, TANH>(v);
          const A d = A(g[j].at[k]) * (f.value + v * f.slope);
          h[j].at[k] = static_cast<T>(d);
          sum[k] += d;
        }
        *reinterpret_cast<P*>(dx + (r + j * stride) * cols + c) = h[j];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    sums[(threadIdx.y * N + k) * blockDim.x + threadIdx.x] = sum[k];
  }
  __syncthreads();
  // The columns of the block's rows are summed by as many threads as there are columns.
  for (unsigned i = threadIdx.y * blockDim.x + threadIdx.x; i < blockDim.x * N; i += BLOCK) {
    const int64_t column = (int64_t{blockIdx.x} * blockDim.x + i % blockDim.x) * N + i / blockDim.x;
    if (column >= cols) continue;
    A total = 0;
    for (unsigned y = 0; y < blockDim.y; ++y) total += sums[y * N * blockDim.x + i];
    workspace[blockIdx.y * cols + column] = total;
  }
}

// dbias[c] = the sum of workspace[0 … parts-1][c], always in the same order: the same bits each
// run.
template <typename T, typename A>
__global__ void finish_kernel(const A* workspace, T* dbias, int64_t parts, int64_t cols) {
  __shared__ A sums[8][33];
  const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
  A sum = 0;
  for (int64_t p = threadIdx.y; c < cols && p < parts; p += 8) sum += workspace[p * cols + c];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
  dbias[c] = static_cast<T>(sum);
}

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Wide enough for a row of packs, if that fits in a block; the rest of the block takes more rows.
dim3 block_for(int64_t row_packs) {
  unsigned x = 1;
  while (x < BLOCK && x < row_packs) x *= 2;
  return dim3(x, BLOCK / x);
}

template <typename T, typename... Pointers>
bool packs_fit(int64_t cols, Pointers... pointers) {
  return cols * sizeof(T) % 16 == 0 && (reinterpret_cast<uintptr_t>(pointers) | ...) % 16 == 0;
}

template <typename T, typename A, int N, bool TANH>
void start_forward(const T* x, const T* bias, T* out, int64_t rows, int64_t cols,
                   cudaStream_t stream) {
  const dim3 block = block_for(cols / N);
  const int64_t grid_y = std::min(MAX_GRID_Y, blocks(rows, ROWS * block.y));
  const dim3 grid(blocks(cols / N, block.x), grid_y);
  forward_kernel<T, A, N, TANH><<<grid, block, 0, stream>>>(x, bias, out, rows, cols);
}

template <typename T, typename A>
cudaError_t forward(const T* x, const T* bias, T* out, int64_t rows, int64_t cols, bool tanh_form,
                    cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const bool wide = packs_fit<T>(cols, x, bias, out);
  auto* start = wide ? tanh_form ? start_forward<T, A, N, true> : start_forward<T, A, N, false>
                : tanh_form ? start_forward<T, A, 1, true>
                            : start_forward<T, A, 1, false>;
  start(x, bias, out, rows, cols, stream);
  return cudaGetLastError();
}

// Rows of the workspace (parts × cols accumulators) that the backward pass wants.
extern "C" int64_t bias_gelu_backward_parts(int64_t rows, int64_t cols) {
  return std::max<int64_t>(1, std::min(BACK_BLOCKS / blocks(cols, 1024), blocks(rows, 2)));
}

template <typename T, typename A, int N, bool TANH>
void start_backward(const T* grad, const T* x, const T* bias, T* dx, A* workspace, int64_t rows,
                    int64_t cols, cudaStream_t stream) {
  const dim3 block = block_for(cols / N);
  const dim3 grid(blocks(cols / N, block.x), bias_gelu_backward_parts(rows, cols));
  backward_kernel<T, A, N, TANH>
      <<<grid, block, 0, stream>>>(grad, x, bias, dx, workspace, rows, cols);
}

template <typename T, typename A>
cudaError_t backward(const T* grad, const T* x, const T* bias, T* dx, T* dbias, A* workspace,
                     int64_t rows, int64_t cols, bool tanh_form, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const bool wide = packs_fit<T>(cols, grad, x, bias, dx);
  auto* start = wide ? tanh_form ? start_backward<T, A, N, true> : start_backward<T, A, N, false>
                : tanh_form ? start_backward<T, A, 1, true>
                            : start_backward<T, A, 1, false>;
  start(grad, x, bias, dx, workspace, rows, cols, stream);
  finish_kernel<<<blocks(cols, 32), dim3(32, 8), 0, stream>>>(
      workspace, dbias, bias_gelu_backward_parts(rows, cols), cols);
  return cudaGetLastError();
}

#define LAUNCHERS(SUFFIX, T, A)                                                                \
  extern "C" cudaError_t bias_gelu_launch_##SUFFIX(const T* x, const T* bias, T* out,          \
                                                   int64_t rows, int64_t cols, bool tanh_form, \
                                                   cudaStream_t stream) {                      \
    return forward<T, A>(x, bias, out, rows, cols, tanh_form, stream);                         \
  }                                                                                            \
  extern "C" cudaError_t bias_gelu_backward_launch_##SUFFIX(                                   \
      const T* grad, const T* x, const T* bias, T* dx, T* dbias, A* workspace, int64_t rows,   \
      int64_t cols, bool tanh_form, cudaStream_t stream) {                                     \
    return backward(grad, x, bias, dx, dbias, workspace, rows, cols, tanh_form, stream);       \
  }
LAUNCHERS(f32, float, float)
LAUNCHERS(f64, double, double)
LAUNCHERS(f16, __half, float)
LAUNCHERS(bf16, __nv_bfloat16, float)
