// Layer 2 of swiglu: silu(gate) * up and its gradients. Checks, allocates, calls the launchers of
// whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/swiglu/*.cu to the letter.
#define DECLARE(SUFFIX, T)                                                                         \
  cudaError_t swiglu_launch_##SUFFIX(const T* gate, const T* up, T* out, int64_t n,                \
                                     cudaStream_t stream);                                         \
  cudaError_t swiglu_backward_launch_##SUFFIX(const T* grad, const T* gate, const T* up, T* dgate, \
                                              T* dup, int64_t n, cudaStream_t stream);
extern "C" {
DECLARE(f32, float)
DECLARE(f64, double)
DECLARE(f16, __half)
DECLARE(bf16, __nv_bfloat16)
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

// t must be like gate in everything.
void check(const at::Tensor& gate, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.device() == gate.device(), "swiglu: gate and ", name,
              " must be on one device, got ", gate.device(), " and ", t.device());
  TORCH_CHECK(t.scalar_type() == gate.scalar_type(), "swiglu: gate and ", name,
              " must have one dtype, got ", gate.scalar_type(), " and ", t.scalar_type());
  TORCH_CHECK(t.sizes() == gate.sizes(), "swiglu: gate and ", name, " must have one shape, got ",
              gate.sizes(), " and ", t.sizes());
  TORCH_CHECK(t.is_contiguous(), "swiglu: ", name, " must be contiguous, got shape ", t.sizes(),
              " with strides ", t.strides(), "; pass ", name, ".contiguous()");
  TORCH_CHECK(!t.is_neg() && !t._is_zerotensor(), "swiglu: ", name,
              " must hold its values, got a view that computes them; pass ", name, ".clone()");
}

void check(const at::Tensor& gate, const at::Tensor& up) {
  TORCH_CHECK(gate.is_cuda(), "swiglu: gate must be on a CUDA device, got ", gate.device());
  const auto dtype = gate.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "swiglu: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  check(gate, "gate", gate);
  check(gate, "up", up);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  check(gate, up);
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor y = at::empty_like(gate);
  if (y.numel() == 0) return y;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T) \
  error = swiglu_launch_##SUFFIX(in<T>(gate), in<T>(up), out<T>(y), y.numel(), stream)
  switch (gate.scalar_type()) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error == cudaSuccess, "swiglu: the launch failed: ", cudaGetErrorString(error));
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& grad, const at::Tensor& gate,
                                                   const at::Tensor& up) {
  check(gate, up);
  check(gate, "grad", grad);
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor dgate = at::empty_like(gate), dup = at::empty_like(up);
  if (dup.numel() == 0) return {dgate, dup};
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T)                                                                       \
  error = swiglu_backward_launch_##SUFFIX(in<T>(grad), in<T>(gate), in<T>(up), out<T>(dgate), \
                                          out<T>(dup), dup.numel(), stream)
  switch (gate.scalar_type()) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error == cudaSuccess, "swiglu: the launch failed: ", cudaGetErrorString(error));
  return {dgate, dup};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("swiglu", &swiglu, pybind11::arg("gate"), pybind11::arg("up"),
        "silu(gate) * up, elementwise. Contiguous CUDA tensors of one shape and dtype (float32, "
        "float64, float16, bfloat16); anything else is refused.");
  m.def("swiglu_backward", &swiglu_backward, pybind11::arg("grad"), pybind11::arg("gate"),
        pybind11::arg("up"), "The gradients of gate and up, given the gradient of the result.");
}
