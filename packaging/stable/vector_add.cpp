// Layer 2 of vector_add once more, through LibTorch's stable ABI: it calls plain C functions that
// stay the same from one torch to the next, so one binary serves all of them. The kernel is the one
// that every other binding calls.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

struct __half;
struct __nv_bfloat16;

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

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T, typename Launch>
cudaError_t call(Launch launch, const Tensor& a, const Tensor& b, const Tensor& out,
                 cudaStream_t stream) {
  return launch(static_cast<const T*>(a.const_data_ptr()),
                static_cast<const T*>(b.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
                out.numel(), stream);
}

bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i)) return false;
  }
  return true;
}

Tensor vector_add(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.is_cuda() && b.is_cuda() && a.get_device_index() == b.get_device_index(),
                  "vector_add: a and b must be on one CUDA device");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "vector_add: a and b must have one dtype");
  STD_TORCH_CHECK(same_shape(a, b), "vector_add: a and b must have one shape");
  STD_TORCH_CHECK(a.is_contiguous() && b.is_contiguous(), "vector_add: a and b must be contiguous");

  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const Tensor out = torch::stable::empty_like(a);
  if (out.numel() == 0) return out;
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(a.get_device_index(), &stream));
  const auto s = static_cast<cudaStream_t>(stream);

  cudaError_t error = cudaSuccess;
  switch (a.scalar_type()) {
    case ScalarType::Float: error = call<float>(vector_add_launch_f32, a, b, out, s); break;
    case ScalarType::Double: error = call<double>(vector_add_launch_f64, a, b, out, s); break;
    case ScalarType::Half: error = call<__half>(vector_add_launch_f16, a, b, out, s); break;
    case ScalarType::BFloat16:
      error = call<__nv_bfloat16>(vector_add_launch_bf16, a, b, out, s);
      break;
    default:
      STD_TORCH_CHECK(false, "vector_add: dtype must be float32, float64, float16 or bfloat16");
  }
  STD_TORCH_CHECK(error == cudaSuccess,
                  "vector_add: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

// Without pybind11: the dispatcher takes it, under torch.ops.three_layers_stable.vector_add.
STABLE_TORCH_LIBRARY(three_layers_stable, m) { m.def("vector_add(Tensor a, Tensor b) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(three_layers_stable, CUDA, m) {
  m.impl("vector_add", TORCH_BOX(&vector_add));
}
