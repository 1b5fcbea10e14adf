// Functions of the CUDA driver that the runtime does not offer.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/launch.h"

namespace mxep::cuda {

// A driver function, looked up at run time: a module linked against libcuda cannot be imported on a machine without a
// driver.
template <typename Function>
Function* driver_function(const char* op, const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(op, cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string(op) + ": CUDA: the driver has no " + name);
  return reinterpret_cast<Function*>(function);
}

// The context in which the stream's kernels run, as a 48-bit number that is unique in the process. The number combines
// the context's id, which the driver never reuses, and its address, which tells a green context from the device's
// primary context. 0 where no context exists yet: the next runtime call makes the primary context current.
inline uint64_t context_of(const char* op, cudaStream_t stream) {
  static const auto current = driver_function<decltype(cuCtxGetCurrent)>(op, "cuCtxGetCurrent");
  static const auto of_stream = driver_function<decltype(cuStreamGetCtx)>(op, "cuStreamGetCtx");
  static const auto id_of = driver_function<decltype(cuCtxGetId)>(op, "cuCtxGetId");
  const bool special = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  CUcontext context;
  unsigned long long id = 0;
  CUresult status = special ? current(&context) : of_stream(stream, &context);
  if (status == CUDA_SUCCESS && context) status = id_of(context, &id);
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string(op) + ": CUDA: the driver does not know the context of the stream (error " +
                             std::to_string(status) + ")");
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15u;  // odd, so that the product is a bijection
  return context ? (id * kSpread ^ reinterpret_cast<uintptr_t>(context)) & 0xFFFFFFFFFFFFu : 0;
}

// Caches a value from 1 to 65535 per context: the green contexts of a device have different numbers of multiprocessors.
class PerContext {
 public:
  template <typename Query>
  int operator()(uint64_t context, const Query& query) {
    std::atomic<uint64_t>& slot = cached_[context % cached_.size()];
    const uint64_t last = slot.load(std::memory_order_relaxed);
    if (context && last >> 16 == context) return static_cast<int>(last & 0xFFFF);
    const int value = query();
    if (context) slot.store(context << 16 | static_cast<uint64_t>(value), std::memory_order_relaxed);
    return value;
  }

 private:
  std::array<std::atomic<uint64_t>, 64> cached_{};  // context and value in one word
};

// Raises the kernel's limit of dynamic shared memory, which CUDA requires above 48 KiB. `bytes` is the same in every
// call.
template <auto kKernel>
void allow_shared_memory(const char* op, cudaStream_t stream, int bytes) {
  static PerContext configured;
  if (bytes <= 48 * 1024) return;
  configured(context_of(op, stream), [&] {
    check(op, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return 1;
  });
}

}  // namespace mxep::cuda
