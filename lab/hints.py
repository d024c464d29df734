"""What compilers and the CUDA runtime say, and do not explain: one sentence of help for each.

The particular comes before the general: the first pattern that is found in a message wins. Most
wordings are nvcc's, some g++'s, which compiles bindings and, for the CPU machine, kernels too.
"""

import re

COMPILER = [
    (
        r"(?i)identifier \"(threadid|blockid|blockdim|griddim|warpsize)\w*\" is undefined"
        r"|‘(threadid|blockid|blockdim|griddim)\w*’ was not declared",
        "CUDA spells its built-in variables threadIdx, blockIdx, blockDim, gridDim and warpSize.",
    ),
    (
        r"class \"(uint3|dim3)\" has no member|‘(?:const )?(?:struct )?\w*(uint3"
        r"|dim3)\w*’ has no member",
        "threadIdx, blockIdx, blockDim and gridDim have the members x, y and z, in lower case.",
    ),
    (
        r"__global__ function must have a void return type",
        "A kernel returns nothing: write its result through a pointer that it is given.",
    ),
    (
        r"__global__ function call must be configured",
        "Launch a kernel with name<<<blocks, threads_per_block>>>(arguments).",
    ),
    (
        r"kernel launch from __device__ or __global__",
        "A kernel calls __device__ functions; only host code launches kernels.",
    ),
    (
        r"expected a \">>>\"|expected a \"<<<\"",
        "A launch is name<<<blocks, threads>>>(arguments), with three angle brackets on each "
        "side and no space between them.",
    ),
    (
        r"calling a constexpr __host__ function\(\"(max|min)\"",
        "std::max and std::min run on the host; in a kernel write max(a, b) and min(a, b), "
        "without std::.",
    ),
    (
        r"calling a (constexpr )?__host__ function|is undefined in device code",
        "A kernel can only call functions marked __device__ (or __host__ __device__), and the"
        " C++ library is not.",
    ),
    (
        r"host variable .* cannot be directly read",
        "Device code cannot see host variables: pass the value as an argument, or declare it "
        "constexpr, __constant__ or __device__.",
    ),
    (
        r"variable length array|expression must have a constant value",
        "The size of a __shared__ or local array must be a compile-time constant; for a size "
        "known at launch, declare extern __shared__ float s[] and give the bytes as the third"
        " launch argument.",
    ),
    (
        r"initializer not allowed for __shared__",
        "Shared memory starts uninitialised: let the threads fill it, then __syncthreads().",
    ),
    (
        r"uses too much shared data",
        "A block has a limit for __shared__ memory: make the tile smaller, or keep part of it "
        "in registers.",
    ),
    (
        r"declaration is incompatible with previous",
        "extern __shared__ arrays are one array under one name: declare it once as extern "
        "__shared__ unsigned char s[], and reinterpret_cast it.",
    ),
    (
        r"must be a modifiable lvalue|assignment of read-only",
        "It is const here: inputs are const pointers, and results go to the output pointer.",
    ),
    (
        r"__shfl\w*\" is undefined|‘__shfl\w*’ was not declared",
        "The shuffles without a mask are gone: write __shfl_down_sync(0xffffffff, value, "
        "offset), and so for the others.",
    ),
    (
        r"identifier \"(__half|half|__half2|half2)\" is undefined",
        "Add #include <cuda_fp16.h>.",
    ),
    (
        r"identifier \"(__nv_)?bfloat16\w*\" is undefined|__nv_bfloat16\w*\" is undefined",
        "The type is __nv_bfloat16: add #include <cuda_bf16.h>.",
    ),
    (
        r"identifier \"printf\" is undefined|‘printf’ was not declared",
        "Add #include <cstdio>.",
    ),
    (
        r"‘u?int(8|16|32|64)_t’ (does not name|was not declared|has not been declared)",
        "Add #include <cstdint>.",
    ),
    (
        r"function \"atomic\w+\" matches",
        "There is no such atomic for these types: both must fit one of int, unsigned, "
        "unsigned long long, float, double, __half2, and the first is a pointer.",
    ),
    (
        r"lambda requires --extended-lambda",
        "Write a __device__ function instead of a device lambda, or pass flags=['--extended-"
        "lambda'].",
    ),
    (
        r"does not support exception handling",
        "Device code has no exceptions: check before the launch, or write an error flag to memory.",
    ),
    (
        r"(no operator .* matches|no match for ‘operator).*at::Tensor",
        "The operators of tensors are in ATen/TensorOperators.h: include it, or write a.mul(b).",
    ),
    (
        r"no operator .* matches|no match for ‘operator",
        "float4, int2 and the like have no arithmetic: compute each of .x .y .z .w.",
    ),
    (
        r"argument of type .*cudaStream_t.* incompatible with parameter of type .*size_t",
        "The launch arguments are <<<blocks, threads, shared_bytes, stream>>>: put 0 before "
        "the stream.",
    ),
    (
        r"incompatible with parameter of type|cannot be used to initialize|invalid conversion"
        r"|cannot convert",
        "The types differ: compare with the parameter list, in order; a pointer takes *p or "
        "p[i] to give a value.",
    ),
    (
        r"too (many|few) arguments",
        "Compare the call with the function's parameter list: launcher and kernel each have "
        "their own.",
    ),
    (
        r"A __global__ function .*cannot be a member",
        "A kernel is a free function, outside any class.",
    ),
    (
        r"pointer to a complete object type",
        "A void pointer cannot be indexed: give the parameter its type, or reinterpret_cast it.",
    ),
    (
        r"not supported on .target",
        "This instruction needs another architecture: see TORCH_CUDA_ARCH_LIST; wgmma and "
        "setmaxnreg need 9.0a.",
    ),
    (
        r"expected a \";\"|expected ‘;’",
        "A semicolon is missing, at the end of the line above or here.",
    ),
    (
        r"expected a \"}\"|expected ‘}’",
        "A brace that was opened is never closed.",
    ),
    (
        r"[Nn]o such file or directory|cannot open source file",
        "There is no such header: the usual ones are cuda_runtime.h, cuda_fp16.h, "
        "cuda_bf16.h, cstdint and cooperative_groups.h.",
    ),
    (
        r"identifier \".*\" is undefined|was not declared in this scope",
        "This name is not declared: look for a typing error, or a missing #include.",
    ),
    (
        r"expression has no effect",
        "This does nothing: __syncthreads and other functions are called with (), and = stores.",
    ),
    (
        r"missing return statement|no return statement",
        "A function that promises a value must return one on every path.",
    ),
    (
        r"must have integral or",
        "% and the bit operations need whole numbers; for floats there is fmodf().",
    ),
]

