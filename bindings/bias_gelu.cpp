// Layer 2 of bias_gelu: gelu(x + bias) and its gradients. Checks, allocates, calls the launchers of
// whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/bias_gelu/*.cu to the letter.
#define DECLARE(SUFFIX, T, A)                                                                \
  cudaError_t bias_gelu_launch_##SUFFIX(const T* x, const T* bias, T* out, int64_t rows,     \
                                        int64_t cols, bool tanh_form, cudaStream_t stream);  \
  cudaError_t bias_gelu_backward_launch_##SUFFIX(                                            \
      const T* grad, const T* x, const T* bias, T* dx, T* dbias, A* workspace, int64_t rows, \
      int64_t cols, bool tanh_form, cudaStream_t stream);
extern "C" {
int64_t bias_gelu_backward_parts(int64_t rows, int64_t cols);
DECLARE(f32, float, float)
DECLARE(f64, double, double)
DECLARE(f16, __half, float)
DECLARE(bf16, __nv_bfloat16, float)
}

namespace {

template <typename T>
const T* in(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* out(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

void check(const at::Tensor& x, const at::Tensor& bias) {
  TORCH_CHECK(x.is_cuda(), "bias_gelu: x must be on a CUDA device, got ", x.device());
  TORCH_CHECK(bias.device() == x.device(), "bias_gelu: x and bias must be on one device, got ",
              x.device(), " and ", bias.device());
  const auto dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "bias_gelu: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(bias.scalar_type() == dtype, "bias_gelu: x and bias must have one dtype, got ", dtype,
              " and ", bias.scalar_type());
  TORCH_CHECK(x.dim() >= 1 && bias.dim() == 1 && bias.size(0) == x.size(-1),
              "bias_gelu: bias must have one element for each of x's last dimension, got x ",
              x.sizes(), " and bias ", bias.sizes());
  TORCH_CHECK(x.is_contiguous(), "bias_gelu: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");
  TORCH_CHECK(!x.is_neg() && !x._is_zerotensor(),
              "bias_gelu: x must hold its values, got a view that computes them; pass x.clone()");
  TORCH_CHECK(bias.is_contiguous(), "bias_gelu: bias must be contiguous, got strides ",
              bias.strides(), "; pass bias.contiguous()");
  TORCH_CHECK(
      !bias.is_neg() && !bias._is_zerotensor(),
      "bias_gelu: bias must hold its values, got a view that computes them; pass bias.clone()");
}

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  check(x, bias);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty_like(x);
  if (y.numel() == 0) return y;
  const int64_t cols = x.size(-1), rows = x.numel() / cols;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T) \
  error = bias_gelu_launch_##SUFFIX(in<T>(x), in<T>(bias), out<T>(y), rows, cols, tanh, stream)
  switch (x.scalar_type()) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error == cudaSuccess, "bias_gelu: the launch failed: ", cudaGetErrorString(error));
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& grad, const at::Tensor& x,
                                                      const at::Tensor& bias, bool tanh) {
  check(x, bias);
  TORCH_CHECK(grad.device() == x.device() && grad.scalar_type() == x.scalar_type() &&
                  grad.sizes() == x.sizes() && grad.is_contiguous(),
              "bias_gelu: grad must be contiguous and like x (", x.scalar_type(), " ", x.sizes(),
              " on ", x.device(), "), got ", grad.scalar_type(), " ", grad.sizes(), " strides ",
              grad.strides(), " on ", grad.device());
  TORCH_CHECK(
      !grad.is_neg() && !grad._is_zerotensor(),
      "bias_gelu: grad must hold its values, got a view that computes them; pass grad.clone()");
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor dx = at::empty_like(x), dbias = at::empty_like(bias);
  if (dx.numel() == 0) return {dx, dbias.zero_()};  // a sum of no rows is 0
  const int64_t cols = x.size(-1), rows = x.numel() / cols;
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor work =
      at::empty({bias_gelu_backward_parts(rows, cols), cols}, x.options().dtype(wide));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T, A)                                                               \
  error =                                                                                \
      bias_gelu_backward_launch_##SUFFIX(in<T>(grad), in<T>(x), in<T>(bias), out<T>(dx), \
                                         out<T>(dbias), out<A>(work), rows, cols, tanh, stream)
  switch (x.scalar_type()) {
    case at::kFloat: CALL(f32, float, float); break;
    case at::kDouble: CALL(f64, double, double); break;
    case at::kHalf: CALL(f16, __half, float); break;
    default: CALL(bf16, __nv_bfloat16, float); break;
  }
#undef CALL
  TORCH_CHECK(error == cudaSuccess, "bias_gelu: the launch failed: ", cudaGetErrorString(error));
  return {dx, dbias};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("bias_gelu", &bias_gelu, pybind11::arg("x"), pybind11::arg("bias"), pybind11::arg("tanh"),
        "gelu(x + bias), x (..., C) and bias (C): contiguous CUDA tensors of one dtype (float32, "
        "float64, float16, bfloat16). tanh: the tanh form. Anything else is refused.");
  m.def("bias_gelu_backward", &bias_gelu_backward, pybind11::arg("grad"), pybind11::arg("x"),
        pybind11::arg("bias"), pybind11::arg("tanh"),
        "The gradients of x and bias, given the gradient of the result.");
}
