// Planted bugs. Each must be found in a checked build: the message must name the line (or lines)
// marked `// <- name`, and contain the words behind `// finds:`.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cassert>  // must not bring back the assert that ends the process

#include "harness.h"

namespace cg = cooperative_groups;

// ---- out of bounds ----

__global__ void off_by_one(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = 2 * x[i];  // <- off_by_one
}
TEST(off_by_one) {  // finds: thread (103,0,0) reads 4 bytes | outside of `x` | block (3,0,0)
  Array<float> x(1000), y(1000);
  off_by_one<<<8, 298>>>(x, y, 998);
  no_error();
  off_by_one<<<4, 299>>>(x, y, 1000);
}

__global__ void before_the_start(float* y) {
  y[static_cast<int>(threadIdx.x) - 1] = 1;  // <- before_the_start
}
TEST(before_the_start) {  // finds: writes 4 bytes | outside of `y` | byte -4 of 128
  Array<float> y(32);
  before_the_start<<<1, 32>>>(y);
}

__global__ void swapped_row_and_column(const float* in, float* out, int rows, int columns) {
  const int r = threadIdx.y, c = threadIdx.x;
  if (r < rows && c < columns) out[r * columns + c] = in[c * columns + r];  // <- swapped
}
TEST(swapped) {  // finds: outside of `in`
  Array<float> in(4 * 20), out(4 * 20);
  swapped_row_and_column<<<1, dim3(20, 4)>>>(in, out, 4, 20);
}

__global__ void last_float4(const float4* x, float* y, int n) {
  const int i = threadIdx.x;
  if (4 * i < n) {
    const float4 v = x[i];  // <- ragged_vector_tail
    y[i] = v.x + v.y + v.z + v.w;
  }
}
TEST(ragged_vector_tail) {  // finds: reads 16 bytes | outside of `x`
  Array<float> x(30), y(32);
  last_float4<<<1, 32>>>(reinterpret_cast<float4*>(x.p), y, 30);
}

// Class types: here a compiler may let the call itself read x[i], or write out[i].
template <class T>
__global__ void half_argument(const T* x, float* out) {
  out[threadIdx.x] = float(x[threadIdx.x + 1]);  // <- half_argument  // <- bf16_argument
}
TEST(half_argument) {  // finds: reads 2 bytes | outside of `x`
  Array<__half> x(32);
  Array<float> out(32);
  half_argument<<<1, 32>>>(x.p, out.p);
}
TEST(bf16_argument) {  // finds: reads 2 bytes | outside of `x`
  Array<__nv_bfloat16> x(32);
  Array<float> out(32);
  half_argument<<<1, 32>>>(x.p, out.p);
}

__global__ void half_result(const float* x, __half* out) {
  out[threadIdx.x + 1] = __float2half(x[threadIdx.x]);  // <- half_result
}
TEST(half_result) {  // finds: writes 2 bytes | outside of `out`
  Array<float> x(32);
  Array<__half> out(32);
  half_result<<<1, 32>>>(x.p, out.p);
}

__global__ void half_to_add(__half* sum, const __half* x) {
  atomicAdd(sum, x[threadIdx.x + 1]);  // <- half_to_add
}
TEST(half_to_add) {  // finds: reads 2 bytes | outside of `x`
  Array<__half> sum(1), x(32);
  half_to_add<<<1, 32>>>(sum.p, x.p);
}

struct Extremes {
  float least, most;
};
__device__ __noinline__ Extremes both(Extremes a, Extremes b) {
  return {fminf(a.least, b.least), fmaxf(a.most, b.most)};
}
__global__ void struct_result(float* out) {
  __shared__ Extremes s[64];
  const int t = threadIdx.x;
  s[t] = both(Extremes{1.f * t, 0}, Extremes{0, 1.f * t});
  __syncthreads();
  for (int step = 32; step > 0; step /= 2) {  // and no barrier between the steps
    if (t < step) s[t] = both(s[t], s[t + step]);  // <- struct_result
  }
  if (t == 0) *out = s[0].most;
}
TEST(struct_result) {  // finds: race in __shared__ s
  Array<float> out(1);
  struct_result<<<1, 64>>>(out);
}

