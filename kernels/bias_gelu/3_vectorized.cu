// 3_vectorized.cu: 16 bytes a load
// Before : rung 2 moves one element an instruction, 2 bytes of it for the 16-bit types
// Idea   : a thread reads and writes packs of 16 bytes: 4 float32 or 8 float16 elements of one row
// Cost   : 2·n·sizeof(T) bytes forward, 3·n backward; bound by memory        Legal: 0 < n < 2^39
// Result : 0.63 of copy, 4.05x rung 1, 2.48x eager  (H200, bfloat16 (8192, 8192) contiguous none)
// Try    : rows of 4097 elements: only every 8th (float32: 4th) starts at a multiple of 16 bytes

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

constexpr int BLOCK = 256;
constexpr int TX = 32,
              TY = 8;  // backward: a block has 32 packs of columns, walks down 8 rows at once
constexpr int64_t PARTS = 64;  // and the rows are shared out among this many blocks

template <typename T>
struct Accumulator {
  using type = float;  // 16-bit types are stored, never computed in
};
template <>
struct Accumulator<double> {
  using type = double;
};

template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {  // aligned to its own size: one load, one store
  T at[N];
};

// GELU(h) = h·Φ(h), arXiv:1606.08415: exact, or with Φ from a tanh.
template <typename A>
__device__ A gelu(A h, bool tanh_form) {
  if (!tanh_form) return h * A(0.5) * (A(1) + erf(h * A(0.70710678118654752)));
  return h * A(0.5) * (A(1) + tanh(A(0.79788456080286536) * (h + A(0.044715) * h * h * h)));
}

// Product rule: Φ(h) + h·Φ'(h).
template <typename A>
__device__ A gelu_slope(A h, bool tanh_form) {
  if (!tanh_form) {
    const A density = A(0.39894228040143268) * exp(A(-0.5) * h * h);  // of the normal distribution
    return A(0.5) * (A(1) + erf(h * A(0.70710678118654752))) + h * density;
  }
  const A t = tanh(A(0.79788456080286536) * (h + A(0.044715) * h * h * h));
  const A inner = A(0.79788456080286536) * (A(1) + A(0.134145) * h * h);
  return A(0.5) * (A(1) + t) + A(0.5) * h * (A(1) - t * t) * inner;
}

// A pack lies within one row, because cols is a multiple of N.
template <typename T, int N>
__global__ void forward_kernel(const T* x, const T* bias, T* out, int64_t packs, int64_t row_packs,
                               bool tanh_form) {
  using A = typename Accumulator<T>::type;
  using P = Pack<T, N>;
  const int64_t i = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (i >= packs) return;
  P h = reinterpret_cast<const P*>(x)[i];
  const P b = reinterpret_cast<const P*>(bias)[i % row_packs];
#pragma unroll
  for (int k = 0; k < N; ++k) h.at[k] = static_cast<T>(gelu(A(h.at[k]) + A(b.at[k]), tanh_form));
  reinterpret_cast<P*>(out)[i] = h;
}

// Block (bx, part) has the packs bx·TX … and the rows part·TY, part·TY + 1, … of every stride.
template <typename T, typename A, int N>
__global__ void backward_kernel(const T* grad, const T* x, const T* bias, T* dx, A* workspace,
                                int64_t rows, int64_t cols, bool tanh_form) {
  using P = Pack<T, N>;
  __shared__ A sums[TY][TX * N];
  const int64_t c = (int64_t{blockIdx.x} * TX + threadIdx.x) * N;
  A sum[N] = {};
  if (c < cols) {
    const P b = *reinterpret_cast<const P*>(bias + c);
    const int64_t stride = int64_t{gridDim.y} * TY;
    for (int64_t r = int64_t{blockIdx.y} * TY + threadIdx.y; r < rows; r += stride) {
      const P g = *reinterpret_cast<const P*>(grad + r * cols + c);
      P h = *reinterpret_cast<const P*>(x + r * cols + c);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const A d = A(g.at[k]) * gelu_slope(A(h.at[k]) + A(b.at[k]), tanh_form);
        h.at[k] = static_cast<T>(d);
        sum[k] += d;
      }
      *reinterpret_cast<P*>(dx + r * cols + c) = h;
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) sums[threadIdx.y][k * TX + threadIdx.x] = sum[k];
  __syncthreads();
  if (threadIdx.y == 0 && c < cols) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      for (int y = 1; y < TY; ++y) sum[k] += sums[y][k * TX + threadIdx.x];
      workspace[blockIdx.y * cols + c + k] = sum[k];
    }
  }
}

