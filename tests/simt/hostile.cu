// Formatting that a rewriter could stumble over: launches <<<1, 2>>>(x) in comments, in strings, in
// macros; UTF-8 (naïve, Größe, 数组); and every line must keep its number.
#include <cuda_runtime.h>

#include "harness.h"

/* k<<<1, 1>>>(x); __shared__ int in_a_comment[4]; asm("nop"); */
const char* kText = "not a launch: k<<<1, 2>>>(x) __shared__ \"quoted\" asm";
const char* kRaw = R"cu(k<<<grid, block>>>(x); // " unbalanced
  __shared__ float s[32]; asm volatile("mov.u32 %0, %laneid;"); )not the end" )cu";
const char kQuote = '"', kOther = '\'';
constexpr int kThousand = 1'000;

template <typename T, int N>
struct Box {
  T v[N];
};
template <typename T>
struct Nested {
  using Type = T;
};

template <typename T, int N = 4>
__global__ void fill(T* out, T value, int n = N) {
  if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = value;
}
template <typename B>
__global__ void fill_box(B* out) {
  out->v[threadIdx.x] = 3;
}
namespace inner {
namespace deeper {
__global__ void three(int* out) { *out = 3; }
}  // namespace deeper
}  // namespace inner
static __global__ void __launch_bounds__(64) four(int* out) { *out = 4; }
__global__
void
five(
    int* out)
{
  *out = 5;
}
__global__ void with_default(int* out, int value = 6) { *out = value; }
__global__ void overloaded(int* out) { *out = 7; }
__global__ void overloaded(float* out) { *out = 8; }

#define LAUNCH(kernel, grid, block, ...) kernel<<<grid, block>>>(__VA_ARGS__)
#define LAUNCH_OVER_LINES(kernel, out) \
  do {                                 \
    kernel                             \
        <<<1,                          \
           1>>>(out);                  \
  } while (0)

TEST(line_numbers) {
  Array<int> out(1);
  int line = __LINE__; inner::deeper::three
      <<<dim3(1, 1, 1),  // a comment, with <<< in it
         /* and another, with >>> */ dim3{1},
         2 * (8 >> 1) > 7 ? 0 : 0,
         nullptr
      >>>  // behind it
      (
          out  // the argument
      );
  EQUAL(__LINE__, line + 9);
  EQUAL(out[0], 3);
}

TEST(macros) {
  Array<int> out(1);
  LAUNCH(four, 1, 1, out.p);
  EQUAL(out[0], 4);
  LAUNCH((fill<int, 2>), 1, 4, out.p, 9);
  EQUAL(out[0], 9);
  LAUNCH_OVER_LINES(five, out.p);
  EQUAL(out[0], 5);
}

TEST(template_arguments) {
  Array<Box<int, 4>> box(1);
  fill_box<Box<int, 4>><<<1, 4>>>(box.p);
  EQUAL(box[0].v[3], 3);
  Array<float> f(4);
  fill<Nested<Nested<float>::Type>::Type><<<1, 4>>>(f.p, 2.f);
  EQUAL(f[3], 2.f);
  fill<Nested<Nested<Nested<float>>>::Type::Type::Type><<<1, 4>>>(f.p, 3.f);
  EQUAL(f[3], 3.f);
  fill<<<1, 4>>>(f.p, 5.f);  // deduced
  EQUAL(f[3], 5.f);
  fill<float, (3 > 2) ? 1 : 2><<<1, 4>>>(f.p, 6.f);
  EQUAL(f[0], 6.f);
  EQUAL(f[1], 5.f);
}

TEST(unusual_calls) {
  Array<int> out(1);
  with_default<<<1, 1>>>(out.p);
  EQUAL(out[0], 6);
  with_default<<<1, 1>>>(out.p, 16);
  EQUAL(out[0], 16);
  Array<float> f(1);
  overloaded<<<1, 1>>>(out.p);
  overloaded<<<1, 1>>>(f.p);
  EQUAL(out[0] + f[0], 15.f);
  void (*pointer)(int*) = four;
  pointer<<<1, 1>>>(out.p);
  EQUAL(out[0], 4);
  void (*table[])(int*) = {four, five};
  table[1]<<<1, 1>>>(out.p);
  EQUAL(out[0], 5);
  (*pointer)<<<1, 1>>>(out.p);
  EQUAL(out[0], 4);
  ::inner::deeper::three<<<1, 1>>>(out);
  EQUAL(out[0], 3);
  if (out[0] == 3) four<<<1, 1>>>(out); else five<<<1, 1>>>(out);
  EQUAL(out[0], 4);
  for (int i = 0; i < 2; i++) five<<<1, 1>>>(out);
  dim3 gridDim(1), blockDim(1);  // the host may use these names
  [&] { four<<<gridDim, blockDim>>>(out.p); }();
  EQUAL(out[0], 4);
}

__global__ void declarations(int* out) {
  __shared__ int a, b[2],
      c[2][3];  __shared__ Box<float, 4> box; /* x */ static __shared__ double d;
  __shared__ struct { int x; int y[2]; } pair;
  volatile __shared__ int v;
  if (threadIdx.x == 0) { a = 1; b[1] = 2; c[1][2] = 3; box.v[3] = 4; d = 5; pair.y[1] = 6; v = 7; }
  __syncthreads();
  *out = a + b[1] + c[1][2] + static_cast<int>(box.v[3] + d) + pair.y[1] + v;
}
TEST(shared_declarations) {
  Array<int> out(1);
  declarations<<<1, 1>>>(out);
  EQUAL(out[0], 28);
}

#ifdef __CUDACC__
#error "this must not be seen"
asm("nonsense");
#endif
#ifndef __SIMT_CPU__
__device__ void only_on_the_gpu() { asm volatile("bar.sync 0;"); }
#endif

TEST(strings) {
  EQUAL(strncmp(kText, "not a launch: k<<<1, 2>>>(x)", 28), 0);
  EQUAL(strstr(kRaw, "__shared__ float s[32]; asm volatile") != nullptr, true);
  EQUAL(kQuote + kOther, '"' + '\'');
  EQUAL(kThousand, 1000);
  EQUAL(__LINE__, 153);  // the last line but one
}
