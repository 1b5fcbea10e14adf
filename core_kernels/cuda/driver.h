// What the run time does not say and the driver does.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "cuda/launch.h"

namespace mxep::cuda {

// A function of the driver, found at run time: a module linked against libcuda could not be imported without a driver.
template <typename Function>
Function* driver_function(const char* op, const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(op, cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string(op) + ": CUDA: the driver has no " + name);
  return reinterpret_cast<Function*>(function);
}

// The context in which a stream's kernels run, as a number of 48 bits that no other context of the process has: of its
// number, which is never given twice, and its address, which differs from a green context to its device's own. 0 where
// there is none yet: the next call of the run time makes the device's own the current one.
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
  constexpr uint64_t kSpread = 0x9E3779B97F4A7C15u;  // odd: different numbers stay different
  return context ? (id * kSpread ^ reinterpret_cast<uintptr_t>(context)) & 0xFFFFFFFFFFFFu : 0;
}

// What is asked once in every context: the green contexts of a device have some of its multiprocessors each. Answers
// are from 1 to 65535.
class PerContext {
 public:
  template <typename Ask>
  int operator()(uint64_t context, const Ask& ask) {
    std::atomic<uint64_t>& known = known_[context % known_.size()];
    const uint64_t last = known.load(std::memory_order_relaxed);
    if (context && last >> 16 == context) return static_cast<int>(last & 0xFFFF);
    const int answer = ask();
    if (context) known.store(context << 16 | static_cast<uint64_t>(answer), std::memory_order_relaxed);
    return answer;
  }

 private:
  std::array<std::atomic<uint64_t>, 64> known_{};  // the context and the answer
};

// Before a launch with more than 48 KiB of dynamic shared memory the kernel has to say so, always with the same number.
template <auto kKernel>
void allow_shared_memory(const char* op, cudaStream_t stream, int bytes) {
  static PerContext said;
  if (bytes <= 48 * 1024) return;
  said(context_of(op, stream), [&] {
    check(op, cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return 1;
  });
}

}  // namespace mxep::cuda