__global__ void atomic_outside(int* bins, const int* x) {
  atomicAdd(&bins[x[threadIdx.x]], 1);  // <- atomic_outside
}
TEST(atomic_outside) {  // finds: atomically updates | outside of `bins`
  Array<int> bins(10), x(32, 10);
  atomic_outside<<<1, 32>>>(bins, x);
}

__global__ void static_shared_outside(float* y) {
  __shared__ float a[32], b[32];
  float* p = a;
  a[threadIdx.x] = 1, b[threadIdx.x] = 2;
  __syncthreads();
  y[threadIdx.x] = p[threadIdx.x + 1] + b[threadIdx.x];  // <- static_shared_outside
}
TEST(static_shared_outside) {  // finds: outside of __shared__ a | byte 128 of 128
  Array<float> y(32);
  static_shared_outside<<<1, 32>>>(y);
}

__global__ void dynamic_shared_outside(float* y) {
  extern __shared__ float s[];
  s[threadIdx.x] = 1;  // <- dynamic_shared_outside
  y[threadIdx.x] = s[threadIdx.x];
}
TEST(dynamic_shared_outside) {  // finds: dynamic shared memory | byte 64 of 64
  Array<float> y(64);
  dynamic_shared_outside<<<1, 64, 64>>>(y);
}

__global__ void index_of_a_row(float* y) {
  __shared__ float tile[4][32];
  tile[threadIdx.y][threadIdx.x] = 0;
  __syncthreads();
  y[threadIdx.x] = tile[threadIdx.y][threadIdx.x + 1];  // <- index_of_a_row
}
TEST(index_of_a_row) {  // finds: uses index 32 of an array of type 'float[32]'
  Array<float> y(32);
  index_of_a_row<<<1, dim3(32, 4)>>>(y);
}

struct Bins {
  int n;
  int count[4];  // the last member: it could be taken for one of any length
};
__global__ void last_array_of_a_struct(const int* index, int* y) {
  __shared__ Bins bins[2];
  Bins mine = {};
  mine.count[index[0] - 2]++;
  bins[0].count[index[threadIdx.x] - 1] = mine.count[0];  // <- last_array_of_a_struct
  y[threadIdx.x] = 1;
}
TEST(last_array_of_a_struct) {  // finds: uses index 4 of an array of type 'int[4]'
  Array<int> index(32, 5), y(32);
  last_array_of_a_struct<<<1, 32>>>(index, y);
}

__global__ void local_array(const int* index, int* y) {
  int counts[4] = {};
  counts[index[threadIdx.x]]++;  // <- local_array
  y[threadIdx.x] = counts[0];
}
TEST(local_array) {  // finds: uses index 5 of an array of type 'int[4]'
  Array<int> index(32, 5), y(32);
  local_array<<<1, 32>>>(index, y);
}

__global__ void store(int* y) { y[threadIdx.x] = 1; }  // <- host_pointer  // <- null_pointer  // <- freed
TEST(host_pointer) {  // finds: in memory that the kernel was not given
  int on_the_host[32];
  store<<<1, 32>>>(on_the_host);
}
TEST(null_pointer) {  // finds: through a null pointer
  store<<<1, 32>>>(nullptr);
}
TEST(freed) {  // finds: writes 4 bytes at
  int* p;
  cudaMalloc(&p, 128);
  cudaFree(p);
  store<<<1, 32>>>(p);
}

__global__ void address_of_a_local(float** shared_pointer, float* y) {
  float mine = threadIdx.x;
  if (threadIdx.x == 0) *shared_pointer = &mine;
  __syncthreads();
  y[threadIdx.x] = **shared_pointer;  // <- address_of_a_local
}
TEST(address_of_a_local) {  // finds: a local variable of another thread
  Array<float*> pointer(1);
  Array<float> y(64);
  address_of_a_local<<<1, 64>>>(pointer, y);
}

