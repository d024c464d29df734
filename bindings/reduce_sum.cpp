// Layer 2 of reduce_sum: the sum of a tensor, or of one dimension of it. Checks, allocates, and
// calls the launcher of whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/reduce_sum/*.cu to the letter.
extern "C" {
int64_t reduce_sum_workspace(int64_t outer, int64_t n, int64_t inner);
cudaError_t reduce_sum_launch_f32(const float* x, float* out, void* workspace, int64_t outer,
                                  int64_t n, int64_t inner, cudaStream_t stream);
cudaError_t reduce_sum_launch_f64(const double* x, double* out, void* workspace, int64_t outer,
                                  int64_t n, int64_t inner, cudaStream_t stream);
cudaError_t reduce_sum_launch_f16(const __half* x, __half* out, void* workspace, int64_t outer,
                                  int64_t n, int64_t inner, cudaStream_t stream);
cudaError_t reduce_sum_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, void* workspace,
                                   int64_t outer, int64_t n, int64_t inner, cudaStream_t stream);
}

namespace {

at::Tensor reduce_sum(const at::Tensor& x, std::optional<int64_t> dim) {
  TORCH_CHECK(x.is_cuda(), "reduce_sum: x must be on a CUDA device, got ", x.device());
  const auto dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "reduce_sum: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(!dim || (*dim >= -x.dim() && *dim < x.dim()),
              "reduce_sum: dim must be a dimension of ", "x, which has ", x.dim(), ", got ",
              dim.value_or(0));
  TORCH_CHECK(x.is_contiguous(), "reduce_sum: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");
  TORCH_CHECK(!x.is_neg() && !x._is_zerotensor(),
              "reduce_sum: x must hold its values, got a view that computes them; pass x.clone()");

  // x as (outer, n, inner), and n is summed over.
  int64_t outer = 1, n = x.numel(), inner = 1;
  auto shape = x.sizes().vec();
  if (dim) {
    const int64_t d = *dim < 0 ? *dim + x.dim() : *dim;
    n = shape[d];
    for (int64_t i = 0; i < x.dim(); ++i) (i < d ? outer : inner) *= i == d ? 1 : shape[i];
    shape.erase(shape.begin() + d);
  } else {
    shape.clear();
  }
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  if (n == 0) return out.zero_();  // a sum of nothing is 0
  const at::Tensor work =
      at::empty({reduce_sum_workspace(outer, n, inner)}, x.options().dtype(at::kByte));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T)                                                         \
  error = reduce_sum_launch_##SUFFIX(static_cast<const T*>(x.const_data_ptr()), \
                                     static_cast<T*>(out.mutable_data_ptr()),   \
                                     work.mutable_data_ptr(), outer, n, inner, stream)
  switch (dtype) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error != cudaErrorNotSupported, "reduce_sum: shape ", x.sizes(), " with dim ",
              dim.value_or(0),
              " is not supported by this rung; it sums whole tensors: pass dim=None");
  TORCH_CHECK(error == cudaSuccess, "reduce_sum: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("reduce_sum", &reduce_sum, pybind11::arg("x"), pybind11::arg("dim") = pybind11::none(),
        "The sum of all elements, or along one dimension, which is dropped. A contiguous CUDA "
        "tensor (float32, float64, float16, bfloat16); anything else is refused.");
}
