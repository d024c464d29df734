// The WMMA API, nvcuda::wmma, in software. A fragment's elements are spread over the lanes in a
// simple order of our own, as the API allows; a kernel that relies on the hardware's order is wrong
// on the next hardware too. Products are summed in float (or int), in order of k.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "simt/machine.h"
#include "simt/warp.h"

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision

namespace details {

// What an element is kept as, and what it is computed in.
template <class T>
struct Storage {
  using Type = T;
};
template <>
struct Storage<precision::tf32> {
  using Type = float;
};

template <class T>
SIMT_UNWATCHED inline auto widen(const T& v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(v);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(v);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<int>(v);
  } else {
    return v;
  }
}

template <class Use, int M, int N, int K>
struct Shape;
template <int M, int N, int K>
struct Shape<matrix_a, M, N, K> {
  static constexpr int rows = M, columns = K;
};
template <int M, int N, int K>
struct Shape<matrix_b, M, N, K> {
  static constexpr int rows = K, columns = N;
};
template <int M, int N, int K>
struct Shape<accumulator, M, N, K> {
  static constexpr int rows = M, columns = N;
};

template <int M, int N, int K, class T>
constexpr bool kExists =
    (K == 16 && ((M == 16 && N == 16) || (M == 32 && N == 8) || (M == 8 && N == 32)) &&
     (std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16> ||
      std::is_same_v<T, signed char> || std::is_same_v<T, unsigned char>)) ||
    (K == 8 && M == 16 && N == 16 && std::is_same_v<T, precision::tf32>) ||
    (K == 4 && M == 8 && N == 8 && std::is_same_v<T, double>);

}  // namespace details

template <class Use, int M, int N, int K, class T, class Layout = void>
class fragment {
 public:
  using Shape = details::Shape<Use, M, N, K>;
  using element_type = T;
  using storage_element_type = typename details::Storage<T>::Type;
  static_assert(std::is_same_v<Use, accumulator> || details::kExists<M, N, K, T>,
                "WMMA has no fragment of this shape and type");

  static constexpr int num_elements = Shape::rows * Shape::columns / 32;
  static constexpr int num_storage_elements = num_elements;
  storage_element_type x[num_elements];

  // Element i of a lane is this element of the matrix, counted row by row. Neighbouring lanes hold
  // neighbours in memory, so that the counters see the few sectors that a GPU moves.
  static SIMT_UNWATCHED int position(int lane, int i) {
    const int at = i * 32 + lane;
    if (!std::is_same_v<Layout, col_major>) return at;
    return at % Shape::rows * Shape::columns + at / Shape::rows;
  }
};

template <class Use, int M, int N, int K, class T, class Layout, class V>
SIMT_INLINE void fill_fragment(fragment<Use, M, N, K, T, Layout>& f, const V& value) {
  for (int i = 0; i < f.num_elements; i++) f.x[i] = value;
}

namespace details {

// All lanes of the warp must be here. (A function of its own, so that lanes in a matrix operation
// do not meet lanes in a __syncwarp.)
SIMT_UNWATCHED inline void move_matrix(simt::Thread*, unsigned) {}
SIMT_UNWATCHED inline void together(const char* what, const simt::Place& here) {
  simt::warp_wait(what, &move_matrix, ~0u, here);
}

template <class Fragment>
SIMT_INLINE size_t offset(int i, unsigned stride, bool row_major) {
  const int at = Fragment::position(simt::lane(), i);
  const size_t row = static_cast<size_t>(at / Fragment::Shape::columns);
  const size_t column = static_cast<size_t>(at % Fragment::Shape::columns);
  return row_major ? row * stride + column : column * stride + row;
}

template <class Fragment, class P>
SIMT_INLINE void load(Fragment& f, const P* p, unsigned stride, bool row_major,
                      const simt::Place& here) {
  together("load_matrix_sync()", here);
  for (int i = 0; i < Fragment::num_elements; i++)
    f.x[i] = p[offset<Fragment>(i, stride, row_major)];
}

}  // namespace details