// ---- alignment ----

__global__ void misaligned_float4(const float* x, float4* y) {
  y[threadIdx.x] = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x);  // <- misaligned_float4
}
TEST(misaligned_float4) {  // finds: reads 16 bytes at once | does not lie at a multiple of 16
  Array<float> x(200);
  Array<float4> y(32, make_float4(0, 0, 0, 0));
  misaligned_float4<<<1, 32>>>(x + 1, y);
}

template <class Pair>
__global__ void misaligned_pair(const Pair* x, Pair* y) {
  y[threadIdx.x] = __hadd2(x[threadIdx.x], x[threadIdx.x]);  // <- misaligned_half2  // <- misaligned_bf16
}
TEST(misaligned_half2) {  // finds: reads 4 bytes at once | does not lie at a multiple of 4
  Array<__half> x(66);
  Array<__half2> y(32);
  misaligned_pair<<<1, 32>>>(reinterpret_cast<__half2*>(x.p + 1), y.p);
}
TEST(misaligned_bf16) {  // finds: reads 4 bytes at once | does not lie at a multiple of 4
  Array<__nv_bfloat16> x(66);
  Array<__nv_bfloat162> y(32);
  misaligned_pair<<<1, 32>>>(reinterpret_cast<__nv_bfloat162*>(x.p + 1), y.p);
}

__global__ void misaligned_shared(double* y) {
  __shared__ float s[66];
  s[threadIdx.x] = s[threadIdx.x + 32] = 0;
  __syncthreads();
  y[threadIdx.x] = *reinterpret_cast<double*>(&s[threadIdx.x]);  // <- misaligned_shared
}
TEST(misaligned_shared) {  // finds: multiple of 8 | __shared__ s
  Array<double> y(32);
  misaligned_shared<<<1, 32>>>(y);
}

// ---- races in a block ----

__global__ void missing_barrier(float* y) {
  __shared__ float s[128];
  s[threadIdx.x] = threadIdx.x;         // <- missing_barrier
  y[threadIdx.x] = s[127 - threadIdx.x];  // <- missing_barrier
}
TEST(missing_barrier) {  // finds: race in __shared__ s | Next: put __syncthreads()
  Array<float> y(128);
  missing_barrier<<<1, 128>>>(y);
}

__global__ void missing_second_barrier(const float* x, float* y, int tiles) {
  __shared__ float s[64];
  float sum = 0;
  for (int t = 0; t < tiles; t++) {
    s[threadIdx.x] = x[t * 64 + threadIdx.x];  // <- missing_second_barrier
    __syncthreads();
    for (int i = 0; i < 64; i++) sum += s[i];  // <- missing_second_barrier
  }
  y[threadIdx.x] = sum;
}
TEST(missing_second_barrier) {  // finds: race in __shared__ s | with no barrier between
  Array<float> x(192), y(64);
  missing_second_barrier<<<1, 64>>>(x, y, 3);
}

__global__ void reduction_without_barrier(float* x) {
  __shared__ float s[256];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int k = 128; k > 0; k >>= 1) {
    if (static_cast<int>(threadIdx.x) < k) s[threadIdx.x] += s[threadIdx.x + k];  // <- reduction_without_barrier
  }
  if (threadIdx.x == 0) x[0] = s[0];
}
TEST(reduction_without_barrier) {  // finds: race in __shared__ s
  Array<float> x(256);
  reduction_without_barrier<<<1, 256>>>(x);
}

__global__ void same_slot(int* y) {
  __shared__ int winner;
  winner = threadIdx.x;  // <- same_slot
  __syncthreads();
  y[threadIdx.x] = winner;
}
TEST(same_slot) {  // finds: race in __shared__ winner | writes at
  Array<int> y(64);
  same_slot<<<1, 64>>>(y);
}

