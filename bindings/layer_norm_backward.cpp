// Layer 2 of layer_norm's gradients: checks, allocates, and calls the launcher of the rung it was
// linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/layer_norm_backward/*.cu to the letter. `grad_sum` may be
// null; mean, rstd and partial are float, and double for double.
extern "C" {
int64_t layer_norm_backward_workspace(int64_t rows, int64_t cols);  // how many values in partial
cudaError_t layer_norm_backward_launch_f32(const float* grad, const float* grad_sum, const float* x,
                                           const float* weight, const float* mean,
                                           const float* rstd, float* dx, float* dweight,
                                           float* dbias, float* partial, int64_t rows, int64_t cols,
                                           cudaStream_t stream);
cudaError_t layer_norm_backward_launch_f64(const double* grad, const double* grad_sum,
                                           const double* x, const double* weight,
                                           const double* mean, const double* rstd, double* dx,
                                           double* dweight, double* dbias, double* partial,
                                           int64_t rows, int64_t cols, cudaStream_t stream);
cudaError_t layer_norm_backward_launch_f16(const __half* grad, const __half* grad_sum,
                                           const __half* x, const __half* weight, const float* mean,
                                           const float* rstd, __half* dx, __half* dweight,
                                           __half* dbias, float* partial, int64_t rows,
                                           int64_t cols, cudaStream_t stream);
cudaError_t layer_norm_backward_launch_bf16(const __nv_bfloat16* grad,
                                            const __nv_bfloat16* grad_sum, const __nv_bfloat16* x,
                                            const __nv_bfloat16* weight, const float* mean,
                                            const float* rstd, __nv_bfloat16* dx,
                                            __nv_bfloat16* dweight, __nv_bfloat16* dbias,
                                            float* partial, int64_t rows, int64_t cols,
                                            cudaStream_t stream);
}

namespace {

struct Buffers {
  at::Tensor grad, grad_sum, x, weight, mean, rstd, dx, dweight, dbias, partial;
};

template <typename T, typename W, typename Launch>
cudaError_t call(Launch launch, const Buffers& all, cudaStream_t stream) {
  return launch(
      static_cast<const T*>(all.grad.const_data_ptr()),
      all.grad_sum.defined() ? static_cast<const T*>(all.grad_sum.const_data_ptr()) : nullptr,
      static_cast<const T*>(all.x.const_data_ptr()),
      static_cast<const T*>(all.weight.const_data_ptr()),
      static_cast<const W*>(all.mean.const_data_ptr()),
      static_cast<const W*>(all.rstd.const_data_ptr()), static_cast<T*>(all.dx.mutable_data_ptr()),
      static_cast<T*>(all.dweight.mutable_data_ptr()),
      static_cast<T*>(all.dbias.mutable_data_ptr()),
      static_cast<W*>(all.partial.mutable_data_ptr()), all.mean.numel(), all.x.size(-1), stream);
}

void check(const char* name, const at::Tensor& t, const at::Tensor& x, at::ScalarType dtype,
           at::IntArrayRef shape) {
  TORCH_CHECK(t.device() == x.device(), "layer_norm_backward: x and ", name,
              " must be on one device, got ", x.device(), " and ", t.device());
  TORCH_CHECK(t.scalar_type() == dtype, "layer_norm_backward: with x of ", x.scalar_type(), ", ",
              name, " must be ", dtype, ", got ", t.scalar_type());
  TORCH_CHECK(t.sizes() == shape, "layer_norm_backward: ", name, " must have shape ", shape,
              ", got ", t.sizes());
  TORCH_CHECK(t.is_contiguous(), "layer_norm_backward: ", name, " must be contiguous, got shape ",
              t.sizes(), " with strides ", t.strides(), "; pass ", name, ".contiguous()");
  TORCH_CHECK(!t.is_neg() && !t._is_zerotensor(), "layer_norm_backward: ", name,
              " must hold its values, got a view that computes them; pass ", name, ".clone()");
}

// Returns (dx, dweight, dbias).
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& mean,
    const at::Tensor& rstd, const std::optional<at::Tensor>& grad_sum) {
  TORCH_CHECK(x.is_cuda(), "layer_norm_backward: x must be on a CUDA device, got ", x.device());
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "layer_norm_backward: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(x.dim() >= 1, "layer_norm_backward: x must have at least one dimension, got shape ",
              x.sizes());
  const int64_t cols = x.size(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  check("x", x, x, dtype, x.sizes());
  check("grad", grad, x, dtype, x.sizes());
  check("weight", weight, x, dtype, {cols});
  check("mean", mean, x, wide, {rows});
  check("rstd", rstd, x, wide, {rows});
  if (grad_sum) check("grad_sum", *grad_sum, x, dtype, x.sizes());

  const c10::cuda::CUDAGuard guard(x.device());  // launch on the GPU that holds x
  if (rows == 0) return {at::empty_like(x), at::zeros_like(weight), at::zeros_like(weight)};
  const Buffers all = {
      grad,
      grad_sum.value_or(at::Tensor()),
      x,
      weight,
      mean,
      rstd,
      at::empty_like(x),
      at::empty_like(weight),
      at::empty_like(weight),
      at::empty({layer_norm_backward_workspace(rows, cols)}, x.options().dtype(wide))};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (dtype) {
    case at::kFloat: error = call<float, float>(layer_norm_backward_launch_f32, all, stream); break;
    case at::kDouble:
      error = call<double, double>(layer_norm_backward_launch_f64, all, stream);
      break;
    case at::kHalf: error = call<__half, float>(layer_norm_backward_launch_f16, all, stream); break;
    default:
      error = call<__nv_bfloat16, float>(layer_norm_backward_launch_bf16, all, stream);
      break;
  }
  TORCH_CHECK(error != cudaErrorInvalidValue && error != cudaErrorNotSupported,
              "layer_norm_backward: ", dtype, " of shape ", x.sizes(),
              " is not supported by this rung (", cudaGetErrorString(error),
              "); the head of its .cu file says what is legal, and without a kernel one is chosen");
  TORCH_CHECK(error == cudaSuccess,
              "layer_norm_backward: the launch failed: ", cudaGetErrorString(error));
  return {all.dx, all.dweight, all.dbias};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("layer_norm_backward", &layer_norm_backward, pybind11::arg("grad"), pybind11::arg("x"),
        pybind11::arg("weight"), pybind11::arg("mean"), pybind11::arg("rstd"),
        pybind11::arg("grad_sum"),
        "The gradients (dx, dweight, dbias) of (x - mean) * rstd * weight + bias along the last "
        "dimension; grad_sum, if it is not None, is added to dx. Contiguous CUDA tensors of one "
        "dtype (float32, float64, float16, bfloat16); mean and rstd, one a row, are float32, or "
        "float64 with float64. Anything else is refused.");
}
