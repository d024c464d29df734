// kernel<<<grid, block, shared, stream>>>(arguments): what the rewriter turns a launch into.
#pragma once
#include <tuple>
#include <type_traits>

#include "machine.h"

namespace simt {

// What the rewriter knows about a launch from the text.
struct Site {
  const char* kernel;      // as written: "softmax<float, 128>"
  const char* parameters;  // the kernel's own names for its arguments: "x,y,n"
  Place place;
};

struct Request {
  Site site;
  dim3 grid, block, cluster = dim3(1, 1, 1);
  size_t dynamic_shared = 0;
  const void* kernel = nullptr;  // its address, where cudaFuncSetAttribute needs to find it again
  // The kernel call with its arguments, and the loop that runs it for thread after thread.
  void (*loop)(void* body, Fiber* fiber) = nullptr;
  void* body = nullptr;
  size_t body_size = 0;
  // The arguments that are pointers, null for the others (the checker names arrays by them).
  const void* const* pointers = nullptr;
  int argument_count = 0;
};

void launch(const Request& request);
dim3 cluster_of(const cudaLaunchConfig_t& config);

template <class T>
SIMT_UNWATCHED const void* pointer_or_null(const T& argument) {
  if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
    return const_cast<const void*>(static_cast<const volatile void*>(argument));
  } else {
    (void)argument;
    return nullptr;
  }
}

// A kernel call together with its arguments: one object, all that the kernel may read of the host.
template <class Call, class... Arguments>
struct Body {
  Call call;
  std::tuple<Arguments...> arguments;
  void operator()() { std::apply(call, arguments); }
};

template <class Call, class... Arguments>
SIMT_UNWATCHED void launch_with(Request request, Call call, Arguments... arguments) {
  const void* pointers[] = {pointer_or_null(arguments)..., nullptr};
  Body<Call, Arguments...> body{call, {arguments...}};
  request.loop = &run_threads<decltype(body)>;
  request.body = &body;
  request.body_size = sizeof body;
  request.pointers = pointers;
  request.argument_count = sizeof...(arguments);
  launch(request);
}

template <class Result, class... Parameters>
const void* address_of(Result (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

// A kernel whose parameter types are known at its launch. (Those of a template may have to be
// deduced, which only a call can do.)
template <class... Parameters>
struct Typed {
  const void* kernel;
};
template <class... Parameters>
Typed<Parameters...> typed(void (*kernel)(Parameters...)) {
  return {address_of(kernel)};
}

class Launcher {
 public:
  explicit Launcher(const Site& site) { request_.site = site; }

  Launcher& cluster(unsigned x, unsigned y = 1, unsigned z = 1) {
    request_.cluster = dim3(x, y, z);
    return *this;
  }
  Launcher& on(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr) {
    request_.grid = grid;
    request_.block = block;
    request_.dynamic_shared = shared;
    return *this;
  }

  // `call` is a lambda that makes the call, so that the kernel is inlined into the thread loop.
  template <class Call, class... Arguments>
  void run(Call call, Arguments... arguments) {
    launch_with(request_, call, arguments...);
  }
  template <class... Parameters, class Call, class... Arguments>
  void run(Typed<Parameters...> kernel, Call call, Arguments&&... arguments) {
    request_.kernel = kernel.kernel;
    if constexpr (sizeof...(Parameters) == sizeof...(Arguments)) {
      // As in CUDA, arguments become what the kernel takes here and not in every thread.
      launch_with<Call, Parameters...>(request_, call, static_cast<Parameters>(arguments)...);
    } else {  // the kernel has default arguments
      launch_with(request_, call, arguments...);
    }
  }

 private:
  Request request_;
};

}  // namespace simt
