// Layer 2 of matmul_tc: activation(a @ b + bias) of float16 or bfloat16 matrices, in their dtype.
// Strides travel with the pointers; a rung that wants another layout says so.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border
struct __nv_bfloat16;

// Must match the definitions in kernels/matmul_tc/*.cu to the letter.
extern "C" {
cudaError_t matmul_tc_launch_f16(const __half* a, const __half* b, __half* c, int64_t m, int64_t n,
                                 int64_t k, int64_t a_row, int64_t a_col, int64_t b_row,
                                 int64_t b_col, cudaStream_t stream);
cudaError_t matmul_tc_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c,
                                  int64_t m, int64_t n, int64_t k, int64_t a_row, int64_t a_col,
                                  int64_t b_row, int64_t b_col, cudaStream_t stream);

// Most rungs have no epilogue, hence no such launchers: then these are null. Hidden, so that those
// of no other library are taken for them. bias may be null; activation: 0 none, 1 ReLU, 2 GELU.
#define OPTIONAL __attribute__((weak, visibility("hidden")))
OPTIONAL cudaError_t matmul_tc_bias_launch_f16(const __half* a, const __half* b, const __half* bias,
                                               __half* c, int64_t m, int64_t n, int64_t k,
                                               int64_t a_row, int64_t a_col, int64_t b_row,
                                               int64_t b_col, int activation, cudaStream_t stream);
OPTIONAL cudaError_t matmul_tc_bias_launch_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b,
                                                const __nv_bfloat16* bias, __nv_bfloat16* c,
                                                int64_t m, int64_t n, int64_t k, int64_t a_row,
                                                int64_t a_col, int64_t b_row, int64_t b_col,
                                                int activation, cudaStream_t stream);
}

namespace {

// The stride of a dimension of length 1 may be anything: give the one a row-major matrix has.
int64_t row_stride(const at::Tensor& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1); }
int64_t col_stride(const at::Tensor& x) { return x.size(1) > 1 ? x.stride(1) : 1; }

template <typename T, typename Launch, typename BiasLaunch>
cudaError_t call(Launch launch, BiasLaunch bias_launch, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias, const at::Tensor& c, int64_t activation,
                 cudaStream_t stream) {
  const auto* from_a = static_cast<const T*>(a.const_data_ptr());
  const auto* from_b = static_cast<const T*>(b.const_data_ptr());
  auto* to = static_cast<T*>(c.mutable_data_ptr());
  const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  if (!bias && activation == 0) {
    return launch(from_a, from_b, to, m, n, k, row_stride(a), col_stride(a), row_stride(b),
                  col_stride(b), stream);
  }
  TORCH_CHECK(bias_launch != nullptr,
              "matmul_tc: a bias and an activation are not supported by this rung: it has no "
              "epilogue. Rung 10 has one; elsewhere apply them to the product");
  const auto* shift = bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr;
  return bias_launch(from_a, from_b, shift, to, m, n, k, row_stride(a), col_stride(a),
                     row_stride(b), col_stride(b), static_cast<int>(activation), stream);
}

at::Tensor matmul_tc(const at::Tensor& a, const at::Tensor& b,
                     const std::optional<at::Tensor>& bias, int64_t activation) {
  TORCH_CHECK(a.is_cuda(), "matmul_tc: a must be on a CUDA device, got ", a.device());
  TORCH_CHECK(b.device() == a.device(), "matmul_tc: a and b must be on one device, got ",
              a.device(), " and ", b.device());
  TORCH_CHECK(b.scalar_type() == a.scalar_type(), "matmul_tc: a and b must have one dtype, got ",
              a.scalar_type(), " and ", b.scalar_type());
  TORCH_CHECK(a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16,
              "matmul_tc: dtype must be float16 or bfloat16, got ", a.scalar_type());
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2,
              "matmul_tc: a and b must have 2 dimensions, got shapes ", a.sizes(), " and ",
              b.sizes());
  TORCH_CHECK(a.size(1) == b.size(0), "matmul_tc: a must have as many columns as b has rows, got ",
              a.sizes(), " and ", b.sizes());
  TORCH_CHECK(!a.is_neg() && !a._is_zerotensor(),
              "matmul_tc: a must hold its values, got a view that computes them; pass a.clone()");
  TORCH_CHECK(!b.is_neg() && !b._is_zerotensor(),
              "matmul_tc: b must hold its values, got a view that computes them; pass b.clone()");
  if (bias) {
    TORCH_CHECK(bias->device() == a.device() && bias->scalar_type() == a.scalar_type(),
                "matmul_tc: bias must have a's dtype and device, ", a.scalar_type(), " on ",
                a.device(), ", got ", bias->scalar_type(), " on ", bias->device());
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == b.size(1),
                "matmul_tc: bias must have one element for each column of b, got bias ",
                bias->sizes(), " and b ", b.sizes());
    TORCH_CHECK(bias->is_contiguous(), "matmul_tc: bias must be contiguous, got strides ",
                bias->strides(), "; pass bias.contiguous()");
    TORCH_CHECK(
        !bias->is_neg() && !bias->_is_zerotensor(),
        "matmul_tc: bias must hold its values, got a view that computes them; pass bias.clone()");
  }
  TORCH_CHECK(activation >= 0 && activation <= 2,
              "matmul_tc: activation must be 0 (none), 1 (ReLU) or 2 (GELU), got ", activation);

  const c10::cuda::CUDAGuard guard(a.device());
  at::Tensor c = at::empty({a.size(0), b.size(1)}, a.options());
  if (c.numel() == 0) return c;  // with no columns in a there are zeros to write: that goes on
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();

  const cudaError_t error =
      a.scalar_type() == at::kHalf
          ? call<__half>(matmul_tc_launch_f16, matmul_tc_bias_launch_f16, a, b, bias, c, activation,
                         stream)
          : call<__nv_bfloat16>(matmul_tc_launch_bf16, matmul_tc_bias_launch_bf16, a, b, bias, c,
                                activation, stream);
  TORCH_CHECK(error != cudaErrorNotSupported,
              "matmul_tc: not supported by this rung (the head of its file tells what is), got "
              "shapes ",
              a.sizes(), " and ", b.sizes(), " with strides ", a.strides(), " and ", b.strides(),
              "; what all rungs but the general one want at least are pointers "
              "aligned to 16 bytes and row strides that are multiples of 8, and some want sm_90a");
  TORCH_CHECK(error == cudaSuccess, "matmul_tc: the launch failed: ", cudaGetErrorString(error));
  return c;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("matmul_tc", &matmul_tc, pybind11::arg("a"), pybind11::arg("b"),
        pybind11::arg("bias") = pybind11::none(), pybind11::arg("activation") = 0,
        "activation(a @ b + bias) on the Tensor Cores for CUDA matrices of float16 or bfloat16, in "
        "float32. The result is row-major, in the inputs' dtype. Most rungs want aligned operands. "
        "Optional, and of rungs with an epilogue only: bias, one element a column; activation: 0 "
        "none, 1 ReLU, 2 GELU.");
}