__global__ void plain_counter(int* y) {
  __shared__ int counter;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  counter++;  // <- plain_counter
  __syncthreads();
  if (threadIdx.x == 0) *y = counter;
}
TEST(plain_counter) {  // finds: race in __shared__ counter
  Array<int> y(1);
  plain_counter<<<1, 64>>>(y);
}

__global__ void result_read_too_early(int* y) {
  __shared__ int counter;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(&counter, 1);                // <- result_read_too_early
  if (threadIdx.x == 63) *y = counter;   // <- result_read_too_early
}
TEST(result_read_too_early) {  // finds: race in __shared__ counter | atomically updates | through a volatile pointer
  Array<int> y(1);
  result_read_too_early<<<1, 64>>>(y);
}

__global__ void warp_synchronous(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] += s[threadIdx.x + 32];
    s[threadIdx.x] += s[(threadIdx.x + 16) % 32];  // <- warp_synchronous
    x[threadIdx.x] = s[threadIdx.x];
  }
}
TEST(warp_synchronous) {  // finds: both in one warp | Next: put __syncwarp()
  Array<float> x(64);
  warp_synchronous<<<1, 64>>>(x);
}

__global__ void warp_synchronous_volatile(float* x) {
  __shared__ float memory[64];
  volatile float* s = memory;
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < 32) {
    s[threadIdx.x] += s[threadIdx.x + 16];  // <- warp_synchronous_volatile
    x[threadIdx.x] = s[threadIdx.x];
  }
}
TEST(warp_synchronous_volatile) {  // finds: race in __shared__ memory | both in one warp
  Array<float> x(64);
  warp_synchronous_volatile<<<1, 64>>>(x);
}

__global__ void in_place_within_block(float* x) {
  const float right = x[(threadIdx.x + 1) % blockDim.x];  // <- in_place_within_block
  x[threadIdx.x] = right;                                 // <- in_place_within_block
}
TEST(in_place_within_block) {  // finds: race in `x`
  Array<float> x(64);
  in_place_within_block<<<1, 64>>>(x);
}

// ---- uninitialised shared memory ----

__global__ void half_filled(float* y) {
  __shared__ float s[64];
  if (threadIdx.x < 32) s[threadIdx.x] = 0;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];  // <- half_filled
}
TEST(half_filled) {  // finds: reads shared memory that nobody has written | __shared__ s | block (0,0,0)
  Array<float> y(64);
  half_filled<<<1, 64>>>(y);
}

__global__ void counter_never_set(int* y) {
  __shared__ int counter;
  atomicAdd(&counter, 1);  // <- counter_never_set
  __syncthreads();
  if (threadIdx.x == 0) *y = counter;
}
TEST(counter_never_set) {  // finds: atomically updates shared memory that nobody has written
  Array<int> y(1);
  counter_never_set<<<1, 64>>>(y);
}

struct Reading {
  int id;
  double values[2];
};
__global__ void member_never_set(double* y) {
  __shared__ Reading s[64];
  s[threadIdx.x].id = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x].id + s[threadIdx.x].values[1];  // <- member_never_set
}
TEST(member_never_set) {  // finds: shared memory that nobody has written | __shared__ s, byte 1528
  Array<double> y(64);
  member_never_set<<<1, 64>>>(y);
}

__global__ void struct_copied_too_far(double* y) {
  __shared__ Reading s[64];
  if (threadIdx.x < 63) s[threadIdx.x] = Reading{1, {2., 3.}};
  __syncthreads();
  Reading mine = s[threadIdx.x];  // <- struct_copied_too_far
  y[threadIdx.x] = mine.values[1];
}
TEST(struct_copied_too_far) {  // finds: shared memory that nobody has written | __shared__ s, byte 15
  Array<double> y(64);
  struct_copied_too_far<<<1, 64>>>(y);
}

