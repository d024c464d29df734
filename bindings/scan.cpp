// Layer 2 of scan: running sums along the last dimension. Checks, allocates, and calls the launcher
// of whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match the definitions in kernels/scan/*.cu to the letter.
extern "C" {
int64_t scan_workspace(int64_t rows, int64_t n);
cudaError_t scan_launch_f32(const float* x, float* out, void* workspace, int64_t rows, int64_t n,
                            cudaStream_t stream);
cudaError_t scan_launch_f64(const double* x, double* out, void* workspace, int64_t rows, int64_t n,
                            cudaStream_t stream);
cudaError_t scan_launch_f16(const __half* x, __half* out, void* workspace, int64_t rows, int64_t n,
                            cudaStream_t stream);
cudaError_t scan_launch_bf16(const __nv_bfloat16* x, __nv_bfloat16* out, void* workspace,
                             int64_t rows, int64_t n, cudaStream_t stream);
}

namespace {

at::Tensor scan(const at::Tensor& x) {
  TORCH_CHECK(x.is_cuda(), "scan: x must be on a CUDA device, got ", x.device());
  const auto dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "scan: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(x.dim() >= 1, "scan: x must have at least 1 dimension, got shape ", x.sizes());
  TORCH_CHECK(x.is_contiguous(), "scan: x must be contiguous, got shape ", x.sizes(),
              " with strides ", x.strides(), "; pass x.contiguous()");
  TORCH_CHECK(!x.is_neg() && !x._is_zerotensor(),
              "scan: x must hold its values, got a view that computes them; pass x.clone()");

  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty_like(x);
  if (out.numel() == 0) return out;
  const int64_t n = x.size(-1), rows = x.numel() / n;
  const at::Tensor work = at::empty({scan_workspace(rows, n)}, x.options().dtype(at::kByte));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T)                                                                          \
  error = scan_launch_##SUFFIX(static_cast<const T*>(x.const_data_ptr()),                        \
                               static_cast<T*>(out.mutable_data_ptr()), work.mutable_data_ptr(), \
                               rows, n, stream)
  switch (dtype) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error != cudaErrorNotSupported, "scan: ", rows, " rows of ", n,
              " are not supported by this rung: it wants fewer than 2^31 blocks");
  TORCH_CHECK(error == cudaSuccess, "scan: the launch failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scan", &scan, pybind11::arg("x"),
        "out[..., i] = x[..., 0] + … + x[..., i]. A contiguous CUDA tensor (float32, float64, "
        "float16, bfloat16); anything else is refused.");
}
