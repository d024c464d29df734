// Correct kernels that look suspicious. The checker must stay silent on every one of them, and
// the results must be right whatever the order of the threads.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "harness.h"

namespace cg = cooperative_groups;

__global__ void early_return_before_barrier(float* y, int n) {
  __shared__ float s[64];
  const int i = threadIdx.x;
  if (i >= n) return;  // threads that are gone do not count for the barrier
  s[i] = i;
  __syncthreads();
  y[i] = s[n - 1 - i];
}
TEST(early_return_before_barrier) {
  Array<float> y(64);
  early_return_before_barrier<<<1, 64>>>(y, 40);
  no_error();
  EQUAL(y[0], 39.f);
}

__global__ void last_block_sums(const float* x, float* parts, unsigned* arrived, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = x[blockIdx.x];
    __threadfence();
    last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += parts[b];
    *out = sum;
  }
}
TEST(last_block_sums) {
  Array<float> x(40, 1.f), parts(40), out(1);
  Array<unsigned> arrived(1);
  last_block_sums<<<40, 32>>>(x, parts, arrived, out);
  no_error();
  EQUAL(out[0], 40.f);
}

__global__ void look_back(const int* x, int* sums, volatile int* state) {
  if (threadIdx.x != 0) return;
  int before = 0;
  if (blockIdx.x > 0) {
    while (state[blockIdx.x - 1] == 0) {
    }
    __threadfence();
    before = sums[blockIdx.x - 1];
  }
  sums[blockIdx.x] = before + x[blockIdx.x];
  __threadfence();
  state[blockIdx.x] = 1;
}
TEST(look_back) {
  Array<int> x(64, 2), sums(64), state(64);
  look_back<<<64, 32>>>(x, sums, state);
  no_error();
  EQUAL(sums[63], 128);
}

__global__ void ticket_order(unsigned* ticket, int* order) {
  __shared__ unsigned mine;
  if (threadIdx.x == 0) mine = atomicAdd(ticket, 1u);
  __syncthreads();
  if (threadIdx.x == 0) order[mine] = 1;
}
TEST(ticket_order) {
  Array<unsigned> ticket(1);
  Array<int> order(30);
  ticket_order<<<30, 64>>>(ticket, order);
  no_error();
  for (int i = 0; i < 30; i++) EQUAL(order[i], 1);
}

__global__ void warp_reduction_with_syncwarp(float* x) {
  __shared__ float s[64];
  const int t = threadIdx.x;
  s[t] = x[t];
  __syncthreads();
  if (t < 32) {
    for (int k = 32; k > 0; k >>= 1) {
      const float other = s[t + (t < k ? k : 0)];
      __syncwarp();
      if (t < k) s[t] += other;
      __syncwarp();
    }
    if (t == 0) x[0] = s[0];
  }
}
TEST(warp_reduction_with_syncwarp) {
  Array<float> x(64, 1.f);
  warp_reduction_with_syncwarp<<<1, 64>>>(x);
  no_error();
  EQUAL(x[0], 64.f);
}

__global__ void double_buffer(const float* x, float* y, int tiles) {
  __shared__ float s[2][64];
  float sum = 0;
  s[0][threadIdx.x] = x[threadIdx.x];
  for (int t = 0; t < tiles; t++) {
    __syncthreads();  // one barrier a turn is enough with two buffers
    if (t + 1 < tiles) s[(t + 1) % 2][threadIdx.x] = x[(t + 1) * 64 + threadIdx.x];
    for (int i = 0; i < 64; i++) sum += s[t % 2][i];
  }
  y[threadIdx.x] = sum;
}
TEST(double_buffer) {
  Array<float> x(64 * 5, 1.f), y(64);
  double_buffer<<<1, 64>>>(x, y, 5);
  no_error();
  EQUAL(y[17], 320.f);
}

__global__ void padded_transpose(const float* in, float* out, int n) {
  __shared__ float tile[32][33];
  int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * n + x];
  __syncthreads();
  x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) out[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];
}
TEST(padded_transpose) {
  Array<float> in(64 * 64), out(64 * 64);
  for (int i = 0; i < 64 * 64; i++) in[i] = i;
  padded_transpose<<<dim3(2, 2), dim3(32, 8)>>>(in, out, 64);
  no_error();
  for (int i = 0; i < 64 * 64; i++) EQUAL(out[i], in[i % 64 * 64 + i / 64]);
}

__global__ void halves_of_a_word(__half* y, unsigned char* b) {
  // Neighbours write different bytes of one word, also across blocks.
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __hadd(y[i], __float2half(i));
  b[i] = static_cast<unsigned char>(b[i] + i);
}
TEST(halves_of_a_word) {
  Array<__half> y(99, __float2half(0.f));
  Array<unsigned char> b(99);
  halves_of_a_word<<<9, 11>>>(y, b);
  no_error();
  EQUAL(__half2float(y[98]), 98.f);
  EQUAL(b[98], 98);
}

__global__ void odd_start(__half* y, int n) {
  if (static_cast<int>(threadIdx.x) < n) y[threadIdx.x] = __float2half(1.f);
}
TEST(odd_start) {  // an extent that begins and ends in the middle of a word
  Array<__half> y(12, __float2half(0.f));
  odd_start<<<1, 32>>>(y + 1, 11);
  no_error();
}

