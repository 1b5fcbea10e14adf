// The CUDA implementations and their op table: the ops for which Triton is not fast enough, no others.
//
//   torch: pointers, device, stream --.
//                                     +--> run(call, stream) --> what it launches, nothing else
//   XLA: buffers, stream -------------'
//
// This header needs no CUDA toolkit. A kernel's file includes op.h and CUDA's headers, never torch, XLA or Python.
#pragma once

#include "op.h"

typedef struct CUstream_st* cudaStream_t;  // as CUDA's own headers say

namespace mxep::cuda {

// Launches on `stream` of the current device and returns: no allocation, no synchronisation, so that a CUDA graph
// can capture it. The kernel writes every byte of every output. Pointers are aligned to 16 bytes, no output is
// empty. Throws std::runtime_error when CUDA refuses the launch.
using Run = void (*)(const Call&, cudaStream_t);

struct CudaOp {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  Run run;
  int only = 0;  // the one compute capability it has machine code for, as in cuda_archs(); 0: all of them
};

// Known at compile time: the XLA binding makes one handler per entry.
inline constexpr size_t kNumCudaOps = 16;
std::span<const CudaOp> cuda_ops();

// The compute capabilities that this build has machine code for, as nvcc writes them: 900, 1000.
std::span<const int> cuda_archs();

// `run` on a device that need not be the current one of this thread.
void run_on(int device, const CudaOp& op, const Call& call, cudaStream_t stream);

void grouped_mm_bf16(const Call& call, cudaStream_t stream);
void grouped_mm_fold(const Call& call, cudaStream_t stream);
void grouped_mm_fold_bias(const Call& call, cudaStream_t stream);
void grouped_wgrad_bf16(const Call& call, cudaStream_t stream);
void grouped_wgrad_bf16_t(const Call& call, cudaStream_t stream);
void grouped_wgrad_fold(const Call& call, cudaStream_t stream);
void quantize_col(const Call& call, cudaStream_t stream);
void quantize_both(const Call& call, cudaStream_t stream);
void quantize_both_fold(const Call& call, cudaStream_t stream);
void sort_by_expert(const Call& call, cudaStream_t stream);
void swiglu_row(const Call& call, cudaStream_t stream);
void swiglu_col(const Call& call, cudaStream_t stream);
void swiglu_both(const Call& call, cudaStream_t stream);
void swiglu_bwd_row(const Call& call, cudaStream_t stream);
void swiglu_bwd_col(const Call& call, cudaStream_t stream);
void swiglu_bwd_both(const Call& call, cudaStream_t stream);

}  // namespace mxep::cuda
