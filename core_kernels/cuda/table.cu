#include <iterator>

#include "cuda/launch.h"
#include "cuda/ops.h"

namespace mxep::cuda {
namespace {

// Makes a device current for the calling thread and gives the former one back.
class CurrentDevice {
 public:
  CurrentDevice(const char* op, int device) : wanted_(device) {
    check(op, cudaGetDevice(&before_));
    if (before_ != wanted_) check(op, cudaSetDevice(wanted_));
  }
  ~CurrentDevice() {
    if (before_ != wanted_) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;

 private:
  int wanted_, before_ = 0;
};

}  // namespace

void run_on(int device, const CudaOp& op, const Call& call, cudaStream_t stream) {
  const CurrentDevice current(op.name, device);
  op.run(call, stream);
}

std::span<const CudaOp> cuda_ops() {
  static constexpr CudaOp kOps[] = {
      // name, inputs, outputs, attrs, run, only
      {"quantize_col", 1, 2, 2, quantize_col},
      {"quantize_both", 1, 4, 2, quantize_both},
      {"quantize_both_fold", 2, 5, 3, quantize_both_fold},
      {"sort_by_expert", 1, 3, 1, sort_by_expert},
      {"swiglu_row", 3, 2, 2, swiglu_row},
      {"swiglu_col", 3, 2, 2, swiglu_col},
      {"swiglu_both", 3, 4, 2, swiglu_both},
      {"swiglu_bwd_row", 4, 5, 2, swiglu_bwd_row},
      {"swiglu_bwd_col", 4, 5, 2, swiglu_bwd_col},
      {"swiglu_bwd_both", 4, 9, 2, swiglu_bwd_both},
      {"grouped_mm_bf16", 3, 1, 0, grouped_mm_bf16, 900},
      {"grouped_wgrad_bf16", 3, 1, 0, grouped_wgrad_bf16, 900},
      {"grouped_wgrad_bf16_t", 3, 1, 0, grouped_wgrad_bf16_t, 900},
      {"grouped_mm_fold", 5, 1, 0, grouped_mm_fold, 900},
      {"grouped_mm_fold_bias", 6, 1, 0, grouped_mm_fold_bias, 900},
      {"grouped_wgrad_fold", 5, 1, 0, grouped_wgrad_fold, 900},
  };
  static_assert(std::size(kOps) == kNumCudaOps);
  return kOps;
}

std::span<const int> cuda_archs() {
  static constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  return kArchs;
}

}  // namespace mxep::cuda
