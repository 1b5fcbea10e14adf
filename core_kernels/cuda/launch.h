// What every kernel's host side needs around its launch.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

#include "../op.h"

namespace mxep::cuda {

// Throws std::runtime_error that names the op and says what CUDA says.
inline void check(const char* op, cudaError_t status) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(op) + ": CUDA: " + cudaGetErrorString(status) + " (" +
                             cudaGetErrorName(status) + ")");
}

// After a launch. An error of an earlier kernel that had not been asked for yet shows here too.
inline void check_launch(const char* op) { check(op, cudaGetLastError()); }

// Blocks along x, the only grid axis that holds more than 65535.
inline unsigned grid_x(const char* op, int64_t blocks) {
  if (blocks > 0x7FFFFFFF) throw std::runtime_error(std::string(op) + ": the arrays need more than 2^31 - 1 blocks");
  return static_cast<unsigned>(blocks);
}

// Before a launch with more than 48 KiB of dynamic shared memory the kernel has to say so: once on every device, always
// with the same number.
template <auto kKernel>
void allow_shared_memory(const char* op, int bytes) {
  static std::array<std::atomic<bool>, 64> said{};
  if (bytes <= 48 * 1024) return;
  int device;
  check(op, cudaGetDevice(&device));
  std::atomic<bool>& here = said[device % said.size()];
  if (here) return;
  check(op, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  here = true;
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
