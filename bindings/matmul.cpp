// Layer 2 of matmul: two float32 matrices in, their product out. Strides travel with the pointers,
// so a transposed matrix costs no copy; a rung that wants its operands row-major says so.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

// Must match the definition in kernels/matmul/*.cu to the letter.
extern "C" cudaError_t matmul_launch(const float* a, const float* b, float* c, int64_t m, int64_t n,
                                     int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                     int64_t b_col, cudaStream_t stream);

namespace {

// The stride of a dimension of length 1 may be anything: give the one a row-major matrix has.
int64_t row_stride(const at::Tensor& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }
int64_t col_stride(const at::Tensor& x) { return x.size(1) > 1 ? x.stride(1) : 1; }

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.is_cuda(), "matmul: a must be on a CUDA device, got ", a.device());
  TORCH_CHECK(b.device() == a.device(), "matmul: a and b must be on one device, got ", a.device(),
              " and ", b.device());
  TORCH_CHECK(a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat,
              "matmul: a and b must be float32, got ", a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "matmul: a and b must have 2 dimensions, got shapes ",
              a.sizes(), " and ", b.sizes());
  TORCH_CHECK(a.size(1) == b.size(0), "matmul: a must have as many columns as b has rows, got ",
              a.sizes(), " and ", b.sizes());
  TORCH_CHECK(!a.is_neg() && !a._is_zerotensor(),
              "matmul: a must hold its values, got a view that computes them; pass a.clone()");
  TORCH_CHECK(!b.is_neg() && !b._is_zerotensor(),
              "matmul: b must hold its values, got a view that computes them; pass b.clone()");

  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  at::Tensor c = at::empty({m, n}, a.options());
  if (c.numel() == 0) return c;  // with k = 0 there are zeros to write, so that goes on
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  const cudaError_t error = matmul_launch(
      static_cast<const float*>(a.const_data_ptr()), static_cast<const float*>(b.const_data_ptr()),
      static_cast<float*>(c.mutable_data_ptr()), m, n, k, row_stride(a), col_stride(a),
      row_stride(b), col_stride(b), stream);
  TORCH_CHECK(error != cudaErrorNotSupported,
              "matmul: not supported by this rung, which wants row-major a and b, columns that are "
              "multiples of 4 and rows that start at multiples of 16 bytes; got shapes ",
              a.sizes(), " and ", b.sizes(), " with strides ", a.strides(), " and ", b.strides());
  TORCH_CHECK(error == cudaSuccess, "matmul: the launch failed: ", cudaGetErrorString(error));
  return c;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("matmul", &matmul, pybind11::arg("a"), pybind11::arg("b"),
        "a @ b for float32 CUDA matrices of any strides, in full float32 precision. The result is "
        "row-major. Some rungs refuse what is not row-major and aligned to 16 bytes.");
}
