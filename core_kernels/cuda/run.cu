#include "cuda/launch.h"
#include "cuda/ops.h"

namespace mxep::cuda {
namespace {

// Makes a device current for the calling thread and restores the previous one.
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

std::span<const int> cuda_archs() {
  static constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  return kArchs;
}

}  // namespace mxep::cuda
