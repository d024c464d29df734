// Layer 2 of rms_norm: checks, allocates, and calls the launcher of the rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/rms_norm/*.cu to the letter. rstd is float, and double for
// double.
extern "C" {
cudaError_t rms_norm_launch_f32(const float* x, const float* weight, float* out, float* rstd,
                                int64_t rows, int64_t cols, double eps, cudaStream_t stream);
cudaError_t rms_norm_launch_f64(const double* x, const double* weight, double* out, double* rstd,
                                int64_t rows, int64_t cols, double eps, cudaStream_t stream);
cudaError_t rms_norm_launch_f16(const __half* x, const __half* weight, __half* out, float* rstd,
                                int64_t rows, int64_t cols, double eps, cudaStream_t stream);
cudaError_t rms_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* weight,
                                 __nv_bfloat16* out, float* rstd, int64_t rows, int64_t cols,
                                 double eps, cudaStream_t stream);
}

namespace {

template <typename T, typename W, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& x, const at::Tensor& weight,
                 const at::Tensor& out, const at::Tensor& rstd, double eps, cudaStream_t stream) {
  return launch(static_cast<const T*>(x.const_data_ptr()),
                static_cast<const T*>(weight.const_data_ptr()),
                static_cast<T*>(out.mutable_data_ptr()), static_cast<W*>(rstd.mutable_data_ptr()),
                rstd.numel(), x.size(-1), eps, stream);
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// Returns (out, rstd).
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, const at::Tensor& weight,
                                            double eps) {
  TORCH_CHECK(x.is_cuda(), "rms_norm: x must be on a CUDA device, got ", x.device());
  TORCH_CHECK(weight.device() == x.device(), "rms_norm: x and weight must be on one device, got ",
              x.device(), " and ", weight.device());
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(),
              "rms_norm: x and weight must have one dtype, got ", x.scalar_type(), " and ",
              weight.scalar_type());
  TORCH_CHECK(is_supported(x.scalar_type()),
              "rms_norm: dtype must be float32, float64, float16 or bfloat16, got ",
              x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, "rms_norm: x must have at least one dimension, got shape ", x.sizes());
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(-1),
              "rms_norm: weight must have shape [", x.size(-1), "], got ", weight.sizes());
  TORCH_CHECK(x.is_contiguous(), "rms_norm: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");
  TORCH_CHECK(!x.is_neg() && !x._is_zerotensor(),
              "rms_norm: x must hold its values, got a view that computes them; pass x.clone()");
  TORCH_CHECK(weight.is_contiguous(), "rms_norm: weight must be contiguous, got strides ",
              weight.strides(), "; pass weight.contiguous()");
  TORCH_CHECK(
      !weight.is_neg() && !weight._is_zerotensor(),
      "rms_norm: weight must hold its values, got a view that computes them; pass weight.clone()");

  const c10::cuda::CUDAGuard guard(x.device());  // launch on the GPU that holds x
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t rows = x.numel() == 0 ? 0 : x.numel() / x.size(-1);
  const at::Tensor out = at::empty_like(x), rstd = at::empty({rows}, x.options().dtype(wide));
  if (rows == 0) return {out, rstd};  // a grid of 0 blocks is an error
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (x.scalar_type()) {
    case at::kFloat:
      error = call<float, float>(rms_norm_launch_f32, x, weight, out, rstd, eps, stream);
      break;
    case at::kDouble:
      error = call<double, double>(rms_norm_launch_f64, x, weight, out, rstd, eps, stream);
      break;
    case at::kHalf:
      error = call<__half, float>(rms_norm_launch_f16, x, weight, out, rstd, eps, stream);
      break;
    default:
      error = call<__nv_bfloat16, float>(rms_norm_launch_bf16, x, weight, out, rstd, eps, stream);
      break;
  }
  TORCH_CHECK(error != cudaErrorInvalidValue && error != cudaErrorNotSupported,
              "rms_norm: ", x.scalar_type(), " of shape ", x.sizes(),
              " is not supported by this rung (", cudaGetErrorString(error),
              "); the head of its .cu file says what is legal, and the last rung takes everything");
  TORCH_CHECK(error == cudaSuccess, "rms_norm: the launch failed: ", cudaGetErrorString(error));
  return {out, rstd};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("rms_norm", &rms_norm, pybind11::arg("x"), pybind11::arg("weight"), pybind11::arg("eps"),
        "x / sqrt(mean(x^2) + eps) * weight along the last dimension. Returns (out, rstd). "
        "Contiguous CUDA tensors of one dtype (float32, float64, float16, bfloat16); anything else "
        "is refused.");
}
