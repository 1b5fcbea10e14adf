// Threads of a process, one per GPU, that launch the meetings of a group.
//
//   thread of GPU 0   launch meet | join --. .--> launch kernels | launch meet | join --. .--> next call
//   thread of GPU 1   launch meet | join ---X---> launch kernels | launch meet | join ---X---> next call
//
// A thread that allocates memory, or launches a kernel for the first time, may wait for all work of its GPU, with a
// lock of CUDA. If that work has a meeting, and another thread needs the lock before it can launch the same meeting,
// none goes on. A thread therefore does nothing more before all have launched their meeting. The GPUs are behind: they
// do not wait for threads that wait here.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace mxep {

class Threads {
 public:
  Threads(size_t devices, std::chrono::milliseconds limit) : devices_(devices), limit_(limit) {}

  // The nth call for a device returns when all devices have made n calls. Throws std::runtime_error after the limit.
  void join(int device) {
    if (devices_ < 2) return;
    std::unique_lock lock(mutex_);
    const uint64_t mine = ++calls_[device];
    const auto others = [&] {
      const auto behind = [&](const auto& of) { return of.second < mine; };
      return devices_ - calls_.size() + std::ranges::count_if(calls_, behind);
    };
    if (others() == 0)
      changed_.notify_all();
    else if (!changed_.wait_for(lock, limit_, [&] { return others() == 0; }))
      throw std::runtime_error("PeerMemory: waited " + std::to_string(limit_.count() / 1000) + " s for " +
                               std::to_string(others()) + " of " + std::to_string(devices_) +
                               " GPUs of this process; allowed: one program on all GPUs of the mesh");
  }

 private:
  const size_t devices_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, uint64_t> calls_;
};

}  // namespace mxep