__global__ void ragged_tile(float* y, int n) {
  __shared__ alignas(16) float s[64];
  if (static_cast<int>(threadIdx.x) < n) s[threadIdx.x] = 1;
  __syncthreads();
  const float4 v = reinterpret_cast<float4*>(s)[threadIdx.x % 16];  // <- ragged_tile
  y[threadIdx.x] = v.x + v.y + v.z + v.w;
}
TEST(ragged_tile) {  // finds: shared memory that nobody has written | __shared__ s, byte 248
  Array<float> y(64);
  ragged_tile<<<1, 64>>>(y, 62);
}

__global__ void halo_forgotten(float* y) {
  extern __shared__ float s[];
  s[threadIdx.x + 1] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x + 2];  // <- halo_forgotten
}
TEST(halo_forgotten) {  // finds: nobody has written | dynamic shared memory
  Array<float> y(64);
  halo_forgotten<<<1, 64, 66 * sizeof(float)>>>(y);
}

// ---- conflicts between blocks ----

__global__ void everyone_writes(int* y) {
  if (threadIdx.x == 0) *y = blockIdx.x;  // <- everyone_writes
}
TEST(everyone_writes) {  // finds: conflict between blocks in `y` | of block (0,0,0) writes
  Array<int> y(1);
  everyone_writes<<<4, 32>>>(y);
}

__global__ void sum_without_atomic(const float* x, float* out) {
  if (threadIdx.x == 0) *out += x[blockIdx.x];  // <- sum_without_atomic
}
TEST(sum_without_atomic) {  // finds: conflict between blocks in `out`
  Array<float> x(4), out(1);
  sum_without_atomic<<<4, 32>>>(x, out);
}

__global__ void stencil_in_place(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i > 0 && i < n - 1) {
    const float v = x[i - 1] + x[i] + x[i + 1];  // <- stencil_in_place
    __syncthreads();
    x[i] = v;  // <- stencil_in_place
  }
}
TEST(stencil_in_place) {  // finds: conflict between blocks in `x`
  Array<float> x(256);
  stencil_in_place<<<4, 64>>>(x, 256);
}

__global__ void last_block_without_fence(const float* x, float* parts, unsigned* arrived, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = x[blockIdx.x];  // <- last_block_without_fence
    last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x < gridDim.x) atomicAdd(out, parts[threadIdx.x]);  // <- last_block_without_fence
}
TEST(last_block_without_fence) {  // finds: conflict between blocks in `parts` | __threadfence()
  Array<float> x(8, 1.f), parts(8), out(1);
  Array<unsigned> arrived(1);
  last_block_without_fence<<<8, 32>>>(x, parts, arrived, out);
}

// ---- barriers and warps ----

__global__ void two_barriers(float* y) {
  if (threadIdx.x < 16) {
    __syncthreads();  // <- two_barriers
  } else {
    __syncthreads();  // <- two_barriers
  }
  y[threadIdx.x] = 1;
}
TEST(two_barriers) {  // finds: barrier divergence | Next: take the barrier out of the branch
  Array<float> y(64);
  two_barriers<<<1, 64>>>(y);
}

__global__ void barrier_or_shuffle(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x % 2) {
    v = __shfl_xor_sync(0xffffffff, v, 1);  // <- barrier_or_shuffle
  } else {
    __syncthreads();  // <- barrier_or_shuffle
  }
  y[threadIdx.x] = v;
}
TEST(barrier_or_shuffle) {  // finds: deadlock | 16 wait in __syncthreads() | 16 wait in __shfl_xor_sync()
  Array<float> y(32);
  barrier_or_shuffle<<<1, 32>>>(y);
}

__global__ void two_votes(int* y) {
  if (threadIdx.x < 8) {
    y[threadIdx.x] = __any_sync(~0u, 1);  // <- two_votes
  } else {
    y[threadIdx.x] = __all_sync(~0u, 1);  // <- two_votes
  }
}
TEST(two_votes) {  // finds: deadlock | 8 wait in __any_sync() | 24 wait in __all_sync()
  Array<int> y(32);
  two_votes<<<1, 32>>>(y);
}