RUNTIME = [
    (
        r"illegal memory access",
        "A thread read or wrote outside its tensors: compare each index with the sizes, and "
        "see check(…, sanitize='memcheck').",
    ),
    (
        r"misaligned address",
        "A vector load (float4, half2) needs an address that is a multiple of its size; a "
        "slice like x[1:] is not.",
    ),
    (
        r"invalid (argument|configuration)",
        "The GPU refused the launch: at most 1024 threads a block, no dimension 0, y and z at"
        " most 65535 blocks, shared memory within the limit.",
    ),
    (
        r"too many resources requested",
        "Registers a thread times threads a block exceed the SM's: use fewer threads, or "
        "__launch_bounds__.",
    ),
    (
        r"unspecified launch failure",
        "The kernel was stopped by a fault: check(…, sanitize='memcheck') finds it.",
    ),
    (
        r"launch timed out|did not finish",
        "A loop that does not end, or a barrier that some threads never reach.",
    ),
    (
        r"no kernel image",
        "It was compiled for another GPU: unset TORCH_CUDA_ARCH_LIST.",
    ),
]


def hint(message: str, known: list[tuple[str, str]] = COMPILER) -> str:
    """The sentence for a message, or ""."""
    return next((text for pattern, text in known if re.search(pattern, message)), "")


def rank(message: str) -> int:
    """The place of its hint in ``COMPILER``: the smaller, the more it says."""
    places = (i for i, (pattern, _) in enumerate(COMPILER) if re.search(pattern, message))
    return next(places, len(COMPILER))
