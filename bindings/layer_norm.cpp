// Layer 2 of layer_norm: checks, allocates, and calls the launcher of the rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/layer_norm/*.cu to the letter. `residual` and `sum` are
// both null or both not; mean and rstd are float, and double for double.
extern "C" {
cudaError_t layer_norm_launch_f32(const float* x, const float* residual, const float* weight,
                                  const float* bias, float* sum, float* out, float* mean,
                                  float* rstd, int64_t rows, int64_t cols, double eps,
                                  cudaStream_t stream);
cudaError_t layer_norm_launch_f64(const double* x, const double* residual, const double* weight,
                                  const double* bias, double* sum, double* out, double* mean,
                                  double* rstd, int64_t rows, int64_t cols, double eps,
                                  cudaStream_t stream);
cudaError_t layer_norm_launch_f16(const __half* x, const __half* residual, const __half* weight,
                                  const __half* bias, __half* sum, __half* out, float* mean,
                                  float* rstd, int64_t rows, int64_t cols, double eps,
                                  cudaStream_t stream);
cudaError_t layer_norm_launch_bf16(const __nv_bfloat16* x, const __nv_bfloat16* residual,
                                   const __nv_bfloat16* weight, const __nv_bfloat16* bias,
                                   __nv_bfloat16* sum, __nv_bfloat16* out, float* mean, float* rstd,
                                   int64_t rows, int64_t cols, double eps, cudaStream_t stream);
}

namespace {

struct Buffers {
  at::Tensor x, residual, weight, bias, sum, out, mean, rstd;  // residual may be undefined
};

template <typename T, typename W, typename Launch>
cudaError_t call(Launch launch, const Buffers& all, double eps, cudaStream_t stream) {
  const bool adds = all.residual.defined();
  return launch(
      static_cast<const T*>(all.x.const_data_ptr()),
      adds ? static_cast<const T*>(all.residual.const_data_ptr()) : nullptr,
      static_cast<const T*>(all.weight.const_data_ptr()),
      static_cast<const T*>(all.bias.const_data_ptr()),
      adds ? static_cast<T*>(all.sum.mutable_data_ptr()) : nullptr,
      static_cast<T*>(all.out.mutable_data_ptr()), static_cast<W*>(all.mean.mutable_data_ptr()),
      static_cast<W*>(all.rstd.mutable_data_ptr()), all.mean.numel(), all.x.size(-1), eps, stream);
}

void check(const char* name, const at::Tensor& t, const at::Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK(t.device() == x.device(), "layer_norm: x and ", name, " must be on one device, got ",
              x.device(), " and ", t.device());
  TORCH_CHECK(t.scalar_type() == x.scalar_type(), "layer_norm: x and ", name,
              " must have one dtype, got ", x.scalar_type(), " and ", t.scalar_type());
  TORCH_CHECK(t.sizes() == shape, "layer_norm: ", name, " must have shape ", shape, ", got ",
              t.sizes());
  TORCH_CHECK(t.is_contiguous(), "layer_norm: ", name, " must be contiguous, got shape ", t.sizes(),
              " with strides ", t.strides(), "; pass ", name, ".contiguous()");
  TORCH_CHECK(!t.is_neg() && !t._is_zerotensor(), "layer_norm: ", name,
              " must hold its values, got a view that computes them; pass ", name, ".clone()");
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// Returns (out, sum, mean, rstd). Without a residual, sum is x itself.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm(
    const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
    const std::optional<at::Tensor>& residual, double eps) {
  TORCH_CHECK(x.is_cuda(), "layer_norm: x must be on a CUDA device, got ", x.device());
  TORCH_CHECK(is_supported(x.scalar_type()),
              "layer_norm: dtype must be float32, float64, float16 or bfloat16, got ",
              x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, "layer_norm: x must have at least one dimension, got shape ",
              x.sizes());
  check("x", x, x, x.sizes());
  check("weight", weight, x, x.sizes().slice(x.dim() - 1));
  check("bias", bias, x, x.sizes().slice(x.dim() - 1));
  if (residual) check("residual", *residual, x, x.sizes());

  const c10::cuda::CUDAGuard guard(x.device());  // launch on the GPU that holds x
  const bool is_double = x.scalar_type() == at::kDouble;
  const at::Tensor out = at::empty_like(x), sum = residual ? at::empty_like(x) : x;
  const auto options = x.options().dtype(is_double ? at::kDouble : at::kFloat);
  const int64_t cols = x.size(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const at::Tensor mean = at::empty({rows}, options), rstd = at::empty({rows}, options);
  if (rows == 0) return {out, sum, mean, rstd};  // a grid of 0 blocks is an error
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  const Buffers all = {x, residual.value_or(at::Tensor()), weight, bias, sum, out, mean, rstd};
  cudaError_t error = cudaSuccess;
  switch (x.scalar_type()) {
    case at::kFloat: error = call<float, float>(layer_norm_launch_f32, all, eps, stream); break;
    case at::kDouble: error = call<double, double>(layer_norm_launch_f64, all, eps, stream); break;
    case at::kHalf: error = call<__half, float>(layer_norm_launch_f16, all, eps, stream); break;
    default: error = call<__nv_bfloat16, float>(layer_norm_launch_bf16, all, eps, stream); break;
  }
  TORCH_CHECK(error != cudaErrorInvalidValue && error != cudaErrorNotSupported,
              "layer_norm: ", x.scalar_type(), " of shape ", x.sizes(),
              " is not supported by this rung (", cudaGetErrorString(error),
              "); the head of its .cu file says what is legal, and the last rung takes everything");
  TORCH_CHECK(error == cudaSuccess, "layer_norm: the launch failed: ", cudaGetErrorString(error));
  return {out, sum, mean, rstd};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("layer_norm", &layer_norm, pybind11::arg("x"), pybind11::arg("weight"),
        pybind11::arg("bias"), pybind11::arg("residual"), pybind11::arg("eps"),
        "h = x + residual, or x where residual is None; (h - mean) / sqrt(var + eps) * weight + "
        "bias along the last dimension. Returns (out, h, mean, rstd). Contiguous CUDA tensors of "
        "one dtype (float32, float64, float16, bfloat16); anything else is refused.");
}