// dbias[c] = the sum of workspace[0 … parts-1][c], always in the same order: the same bits each
// run.
template <typename T, typename A>
__global__ void finish_kernel(const A* workspace, T* dbias, int64_t parts, int64_t cols) {
  const int64_t c = int64_t{blockIdx.x} * BLOCK + threadIdx.x;
  if (c >= cols) return;
  A sum = 0;
  for (int64_t p = 0; p < parts; ++p) sum += workspace[p * cols + c];
  dbias[c] = static_cast<T>(sum);
}

unsigned blocks(int64_t n, int64_t size) { return static_cast<unsigned>((n + size - 1) / size); }

// The widest pack that the row length and the addresses allow: all rows must start on its boundary.
template <typename T, typename... Pointers>
bool packs_fit(int64_t cols, Pointers... pointers) {
  return cols * sizeof(T) % 16 == 0 && (reinterpret_cast<uintptr_t>(pointers) | ...) % 16 == 0;
}

template <typename T, int N>
void start_forward(const T* x, const T* bias, T* out, int64_t rows, int64_t cols, bool tanh_form,
                   cudaStream_t stream) {
  const int64_t packs = rows * cols / N;
  forward_kernel<T, N>
      <<<blocks(packs, BLOCK), BLOCK, 0, stream>>>(x, bias, out, packs, cols / N, tanh_form);
}

template <typename T>
cudaError_t forward(const T* x, const T* bias, T* out, int64_t rows, int64_t cols, bool tanh_form,
                    cudaStream_t stream) {
  auto* start =
      packs_fit<T>(cols, x, bias, out) ? start_forward<T, 16 / sizeof(T)> : start_forward<T, 1>;
  start(x, bias, out, rows, cols, tanh_form, stream);
  return cudaGetLastError();
}

// Rows of the workspace (parts × cols accumulators) that the backward pass wants.
extern "C" int64_t bias_gelu_backward_parts(int64_t rows, int64_t) {
  return std::min<int64_t>(PARTS, (rows + TY - 1) / TY);
}

template <typename T, typename A>
cudaError_t backward(const T* grad, const T* x, const T* bias, T* dx, T* dbias, A* workspace,
                     int64_t rows, int64_t cols, bool tanh_form, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const int64_t parts = bias_gelu_backward_parts(rows, cols);
  const bool wide = packs_fit<T>(cols, grad, x, bias, dx);
  const dim3 grid(blocks(cols, TX * (wide ? N : 1)), static_cast<unsigned>(parts));
  auto* kernel = wide ? backward_kernel<T, A, N> : backward_kernel<T, A, 1>;
  kernel<<<grid, dim3(TX, TY), 0, stream>>>(grad, x, bias, dx, workspace, rows, cols, tanh_form);
  finish_kernel<<<blocks(cols, BLOCK), BLOCK, 0, stream>>>(workspace, dbias, parts, cols);
  return cudaGetLastError();
}

#define LAUNCHERS(SUFFIX, T, A)                                                                \
  extern "C" cudaError_t bias_gelu_launch_##SUFFIX(const T* x, const T* bias, T* out,          \
                                                   int64_t rows, int64_t cols, bool tanh_form, \
                                                   cudaStream_t stream) {                      \
    return forward(x, bias, out, rows, cols, tanh_form, stream);                               \
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
