// Layer 2 of conv2d: activation(conv2d(x, weight) + bias). Checks, allocates, calls the launcher of
// whichever rung it was linked with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/utils/pybind.h>

struct __half;  // only pointers cross the border, so the 16-bit types need no header here
struct __nv_bfloat16;

// Must match what kernels/conv2d/*.cu say to the letter.
struct Conv {                          // one convolution
  int batch, channels, height, width;  // of x
  int filters, kernel_h, kernel_w;     // of weight; each filter sees channels / groups
  int out_h, out_w;                    // y is batch x filters x out_h x out_w
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int channels_last;  // 1 if x, weight and y lie as NHWC, else NCHW
  int activation;     // 0 none, 1 ReLU, 2 GELU
};

#define DECLARE(SUFFIX, T)                                                                     \
  cudaError_t conv2d_launch_##SUFFIX(const T* x, const T* weight, const T* bias, T* y, Conv v, \
                                     cudaStream_t stream);
extern "C" {
DECLARE(f32, float)
DECLARE(f64, double)
DECLARE(f16, __half)
DECLARE(bf16, __nv_bfloat16)
}

namespace {

using Pair = std::array<int64_t, 2>;

// How often a kernel of `taps` taps fits, as its steps go; checked to be at least once.
int64_t steps(int64_t size, int64_t taps, int64_t stride, int64_t pad, int64_t dilation) {
  return (size + 2 * pad - dilation * (taps - 1) - 1) / stride + 1;
}

template <typename T, typename Launch>
cudaError_t call(Launch launch, const at::Tensor& x, const at::Tensor& weight,
                 const at::Tensor& bias, const at::Tensor& y, const Conv& v, cudaStream_t stream) {
  const void* b = bias.defined() ? bias.const_data_ptr() : nullptr;
  return launch(static_cast<const T*>(x.const_data_ptr()),
                static_cast<const T*>(weight.const_data_ptr()), static_cast<const T*>(b),
                static_cast<T*>(y.mutable_data_ptr()), v, stream);
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, Pair stride, Pair padding, Pair dilation,
                  int64_t groups, int64_t activation) {
  TORCH_CHECK(x.is_cuda(), "conv2d: x must be on a CUDA device, got ", x.device());
  TORCH_CHECK(weight.device() == x.device() && (!bias || bias->device() == x.device()),
              "conv2d: all tensors must be on one device, got ", x.device(), ", ", weight.device(),
              bias ? c10::str(" and ", bias->device()) : "");
  for (const at::Tensor* t : {&x, &weight, bias ? &*bias : &x})
    TORCH_CHECK(!t->is_neg() && !t->_is_zerotensor(),
                "conv2d: got a view whose values are computed, not stored; pass its .clone()");
  const auto dtype = x.scalar_type();
  TORCH_CHECK(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "conv2d: dtype must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK(weight.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype),
              "conv2d: all tensors must have one dtype, got ", dtype, ", ", weight.scalar_type(),
              bias ? c10::str(" and ", bias->scalar_type()) : "");
  TORCH_CHECK(x.dim() == 4 && weight.dim() == 4,
              "conv2d: x and weight must have 4 dimensions, got shapes ", x.sizes(), " and ",
              weight.sizes());
  const auto [r, s] = Pair{weight.size(2), weight.size(3)};
  TORCH_CHECK(groups > 0 && x.size(1) > 0 && weight.size(1) * groups == x.size(1) &&
                  weight.size(0) > 0 && weight.size(0) % groups == 0 && r > 0 && s > 0,
              "conv2d: weight must be (K, C / groups, R, S) for x (N, C, H, W), K a multiple of "
              "groups, got weight ",
              weight.sizes(), ", x ", x.sizes(), " and groups ", groups);
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
              "conv2d: bias must have one element for each filter of weight ", weight.sizes(),
              ", got ", bias ? bias->sizes() : at::IntArrayRef());
  for (const int i : {0, 1}) {
    TORCH_CHECK(stride[i] > 0 && dilation[i] > 0 && padding[i] >= 0,
                "conv2d: stride and dilation must be positive, padding not negative, got stride ",
                stride[i], ", dilation ", dilation[i], ", padding ", padding[i]);
    TORCH_CHECK(stride[i] <= 1 << 24 && dilation[i] <= 1 << 24,  // kernels step in 32 bits
                "conv2d: stride and dilation must be at most 2^24, got ", stride[i], " and ",
                dilation[i]);
    const int64_t size = x.size(2 + i), taps = weight.size(2 + i), most = INT32_MAX;
    TORCH_CHECK(padding[i] <= most / 4 && size <= most / 4 && dilation[i] <= most / 4 / taps,
                "conv2d: no size may be over 2^29, got x ", x.sizes(), ", weight ", weight.sizes());
    TORCH_CHECK(size + 2 * padding[i] > dilation[i] * (taps - 1),
                "conv2d: the kernel must fit into the padded image, got x ", x.sizes(), ", weight ",
                weight.sizes(), ", padding ", padding[i], ", dilation ", dilation[i]);
  }
  TORCH_CHECK(std::max({x.size(0), x.size(1), weight.size(0)}) <= INT32_MAX &&
                  weight.size(1) * r * s <= INT32_MAX,
              "conv2d: no size may be over 2^31, got x ", x.sizes(), ", weight ", weight.sizes());
  TORCH_CHECK(activation >= 0 && activation <= 2,
              "conv2d: activation must be 0 (none), 1 (ReLU) or 2 (GELU), got ", activation);

