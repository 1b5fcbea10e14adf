// What the headers of the schedule use of CUDA, on a CPU. The threads of a CTA are contexts of one thread, which take
// turns where they wait for each other. AddressSanitizer does not support contexts.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <memory>

#define __device__
#define __forceinline__ inline
using std::max, std::min;
struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;
struct alignas(16) int4 {
  int x, y, z, w;
};
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }

class Cta {
 public:
  void run(int threads, std::function<void()> program) {
    threads_ = threads, program_ = std::move(program), all_ = {};
    for (int i = 0; i < threads; ++i) {
      ended_[i] = false, lanes_[i] = {};
      getcontext(&of_[i]);
      of_[i].uc_stack.ss_sp = &stacks_[i * kStack];
      of_[i].uc_stack.ss_size = kStack;
      makecontext(&of_[i], thread, 0);
    }
    threadIdx.x = 0;
    swapcontext(&host_, &of_[0]);
  }

  void meet_all() { meet(all_, 0, threads_); }

  // The values of the lanes of `mask`, by thread. A lane may call it again before the others have read theirs.
  const int* exchange(unsigned mask, int value) {
    const unsigned first = threadIdx.x / 32 * 32 + std::countr_zero(mask);
    Crowd& lanes = lanes_[first];
    int* values = values_[lanes.meetings % 2];
    values[threadIdx.x] = value;
    meet(lanes, first, std::popcount(mask));
    return values;
  }

  int any;

 private:
  static constexpr int kMost = 384, kStack = 1 << 16;
  struct Crowd {  // threads that wait for each other
    int arrived = 0, meetings = 0;
  };

  static void thread();

  // Returns when `size` threads from `first` on have called it.
  void meet(Crowd& crowd, unsigned first, int size) {
    const int meeting = crowd.meetings;
    if (++crowd.arrived == size) crowd.arrived = 0, ++crowd.meetings;
    while (crowd.meetings == meeting) {
      const unsigned before = threadIdx.x;
      do threadIdx.x = first + (threadIdx.x + 1 - first) % size;
      while (ended_[threadIdx.x]);
      swapcontext(&of_[before], &of_[threadIdx.x]);
    }
  }

  int threads_;
  std::function<void()> program_;
  ucontext_t host_, of_[kMost];
  std::unique_ptr<char[]> stacks_{new char[kMost * kStack]};
  bool ended_[kMost];
  Crowd all_, lanes_[kMost];  // lanes_: by the first of them
  int values_[2][kMost];
};
inline Cta cta;

inline void Cta::thread() {
  cta.program_();
  cta.ended_[threadIdx.x] = true;
  for (int next = 0; next < cta.threads_; ++next)
    if (!cta.ended_[next]) {
      threadIdx.x = next;
      setcontext(&cta.of_[next]);
    }
  setcontext(&cta.host_);
}

inline void __syncthreads() { cta.meet_all(); }
inline int __syncthreads_or(int vote) {
  __syncthreads();
  cta.any = 0;
  __syncthreads();
  cta.any |= vote;
  __syncthreads();
  return cta.any;
}
inline int __shfl_xor_sync(unsigned mask, int value, int lanes) {
  return cta.exchange(mask, value)[threadIdx.x ^ lanes];
}
inline int __shfl_sync(unsigned mask, int value, int lane) {
  return cta.exchange(mask, value)[threadIdx.x / 32 * 32 + lane];
}
inline int __shfl_up_sync(unsigned mask, int value, unsigned step) {
  return cta.exchange(mask, value)[threadIdx.x % 32 < step ? threadIdx.x : threadIdx.x - step];
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const int* votes = cta.exchange(mask, vote) + threadIdx.x / 32 * 32;
  unsigned all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= unsigned(mask >> lane & 1 && votes[lane]) << lane;
  return all;
}
