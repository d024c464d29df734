// What the machine costs: measure_costs.py builds and runs this in both modes.
#include <cuda_runtime.h>

#include <algorithm>
#include <ctime>

__global__ void add(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
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
    for (int i = 0; i < kTile; i++) sum += a[y][i] * b[i][x];
    __syncthreads();
  }
  C[row * n + column] = sum;
}

__global__ void barriers(int n) {
  for (int i = 0; i < n; i++) __syncthreads();
}

static double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class F>
void measure(const char* name, F run) {
  double wall = 1e9, cpu = 1e9;
  for (int i = 0; i < 7; i++) {
    const double w = seconds(CLOCK_MONOTONIC), c = seconds(CLOCK_PROCESS_CPUTIME_ID);
    run();
    wall = std::min(wall, seconds(CLOCK_MONOTONIC) - w);
    cpu = std::min(cpu, seconds(CLOCK_PROCESS_CPUTIME_ID) - c);
  }
  printf("  %-32s %9.2f ms, of all cores together %9.2f ms\n", name, wall * 1e3, cpu * 1e3);
}

int main() {
  const int n = 1 << 20;
  float *a, *b, *c;
  cudaMalloc(&a, n * sizeof(float));
  cudaMalloc(&b, n * sizeof(float));
  cudaMalloc(&c, n * sizeof(float));
  for (int i = 0; i < n; i++) a[i] = i % 7, b[i] = i % 5;
  measure("vector add, 2^20", [&] { add<<<n / 256, 256>>>(a, b, c, n); });
  measure("tiled matmul, 256^3", [&] { matmul<<<dim3(16, 16), dim3(16, 16)>>>(a, b, c, 256); });
  measure("100 barriers, 16 x 256 threads", [&] { barriers<<<16, 256>>>(100); });
  measure("one small launch", [&] { add<<<1, 32>>>(a, b, c, 32); });
  return cudaGetLastError();
}