__global__ void critical_section(int* lock, float* total, const float* x) {
  if (threadIdx.x != 0) return;
  while (atomicCAS(lock, 0, 1) != 0) __nanosleep(20);
  __threadfence();
  *total += x[blockIdx.x];
  __threadfence();
  atomicExch(lock, 0);
}
TEST(critical_section) {
  Array<int> lock(1);
  Array<float> total(1), x(25, 2.f);
  critical_section<<<25, 32>>>(lock, total, x);
  no_error();
  EQUAL(total[0], 50.f);
}

__global__ void atomic_double_by_hand(double* total) {
  auto* word = reinterpret_cast<unsigned long long*>(total);
  unsigned long long old = *word, assumed;  // a plain read, as in CUDA's own guide
  do {
    assumed = old;
    const double sum = __longlong_as_double(static_cast<long long>(assumed)) + 1.;
    old = atomicCAS(word, assumed, static_cast<unsigned long long>(__double_as_longlong(sum)));
  } while (assumed != old);
}
TEST(atomic_double_by_hand) {
  Array<double> total(1);
  atomic_double_by_hand<<<4, 64>>>(total);
  no_error();
  EQUAL(total[0], 256.);
}

__global__ void shuffle_in_a_branch(int* y) {
  const int lane = threadIdx.x;
  int v = lane;
  if (lane < 12) {
    const unsigned mask = __activemask();
    v = __shfl_sync(mask, v, 11);
  } else if (lane >= 16) {
    v = __shfl_xor_sync(0xffff0000u, v, 8);
  }
  y[lane] = v;
}
TEST(shuffle_in_a_branch) {
  Array<int> y(32);
  shuffle_in_a_branch<<<1, 32>>>(y);
  no_error();
  EQUAL(y[3], 11);
  EQUAL(y[13], 13);
  EQUAL(y[20], 28);
}

__global__ void aggregated_atomic(const int* x, int* count) {
  if (x[blockIdx.x * blockDim.x + threadIdx.x] > 0) {
    auto group = cg::coalesced_threads();
    if (group.thread_rank() == 0) atomicAdd(count, static_cast<int>(group.size()));
  }
}
TEST(aggregated_atomic) {
  Array<int> x(256), count(1);
  int want = 0;
  for (int i = 0; i < 256; i++) want += x[i] = i % 3 == 0;
  aggregated_atomic<<<2, 128>>>(x, count);
  no_error();
  EQUAL(count[0], want);
}

__global__ void whole_row_through_one_pointer(float* y) {
  __shared__ float tile[8][16];
  float* flat = &tile[0][0];  // a pointer may walk over all of the array
  for (int i = threadIdx.x; i < 128; i += blockDim.x) flat[i] = i;
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.x / 16][threadIdx.x % 16];
}
TEST(whole_row_through_one_pointer) {
  Array<float> y(64);
  whole_row_through_one_pointer<<<1, 64>>>(y);
  no_error();
  EQUAL(y[63], 63.f);
}

struct Pair {
  float value;
  char flag;  // three bytes behind it belong to nobody
};
__global__ void padding_in_a_struct(float* y) {
  __shared__ Pair s[32];
  s[threadIdx.x].value = threadIdx.x;
  s[threadIdx.x].flag = 1;
  __syncthreads();
  const Pair other = s[31 - threadIdx.x];
  y[threadIdx.x] = other.value + other.flag;
}
TEST(padding_in_a_struct) {
  Array<float> y(32);
  padding_in_a_struct<<<1, 32>>>(y);
  no_error();
  EQUAL(y[0], 32.f);
}

struct Holes {
  __half h;
  char c;  // a byte, then a whole word behind it belong to nobody
  double d;
};
struct alignas(16) Point {
  float x, y, z;
};
template <class T>
__global__ void copy_structs(T a, T* out) {
  extern __shared__ char bytes[];
  __shared__ T s[32], u[32];
  __shared__ alignas(16) char raw[32 * sizeof(T)];
  T* v = reinterpret_cast<T*>(raw);
  T* w = reinterpret_cast<T*>(bytes);
  const int t = threadIdx.x;
  set(s[t], a, t);
  __syncwarp();
  u[t] = s[31 - t];
  set(v[t], a, t);
  set(w[t], a, t);
  __syncwarp();
  out[t] = u[31 - t];
  out[t] = v[t ^ 1];
  out[t] = w[t ^ 2];
}
__device__ void set(Holes& to, Holes from, int t) {
  to.h = from.h, to.c = from.c, to.d = from.d + t;
}
__device__ void set(Point& to, Point from, int t) {
  to.x = from.x, to.y = from.y, to.z = from.z + t;
}
__device__ void set(float4& to, float4 from, int t) {
  to.x = from.x, to.y = from.y, to.z = from.z + t;  // and w is never used
}
TEST(structs_with_holes) {
  Array<Holes> a(32, Holes{__float2half(0.f), 'a', 0.});
  copy_structs<<<1, 32, 32 * sizeof(Holes)>>>(Holes{__float2half(1.f), 'c', 2.}, a.p);
  no_error();
  EQUAL(a[3].d, 3.);
  Array<Point> b(32);
  copy_structs<<<1, 32, 32 * sizeof(Point)>>>(Point{1.f, 2.f, 3.f}, b.p);
  no_error();
  EQUAL(b[3].z, 4.f);
  Array<float4> c(32);
  copy_structs<<<1, 32, 32 * sizeof(float4)>>>(make_float4(1.f, 2.f, 3.f, 4.f), c.p);
  no_error();
  EQUAL(c[3].z, 4.f);
}

