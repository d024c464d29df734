#error \
    "<cuda_awbarrier_primitives.h> (asynchronous barriers) is not there on the CPU machine; put it under #ifndef __SIMT_CPU__"
