// Layer 2 of softmax: checks, allocates, and calls the launcher of the rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/softmax/*.cu to the letter.
extern "C" {
cudaError_t softmax_launch_f32(const float* x, float* out, int64_t rows, int64_t cols,
                               cudaStream_t stream);
cudaError_t softmax_launch_f64(const double* x, double* out, int64_t rows, int64_t cols,
                               cudaStream_t stream);
cudaError_t softmax_launch_f16(const __half* x, __half* out, int64_t rows, int64_t cols,
                               cudaStream_t stream);
cudaError_t softmax_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, int64_t rows,
                                int64_t cols, cudaStream_t stream);
}

namespace {

template <typename T, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& x, const at::Tensor& out, cudaStream_t stream) {
  const int64_t cols = x.size(-1);
  return launch(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
                x.numel() / cols, cols, stream);
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

at::Tensor softmax(const at::Tensor& x) {
  TORCH_CHECK(x.is_cuda(), "softmax: x must be on a CUDA device, got ", x.device());
  TORCH_CHECK(is_supported(x.scalar_type()),
              "softmax: dtype must be float32, float64, float16 or bfloat16, got ",
              x.scalar_type());
  TORCH_CHECK(x.dim() >= 1, "softmax: x must have at least one dimension, got shape ", x.sizes());
  TORCH_CHECK(x.is_contiguous(), "softmax: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");
  TORCH_CHECK(!x.is_neg() && !x._is_zerotensor(),
              "softmax: x must hold its values, got a view that computes them; pass x.clone()");

  const c10::cuda::CUDAGuard guard(x.device());  // launch on the GPU that holds x
  at::Tensor out = at::empty_like(x);
  if (out.numel() == 0) return out;  // a grid of 0 blocks is an error
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (x.scalar_type()) {
    case at::kFloat: error = call<float>(softmax_launch_f32, x, out, stream); break;
    case at::kDouble: error = call<double>(softmax_launch_f64, x, out, stream); break;
    case at::kHalf: error = call<__half>(softmax_launch_f16, x, out, stream); break;
    default: error = call<__nv_bfloat16>(softmax_launch_bf16, x, out, stream); break;
  }
  TORCH_CHECK(error != cudaErrorInvalidValue && error != cudaErrorNotSupported,
              "softmax: ", x.scalar_type(), " of shape ", x.sizes(), " at address ",
              x.const_data_ptr(), " is not supported by this rung (", cudaGetErrorString(error),
              "); the head of its .cu file says what is legal, and the last rung takes everything");
  TORCH_CHECK(error == cudaSuccess, "softmax: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("softmax", &softmax, pybind11::arg("x"),
        "softmax(x) along the last dimension. A contiguous CUDA tensor (float32, float64, float16, "
        "bfloat16) with at least one dimension; anything else is refused.");
}
