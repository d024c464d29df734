// Layer 2 of softmax's gradient: checks, allocates, and calls the launcher of the rung it was
// linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/softmax_backward/*.cu to the letter.
extern "C" {
cudaError_t softmax_backward_launch_f32(const float* grad, const float* out, float* dx,
                                        int64_t rows, int64_t cols, cudaStream_t stream);
cudaError_t softmax_backward_launch_f64(const double* grad, const double* out, double* dx,
                                        int64_t rows, int64_t cols, cudaStream_t stream);
cudaError_t softmax_backward_launch_f16(const __half* grad, const __half* out, __half* dx,
                                        int64_t rows, int64_t cols, cudaStream_t stream);
cudaError_t softmax_backward_launch_bf16(const __nv_bfloat16* grad, const __nv_bfloat16* out,
                                         __nv_bfloat16* dx, int64_t rows, int64_t cols,
                                         cudaStream_t stream);
}

namespace {

template <typename T, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& dx,
                 cudaStream_t stream) {
  const int64_t cols = out.size(-1);
  return launch(static_cast<const T*>(grad.const_data_ptr()),
                static_cast<const T*>(out.const_data_ptr()), static_cast<T*>(dx.mutable_data_ptr()),
                out.numel() / cols, cols, stream);
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

at::Tensor softmax_backward(const at::Tensor& grad, const at::Tensor& out) {
  TORCH_CHECK(grad.is_cuda(), "softmax_backward: grad must be on a CUDA device, got ",
              grad.device());
  TORCH_CHECK(out.device() == grad.device(),
              "softmax_backward: grad and out must be on one device, got ", grad.device(), " and ",
              out.device());
  TORCH_CHECK(out.scalar_type() == grad.scalar_type(),
              "softmax_backward: grad and out must have one dtype, got ", grad.scalar_type(),
              " and ", out.scalar_type());
  TORCH_CHECK(is_supported(grad.scalar_type()),
              "softmax_backward: dtype must be float32, float64, float16 or bfloat16, got ",
              grad.scalar_type());
  TORCH_CHECK(out.sizes() == grad.sizes(),
              "softmax_backward: grad and out must have one shape, got ", grad.sizes(), " and ",
              out.sizes());
  TORCH_CHECK(grad.dim() >= 1,
              "softmax_backward: grad must have at least one dimension, got shape ", grad.sizes());
  TORCH_CHECK(grad.is_contiguous(), "softmax_backward: grad must be contiguous, got shape ",
              grad.sizes(), " with strides ", grad.strides(), "; pass grad.contiguous()");
  TORCH_CHECK(!grad.is_neg() && !grad._is_zerotensor(),
              "softmax_backward: grad must hold its values, got a view that computes them; pass "
              "grad.clone()");
  TORCH_CHECK(out.is_contiguous(), "softmax_backward: out must be contiguous, got shape ",
              out.sizes(), " with strides ", out.strides(), "; pass out.contiguous()");
  TORCH_CHECK(!out.is_neg() && !out._is_zerotensor(),
              "softmax_backward: out must hold its values, got a view that computes them; pass "
              "out.clone()");

  const c10::cuda::CUDAGuard guard(grad.device());  // launch on the GPU that holds grad
  at::Tensor dx = at::empty_like(grad);
  if (dx.numel() == 0) return dx;  // a grid of 0 blocks is an error
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (grad.scalar_type()) {
    case at::kFloat: error = call<float>(softmax_backward_launch_f32, grad, out, dx, stream); break;
    case at::kDouble:
      error = call<double>(softmax_backward_launch_f64, grad, out, dx, stream);
      break;
    case at::kHalf: error = call<__half>(softmax_backward_launch_f16, grad, out, dx, stream); break;
    default:
      error = call<__nv_bfloat16>(softmax_backward_launch_bf16, grad, out, dx, stream);
      break;
  }
  TORCH_CHECK(error != cudaErrorInvalidValue && error != cudaErrorNotSupported,
              "softmax_backward: ", grad.scalar_type(), " of shape ", grad.sizes(),
              " is not supported by this rung (", cudaGetErrorString(error),
              "); the head of its .cu file says what is legal, and the last rung takes everything");
  TORCH_CHECK(error == cudaSuccess,
              "softmax_backward: the launch failed: ", cudaGetErrorString(error));
  return dx;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "softmax_backward", &softmax_backward, pybind11::arg("grad"), pybind11::arg("out"),
      "out * (grad - sum(grad * out)) along the last dimension: the gradient of softmax, from the "
      "gradient and the value of its result. Contiguous CUDA tensors of one shape and dtype "
      "(float32, float64, float16, bfloat16); anything else is refused.");
}
