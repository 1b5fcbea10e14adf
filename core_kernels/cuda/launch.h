// Host-side helpers of a kernel launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "op.h"

namespace mxep::cuda {

// Throws std::runtime_error with the op's name and CUDA's message. Clears CUDA's last error, so that a later call of
// cudaGetLastError elsewhere does not report this one again.
inline void check(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(op) + ": CUDA: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                           ")");
}

// Launches `ctas` CTAs. cudaLaunchKernelEx returns the status of this launch alone; cudaGetLastError would also return,
// and clear, errors of other libraries.
template <typename... Params, typename... Args>
void launch_kernel(const char* op, void (*kernel)(Params...), unsigned ctas, unsigned threads, size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  const cudaLaunchConfig_t config{
      .gridDim = ctas, .blockDim = threads, .dynamicSmemBytes = shared_bytes, .stream = stream};
  check(op, cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Number of CTAs along x, the only grid axis that allows more than 65535.
inline unsigned grid_x(const char* op, int64_t blocks) {
  if (blocks > 0x7FFFFFFF) throw std::runtime_error(std::string(op) + ": the arrays need more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

// Number of multiprocessors of the current device: the CTAs of a persistent kernel with one CTA per multiprocessor.
inline unsigned multiprocessors(const char* op) {
  int device, count;
  check(op, cudaGetDevice(&device));
  check(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}

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

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace mxep::cuda
