// What every kernel's host side needs around its launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "op.h"

namespace mxep::cuda {

// Throws std::runtime_error that names the op and says what CUDA says. A refusal that is thrown is none that CUDA still
// has to tell somebody.
inline void check(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(op) + ": CUDA: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) +
                           ")");
}

// Starts `ctas` of a kernel. What CUDA says is said of this launch: cudaGetLastError would also tell what others left
// behind, and they would never hear of it.
template <typename... Params, typename... Args>
void launch_kernel(const char* op, void (*kernel)(Params...), unsigned ctas, unsigned threads, size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  const cudaLaunchConfig_t config{
      .gridDim = ctas, .blockDim = threads, .dynamicSmemBytes = shared_bytes, .stream = stream};
  check(op, cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Blocks along x, the only grid axis that holds more than 65535.
inline unsigned grid_x(const char* op, int64_t blocks) {
  if (blocks > 0x7FFFFFFF) throw std::runtime_error(std::string(op) + ": the arrays need more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

// Of the current device: CTAs of a kernel that walks over its work, one on each.
inline unsigned multiprocessors(const char* op) {
  int device, count;
  check(op, cudaGetDevice(&device));
  check(op, cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return static_cast<unsigned>(count);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace mxep::cuda
