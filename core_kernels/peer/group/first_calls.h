// Threads of a process, one per GPU, that run a call for the first time.
//
//   thread of GPU 0   launch meet | join --. .--> launch kernels | launch meet | join --. .--> next call
//   thread of GPU 1   launch meet | join ---X---> launch kernels | launch meet | join ---X---> next call
//
// CUDA loads a kernel at its first launch. It may then wait for all work of the GPU, with a lock that a thread needs
// whose meeting this work waits for. A thread therefore launches nothing more before all have launched their meeting.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace mxep {

class FirstCalls {
 public:
  FirstCalls(size_t devices, std::chrono::milliseconds limit) : devices_(devices), limit_(limit) {}

  // step: of the call. A device waits at its first time. Throws std::runtime_error after the limit.
  void join(int device, int64_t call, int step) {
    if (devices_ < 2) return;
    std::unique_lock lock(mutex_);
    if (!seen_.insert({device, call, step}).second) return;
    const size_t& count = ++count_[{call, step}];
    if (count == devices_) changed_.notify_all();
    if (!changed_.wait_for(lock, limit_, [&] { return count >= devices_; }))
      throw std::runtime_error("PeerMemory: waited " + std::to_string(limit_.count() / 1000) + " s for " +
                               std::to_string(devices_ - count) + " of " + std::to_string(devices_) +
                               " GPUs of this process; allowed: one program on all GPUs of the mesh");
  }

 private:
  const size_t devices_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::tuple<int, int64_t, int>> seen_;
  std::map<std::pair<int64_t, int>, size_t> count_;
};

}  // namespace mxep