__global__ void half_a_shuffle(float* y) {
  float v = threadIdx.x;
  if (threadIdx.x < 8) v += __shfl_down_sync(0xffffffff, v, 4);  // <- half_a_shuffle
  __syncthreads();                                               // <- half_a_shuffle
  y[threadIdx.x] = v;
}
TEST(half_a_shuffle) {  // finds: deadlock | 8 wait in __shfl_down_sync() | 24 wait in __syncthreads()
  Array<float> y(32);
  half_a_shuffle<<<1, 32>>>(y);
}

__global__ void short_warp(float* y) {
  float v = threadIdx.x;
  v += __shfl_down_sync(0xffffffff, v, 16);  // <- short_warp
  y[threadIdx.x] = v;
}
TEST(short_warp) {  // finds: reads lane | takes no part
  Array<float> y(24);
  short_warp<<<1, 24>>>(y);
}

__global__ void returned_lane(float* y, int n) {
  if (static_cast<int>(threadIdx.x) >= n) return;
  float v = 1;
  for (int step = 16; step; step >>= 1) v += __shfl_down_sync(0xffffffff, v, step);  // <- returned_lane
  y[threadIdx.x] = v;
}
TEST(returned_lane) {  // finds: takes no part | __shfl_down_sync()
  Array<float> y(32);
  returned_lane<<<1, 32>>>(y, 20);
}

__global__ void not_in_its_mask(float* y) {
  y[threadIdx.x] = __shfl_sync(0x0000ffff, 1.f, 0);  // <- not_in_its_mask
}
TEST(not_in_its_mask) {  // finds: a mask that leaves it out | lane 16
  Array<float> y(32);
  not_in_its_mask<<<1, 32>>>(y);
}

__global__ void half_a_matrix_product(const __half* a, float* c) {
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half, nvcuda::wmma::row_major> f;
  if (threadIdx.x < 16) nvcuda::wmma::load_matrix_sync(f, a, 16);  // <- half_a_matrix_product
  __syncwarp();                                                    // <- half_a_matrix_product
  c[threadIdx.x] = __half2float(f.x[0]);
}
TEST(half_a_matrix_product) {  // finds: deadlock | load_matrix_sync()
  Array<__half> a(256, __float2half(0.f));
  Array<float> c(32);
  half_a_matrix_product<<<1, 32>>>(a, c);
}

// ---- clusters ----

__global__ void __cluster_dims__(2, 1, 1) cluster_without_sync(int* y) {
  __shared__ int mine;
  auto cluster = cg::this_cluster();
  mine = blockIdx.x;                                               // <- cluster_without_sync
  y[blockIdx.x] = *cluster.map_shared_rank(&mine, 1 - blockIdx.x % 2);  // <- cluster_without_sync
}
TEST(cluster_without_sync) {  // finds: __shared__ mine
  Array<int> y(2);
  cluster_without_sync<<<2, 1>>>(y);
}

__global__ void __cluster_dims__(2, 1, 1) cluster_rank_too_high(int* y) {
  __shared__ int mine;
  mine = 1;
  cg::this_cluster().sync();
  *y = *cg::this_cluster().map_shared_rank(&mine, 2);  // <- cluster_rank_too_high
}
TEST(cluster_rank_too_high) {  // finds: calls map_shared_rank() at | for block 2 of a cluster of 2 | Next: pass
  Array<int> y(1);
  cluster_rank_too_high<<<2, 1>>>(y);
}

__global__ void __cluster_dims__(2, 1, 1) cluster_left_too_early(int* y) {
  __shared__ int mine;
  auto cluster = cg::this_cluster();
  mine = blockIdx.x;
  cluster.sync();
  y[blockIdx.x] = *cluster.map_shared_rank(&mine, 1 - cluster.block_rank());  // <- cluster_left_too_early
}
TEST(cluster_left_too_early) {  // finds: __shared__ mine | that block has returned | Next: put cluster.sync()
  Array<int> y(2);
  cluster_left_too_early<<<2, 1>>>(y);
}

