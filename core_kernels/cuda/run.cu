#include "cuda/launch.h"
#include "cuda/ops.h"

namespace mxep::cuda {

void run_on(int device, const CudaOp& op, const Call& call, cudaStream_t stream) {
  const CurrentDevice current(op.name, device);
  op.run(call, stream);
}

std::span<const int> cuda_archs() {
  static constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  return kArchs;
}

}  // namespace mxep::cuda
