// Layer 2 of transpose: the last two dimensions swapped, in memory. Checks, allocates, and calls
// the launcher of whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

// Must match the definitions in kernels/transpose/*.cu to the letter.
extern "C" {
cudaError_t transpose_launch_b8(const uint8_t* in, uint8_t* out, int64_t batch, int64_t rows,
                                int64_t cols, cudaStream_t stream);
cudaError_t transpose_launch_b16(const uint16_t* in, uint16_t* out, int64_t batch, int64_t rows,
                                 int64_t cols, cudaStream_t stream);
cudaError_t transpose_launch_b32(const uint32_t* in, uint32_t* out, int64_t batch, int64_t rows,
                                 int64_t cols, cudaStream_t stream);
cudaError_t transpose_launch_b64(const uint64_t* in, uint64_t* out, int64_t batch, int64_t rows,
                                 int64_t cols, cudaStream_t stream);
}

namespace {

template <typename T, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& x, const at::Tensor& out, cudaStream_t stream) {
  const int64_t rows = x.size(-2), cols = x.size(-1);
  return launch(static_cast<const T*>(x.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()),
                x.numel() / (rows * cols), rows, cols, stream);
}

at::Tensor transpose(const at::Tensor& x) {
  TORCH_CHECK(x.is_cuda(), "transpose: x must be on a CUDA device, got ", x.device());
  const int64_t size = x.element_size();
  TORCH_CHECK(size == 1 || size == 2 || size == 4 || size == 8,
              "transpose: elements must have 1, 2, 4 or 8 bytes, got ", x.scalar_type(), " with ",
              size);
  TORCH_CHECK(!x.is_conj() && !x.is_neg() && !x._is_zerotensor(),
              "transpose: x must hold its values, got a view that computes them; pass x.clone()");
  TORCH_CHECK(x.dim() >= 2, "transpose: x must have at least 2 dimensions, got shape ", x.sizes());
  TORCH_CHECK(x.is_contiguous(), "transpose: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");

  const c10::cuda::CUDAGuard guard(x.device());
  auto shape = x.sizes().vec();
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  at::Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
  switch (size) {
    case 1: error = call<uint8_t>(transpose_launch_b8, x, out, stream); break;
    case 2: error = call<uint16_t>(transpose_launch_b16, x, out, stream); break;
    case 4: error = call<uint32_t>(transpose_launch_b32, x, out, stream); break;
    default: error = call<uint64_t>(transpose_launch_b64, x, out, stream); break;
  }
  TORCH_CHECK(error != cudaErrorNotSupported, "transpose: shape ", x.sizes(), " of ",
              x.scalar_type(), " is not supported by this rung: see Legal in the head of its file");
  TORCH_CHECK(error == cudaSuccess, "transpose: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "transpose", &transpose, pybind11::arg("x"),
      "x (..., R, C) → (..., C, R), contiguous. x: a contiguous CUDA tensor of any dtype of 1, 2, "
      "4 or 8 bytes; anything else is refused.");
}
