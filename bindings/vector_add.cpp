// Layer 2 of vector_add: torch::Tensor in, torch::Tensor out. It checks, allocates, and calls the
// launcher of whichever rung it was linked with. It launches nothing itself.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/vector_add/*.cu to the letter: with extern "C" the linker
// compares names only, never parameters.
extern "C" {
cudaError_t vector_add_launch_f32(const float* a, const float* b, float* out, int64_t n,
                                  cudaStream_t stream);
cudaError_t vector_add_launch_f64(const double* a, const double* b, double* out, int64_t n,
                                  cudaStream_t stream);
cudaError_t vector_add_launch_f16(const __half* a, const __half* b, __half* out, int64_t n,
                                  cudaStream_t stream);
cudaError_t vector_add_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                   __nv_bfloat16* out, int64_t n, cudaStream_t stream);
}

namespace {

template <typename T, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& a, const at::Tensor& b, const at::Tensor& out,
                 cudaStream_t stream) {
  return launch(static_cast<const T*>(a.const_data_ptr()),
                static_cast<const T*>(b.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
                out.numel(), stream);
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

at::Tensor vector_add(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.is_cuda(), "vector_add: a must be on a CUDA device, got ", a.device());
  TORCH_CHECK(b.device() == a.device(), "vector_add: a and b must be on one device, got ",
              a.device(), " and ", b.device());
  TORCH_CHECK(b.scalar_type() == a.scalar_type(), "vector_add: a and b must have one dtype, got ",
              a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(is_supported(a.scalar_type()),
              "vector_add: dtype must be float32, float64, float16 or bfloat16, got ",
              a.scalar_type());
  TORCH_CHECK(b.sizes() == a.sizes(), "vector_add: a and b must have one shape, got ", a.sizes(),
              " and ", b.sizes());
  TORCH_CHECK(a.is_contiguous(), "vector_add: a must be contiguous, got shape ", a.sizes(),
              " with strides ", a.strides(), "; pass a.contiguous()");
  TORCH_CHECK(b.is_contiguous(), "vector_add: b must be contiguous, got shape ", b.sizes(),
              " with strides ", b.strides(), "; pass b.contiguous()");
  for (const at::Tensor* x : {&a, &b})  // like z.conj().imag, whose memory holds -x
    TORCH_CHECK(!x->is_neg() && !x->_is_zerotensor(),
                "vector_add: got a view whose values are computed, not stored; pass its .clone()");

  const c10::cuda::CUDAGuard guard(a.device());  // launch on the GPU that holds a
  at::Tensor out = a.new_empty(a.sizes());       // at::empty_like costs 2 more seconds of headers
  if (out.numel() == 0) return out;              // a grid of 0 blocks is an error
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (a.scalar_type()) {
    case at::kFloat: error = call<float>(vector_add_launch_f32, a, b, out, stream); break;
    case at::kDouble: error = call<double>(vector_add_launch_f64, a, b, out, stream); break;
    case at::kHalf: error = call<__half>(vector_add_launch_f16, a, b, out, stream); break;
    default: error = call<__nv_bfloat16>(vector_add_launch_bf16, a, b, out, stream); break;
  }
  TORCH_CHECK(error == cudaSuccess, "vector_add: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("vector_add", &vector_add, pybind11::arg("a"), pybind11::arg("b"),
        "a + b, elementwise. Contiguous CUDA tensors of one shape and dtype (float32, float64, "
        "float16, bfloat16); anything else is refused.");
}