__global__ void unsigned_wraps(unsigned* y) {
  unsigned h = threadIdx.x * 2654435761u;  // a hash may wrap
  h ^= h >> 16;
  y[threadIdx.x] = h * 0x85ebca6bu - 1;
}
TEST(unsigned_wraps) {
  Array<unsigned> y(64);
  unsigned_wraps<<<1, 64>>>(y);
  no_error();
}

__global__ void producer_and_consumer(float* y) {
  // One warp fills, the other one waits for a flag in shared memory.
  __shared__ float data;
  __shared__ volatile int ready;
  if (threadIdx.x == 0) ready = 0;
  __syncthreads();
  if (threadIdx.x == 32) {
    data = 7;
    __threadfence_block();
    ready = 1;
  }
  if (threadIdx.x == 0) {
    while (ready == 0) {
    }
    __threadfence_block();
    *y = data;
  }
}
TEST(producer_and_consumer) {
  Array<float> y(1);
  producer_and_consumer<<<1, 64>>>(y);
  no_error();
  EQUAL(y[0], 7.f);
}

__global__ void ring_of_buffers(const float* x, float* y, int rounds) {
  // One warp fills, the other empties; all of their lanes spin on flags.
  __shared__ float buffer[4][32];
  __shared__ volatile int full[4];
  if (threadIdx.x < 4) full[threadIdx.x] = 0;
  __syncthreads();
  const bool fills = threadIdx.x < 32;
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < rounds; i++) {
    while (full[i % 4] == fills) {
    }
    __threadfence_block();
    __syncwarp();
    if (fills) {
      buffer[i % 4][lane] = x[i * 32 + lane];
    } else {
      y[i * 32 + lane] = buffer[i % 4][31 - lane];
    }
    __threadfence_block();
    __syncwarp();
    if (lane == 0) full[i % 4] = fills;
  }
}
TEST(ring_of_buffers) {
  Array<float> x(32 * 16), y(32 * 16);
  for (int i = 0; i < 32 * 16; i++) x[i] = i;
  ring_of_buffers<<<1, 64>>>(x, y, 16);
  no_error();
  EQUAL(y[0], 31.f);
  EQUAL(y[511], 480.f);
}

__global__ void same_input_twice(const float* a, const float* b, float* out, int n) {
  if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}
TEST(same_input_twice) {
  Array<float> x(32, 2.f), out(32);
  same_input_twice<<<1, 32>>>(x, x, out, 32);
  no_error();
  same_input_twice<<<1, 32>>>(x, x, x, 32);  // and in place, each thread its own element
  no_error();
  EQUAL(x[9], 4.f);
}

__global__ void __cluster_dims__(2, 1, 1) halves_of_a_row(const float* x, float* y, int n) {
  // Each block sums its half; both read the other's sum through distributed shared memory.
  __shared__ float sum;
  auto cluster = cg::this_cluster();
  auto warp = cg::tiled_partition<32>(cg::this_thread_block());
  float mine = 0;
  for (int i = threadIdx.x; i < n / 2; i += 32) mine += x[cluster.block_rank() * (n / 2) + i];
  mine = cg::reduce(warp, mine, cg::plus<float>());
  if (threadIdx.x == 0) sum = mine;
  cluster.sync();
  const float total = *cluster.map_shared_rank(&sum, 0) + *cluster.map_shared_rank(&sum, 1);
  if (threadIdx.x == 0) y[cluster.block_rank()] = total;
  cluster.sync();  // the other block may still be reading my sum
}
TEST(halves_of_a_row) {
  Array<float> x(200, 1.f), y(2);
  halves_of_a_row<<<2, 32>>>(x, y, 200);
  no_error();
  EQUAL(y[0], 200.f);
  EQUAL(y[1], 200.f);
}

__global__ void reuse_across_barriers(float* x) {
  __shared__ float s[32];
  for (int turn = 0; turn < 4; turn++) {
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[31 - threadIdx.x] + 1;
    __syncthreads();
  }
}
TEST(reuse_across_barriers) {
  Array<float> x(32, 0.f);
  reuse_across_barriers<<<1, 32>>>(x);
  no_error();
  EQUAL(x[0], 4.f);
}

__global__ void grid_stride(const float* x, float* y, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[i] = x[i] + 1;
  }
}
TEST(grid_stride) {
  Array<float> x(1000, 1.f), y(1000);
  grid_stride<<<3, 64>>>(x, y, 1000);
  no_error();
  EQUAL(y[999], 2.f);
}