// ---- integers ----

__global__ void narrow_product(float* y, int rows, int columns) {
  const int64_t size = rows * columns;  // <- narrow_product
  if (threadIdx.x < size) y[threadIdx.x] = 1;
}
TEST(narrow_product) {  // finds: 70000 * 70000 does not fit into 'int' | Next: compute in int64_t
  Array<float> y(32);
  narrow_product<<<1, 32>>>(y, 70000, 70000);
}

__global__ void divide(int* y, int by) { y[threadIdx.x] = 7 / by; }  // <- division_by_zero
TEST(division_by_zero) {  // finds: divides 7 by 0
  Array<int> y(32);
  divide<<<1, 32>>>(y, 0);
}

// ---- endless loops ----

__global__ void nobody_sets_it(volatile int* flag) {
  while (*flag == 0) {  // <- spin_forever
  }
}
TEST(spin_forever) {  // finds: no block has finished for a long time | Next: look for a loop
  Array<int> flag(1);
  nobody_sets_it<<<1, 32>>>(flag);
}

__global__ void waits_for_a_waiter(int* y) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    while (flag == 0) {  // <- waits_for_a_waiter
    }
  }
  __syncthreads();  // <- waits_for_a_waiter
  flag = 1;
  *y = 1;
}
TEST(waits_for_a_waiter) {  // finds: no block has finished | 31 wait in __syncthreads()
  Array<int> y(1);
  waits_for_a_waiter<<<1, 32>>>(y);
}

__device__ int without_end(int n, int* y) {
  volatile int keep[100];
  keep[n % 100] = n;
  if (*y < 0) return 0;
  return without_end(n + 1, y) + keep[0];
}
__global__ void recursion(int* y) { *y = without_end(0, y); }
TEST(endless_recursion) {  // finds: has used up its 128 KB of local memory
  Array<int> y(1);
  recursion<<<1, 1>>>(y);
}

// ---- asserts, launches ----

__global__ void asserts(int n) { assert(static_cast<int>(threadIdx.x) < n); }  // <- failed_assert
TEST(failed_assert) {  // finds: assertion `static_cast<int>(threadIdx.x) < n' failed | thread (16,0,0)
  asserts<<<1, 32>>>(16);
}

__global__ void started_late(int* y) {
  __shared__ int sum;
  if (threadIdx.x == 0) sum = 0;  // <- started_late
  atomicAdd(&sum, 1);             // <- started_late
  __syncthreads();
  y[0] = sum;
}
TEST(started_late) {  // finds: race in __shared__ sum | (or __syncthreads()) between the two
  Array<int> y(1);
  started_late<<<1, 64>>>(y);
}

__global__ void nothing() {}
TEST(too_many_threads) {  // finds: launch of nothing | the block is 2048 x 1 x 1 | at most 1024
  nothing<<<1, 2048>>>();  // <- too_many_threads
}
TEST(empty_grid) {  // finds: no dimension may be 0
  nothing<<<0, 32>>>();  // <- empty_grid
}
TEST(grid_y) {  // finds: y and z may be at most 65535
  nothing<<<dim3(1, 70000), 32>>>();  // <- grid_y
}
TEST(block_z) {  // finds: its z may be at most 64
  nothing<<<1, dim3(1, 1, 65)>>>();  // <- block_z
}
TEST(no_opt_in) {  // finds: 61440 bytes of dynamic shared memory | cudaFuncSetAttribute
  nothing<<<1, 32, 60 << 10>>>();  // <- no_opt_in
}

__global__ void too_much_static(float* y) {
  __shared__ float a[10000];
  __shared__ float b[10000];  // <- too_much_static
  a[threadIdx.x] = b[threadIdx.x] = 1;
  y[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}
TEST(too_much_static) {  // finds: bytes of static shared memory; nvcc refuses more than 49152
  Array<float> y(32);
  too_much_static<<<1, 32>>>(y);
}