  const c10::cuda::CUDAGuard guard(x.device());
  const auto format = x.suggest_memory_format();  // channels-last if it lies like that
  const at::Tensor from = x.contiguous(format), filters = weight.contiguous(format);
  const at::Tensor shift = bias ? bias->contiguous() : at::Tensor();
  const int64_t p = steps(x.size(2), r, stride[0], padding[0], dilation[0]);
  const int64_t q = steps(x.size(3), s, stride[1], padding[1], dilation[1]);
  at::Tensor y = at::empty({x.size(0), weight.size(0), p, q}, x.options(), format);
  if (y.numel() == 0) return y;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto make = [](auto... sizes) { return Conv{static_cast<int>(sizes)...}; };
  const Conv v = make(x.size(0), x.size(1), x.size(2), x.size(3), weight.size(0), r, s, p, q,
                      stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1],
                      groups, format == at::MemoryFormat::ChannelsLast, activation);
  cudaError_t error = cudaSuccess;
#define CALL(SUFFIX, T) error = call<T>(conv2d_launch_##SUFFIX, from, filters, shift, y, v, stream)
  switch (dtype) {
    case at::kFloat: CALL(f32, float); break;
    case at::kDouble: CALL(f64, double); break;
    case at::kHalf: CALL(f16, __half); break;
    default: CALL(bf16, __nv_bfloat16); break;
  }
#undef CALL
  TORCH_CHECK(error != cudaErrorNotSupported,
              "conv2d: not supported by this rung (the head of its file tells what is), got ",
              dtype, ", x ", x.sizes(), v.channels_last ? " channels-last" : "", ", weight ",
              weight.sizes(), ", stride ", at::IntArrayRef(stride), ", dilation ",
              at::IntArrayRef(dilation), ", groups ", groups);
  TORCH_CHECK(error == cudaSuccess, "conv2d: the launch failed: ", cudaGetErrorString(error));
  return y;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using pybind11::arg;
  m.def("conv2d", &conv2d, arg("x"), arg("weight"), arg("bias"), arg("stride"), arg("padding"),
        arg("dilation"), arg("groups"), arg("activation"),
        "activation(conv2d(x, weight) + bias): x (N, C, H, W), weight (K, C / groups, R, S), bias "
        "(K) or None. Any strides: x is copied once unless contiguous or channels-last, weight "
        "unless it lies as x does; y is channels-last if x is. float32, float64, float16, "
        "bfloat16. activation: 0 none, 1 ReLU, 2 GELU.");
}