template <class Use, int M, int N, int K, class T, class Layout, class P>
SIMT_INLINE void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const P* p, unsigned stride,
                                  SIMT_HERE) {
  details::load(f, p, stride, std::is_same_v<Layout, row_major>, here);
}

template <int M, int N, int K, class T, class P>
SIMT_INLINE void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const P* p, unsigned stride,
                                  layout_t layout, SIMT_HERE) {
  details::load(f, p, stride, layout == mem_row_major, here);
}

template <int M, int N, int K, class T, class P>
SIMT_INLINE void store_matrix_sync(P* p, const fragment<accumulator, M, N, K, T>& f,
                                   unsigned stride, layout_t layout, SIMT_HERE) {
  using Fragment = fragment<accumulator, M, N, K, T>;
  details::together("store_matrix_sync()", here);
  for (int i = 0; i < Fragment::num_elements; i++) {
    p[details::offset<Fragment>(i, stride, layout == mem_row_major)] = f.x[i];
  }
}

namespace details {

template <class D, class A, class B, class C>
struct Operands {
  D* d;
  const A* a;
  const B* b;
  const C* c;
};

// The last lane to arrive computes the product for all: it collects the fragments of all lanes
// into matrices, multiplies them, and spreads the result.
template <class D, class A, class B, class C>
SIMT_UNWATCHED void multiply(simt::Thread* lanes, unsigned) {
  using Number = decltype(widen(std::declval<C>().x[0]));
  constexpr int M = D::Shape::rows, N = D::Shape::columns, K = A::Shape::columns;
  decltype(widen(std::declval<A>().x[0])) a[M * K];
  decltype(widen(std::declval<B>().x[0])) b[K * N];
  Number sum[M * N];
  Operands<D, A, B, C> of_lane[32];
  for (int lane = 0; lane < 32; lane++) {
    of_lane[lane] = simt::input_of<Operands<D, A, B, C>>(lanes[lane]);
    const auto& o = of_lane[lane];
    for (int i = 0; i < A::num_elements; i++) a[A::position(lane, i)] = widen(o.a->x[i]);
    for (int i = 0; i < B::num_elements; i++) b[B::position(lane, i)] = widen(o.b->x[i]);
    for (int i = 0; i < C::num_elements; i++) sum[C::position(lane, i)] = widen(o.c->x[i]);
  }
  for (int m = 0; m < M; m++) {
    for (int k = 0; k < K; k++) {
      for (int n = 0; n < N; n++) sum[m * N + n] += a[m * K + k] * b[k * N + n];
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < D::num_elements; i++) {
      of_lane[lane].d->x[i] =
          static_cast<typename D::storage_element_type>(sum[D::position(lane, i)]);
    }
  }
}

}  // namespace details

template <int M, int N, int K, class TD, class TA, class LA, class TB, class LB, class TC>
SIMT_UNWATCHED void mma_sync(fragment<accumulator, M, N, K, TD>& d,
                             const fragment<matrix_a, M, N, K, TA, LA>& a,
                             const fragment<matrix_b, M, N, K, TB, LB>& b,
                             const fragment<accumulator, M, N, K, TC>& c, bool = false, SIMT_HERE) {
  using D = std::remove_reference_t<decltype(d)>;
  using A = fragment<matrix_a, M, N, K, TA, LA>;
  using B = fragment<matrix_b, M, N, K, TB, LB>;
  using C = fragment<accumulator, M, N, K, TC>;
  const details::Operands<D, A, B, C> operands{&d, &a, &b, &c};
  simt::warp_operation<char>("mma_sync()", &details::multiply<D, A, B, C>, ~0u, operands, 0, here);
}

// A float as TF32 keeps it: 10 bits behind the point, rounded to nearest, ties away from zero.
SIMT_UNWATCHED inline float __float_to_tf32(float v) {
  unsigned bits;
  memcpy(&bits, &v, sizeof bits);
  if ((bits & 0x7f800000) != 0x7f800000) bits += 0x1000;
  bits &= ~0x1fffu;
  memcpy(&v, &bits, sizeof bits);
  return v;
}

}  // namespace nvcuda::wmma
