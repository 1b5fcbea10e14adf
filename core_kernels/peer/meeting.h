// Threads of one run that wait for each other and exchange a value.
//
//   meet(run, 3, a) --.
//   meet(run, 3, b) --+--> {a, b, c}, in any order, to each of the three
//   meet(run, 3, c) --'
//
// A run is any number that no other run has at the same time. Its threads meet as often as they like, each in the same
// order: a thread comes to the next meeting when it has left the one before, which was complete then. Nothing outlives
// the meetings under way.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mxep {

template <typename Value>
class Meetings {
 public:
  // Throws std::runtime_error in every thread that has waited for `limit`.
  std::vector<Value> meet(int64_t run, size_t threads, Value mine, std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Room>& open = open_[run];
    if (!open) open = std::make_shared<Room>();
    const std::shared_ptr<Room> room = open;
    room->values.push_back(std::move(mine));
    if (room->values.size() == threads) {
      open_.erase(run);
      room->complete = true;
      room->changed.notify_all();
      return room->values;
    }
    if (room->changed.wait_for(lock, limit, [&] { return room->complete; })) return room->values;
    // The first thread to give up closes the room: a late one opens another, and waits there.
    const auto still = open_.find(run);
    if (still != open_.end() && still->second == room) open_.erase(still);
    throw std::runtime_error("waited " + std::to_string(limit.count() / 1000) + " s for " +
                             std::to_string(threads - room->values.size()) + " of " + std::to_string(threads) +
                             " devices");
  }

 private:
  struct Room {
    std::vector<Value> values;
    bool complete = false;
    std::condition_variable changed;
  };
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<Room>> open_;
};

}  // namespace mxep
