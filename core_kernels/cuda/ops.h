// The CUDA kernels and the table of them, from the list in ops.def. The list has only the ops for which Triton is not
// fast enough.
//
//   torch: pointers, device, stream --.
//                                     +--> run(call, stream): launches only
//   XLA: buffers, stream -------------'
//
// This header does not need the CUDA toolkit. A kernel's file includes op.h and CUDA's headers, never a header of
// torch, XLA or Python.
#pragma once

#include "op.h"

typedef struct CUstream_st* cudaStream_t;  // the declaration of CUDA's headers

namespace mxep::cuda {

// Launches on `stream` of the current device and returns. It neither allocates nor synchronises, so that a CUDA graph
// can capture it. The kernel writes every byte of every output. Pointers are aligned to 16 bytes, no output is empty.
// Throws std::runtime_error when CUDA refuses the launch.
using Run = void (*)(const Call&, cudaStream_t);

struct CudaOp {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  Run run;
  int only;  // the one compute capability with machine code, as in cuda_archs(); 0: all of them
};

// The compute capabilities with machine code in this build, as nvcc writes them: 900, 1000.
std::span<const int> cuda_archs();

// Runs an op on a device that may differ from the current device of this thread.
void run_on(int device, const CudaOp& op, const Call& call, cudaStream_t stream);

#define MXEP_CUDA_OP(name, inputs, outputs, attrs, only) void name(const Call& call, cudaStream_t stream);
#include "cuda/ops.def"
#undef MXEP_CUDA_OP

inline constexpr CudaOp kCudaOps[] = {
#define MXEP_CUDA_OP(name, inputs, outputs, attrs, only) {#name, inputs, outputs, attrs, name, only},
#include "cuda/ops.def"
#undef MXEP_CUDA_OP
};

}  // namespace mxep::cuda
