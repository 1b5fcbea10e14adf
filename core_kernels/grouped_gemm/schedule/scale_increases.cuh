// The increases of the scales of a K-grouped tile, from the warps that read the scales to those that multiply.
//
//   three warps, one per part --> ring of two --> every computing warp
//                                  |  full: all parts are written
//                                  |  empty: every computing warp has read it
#pragma once

#include "cuda/sm90.cuh"

namespace mxep::cuda::sm90 {

constexpr int kSpansPerEntry = 16;  // a group's first span has no earlier sums: entries begin with its second span

// One warp each: the rows of warpgroup 1, the rows of warpgroup 2, and the columns, which both have.
constexpr int kIncreaseParts = 3, kCommonPart = 2;

struct ScaleIncreases {
  uint32_t increased_spans[kIncreaseParts];            // a bit per span
  uint32_t increased[kIncreaseParts][kSpansPerEntry];  // a bit per four neighbours, set if one of them increases
  // 127 - increase, at least 0, of four neighbours in a word: of rows in order, of columns in the order of word_of.
  alignas(16) uint8_t power[kIncreaseParts][kSpansPerEntry][128];
};

// In shared memory. One lane of each warp arrives at a barrier.
struct IncreaseSlots {
  static constexpr int kSlots = 2;
  ScaleIncreases entries[kSlots];
  uint64_t full[kSlots], empty[kSlots];

  // Called by one thread, before the first barrier. readers: warps.
  __device__ void init(int readers) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], kIncreaseParts);
      barrier_init(&empty[i], readers);
    }
  }
};

// One side of the ring; called by whole warps.
class IncreaseQueue {
 public:
  __device__ explicit IncreaseQueue(IncreaseSlots& slots) : slots_(slots) {}

  __device__ ScaleIncreases& current() { return slots_.entries[at_]; }
  __device__ void wait_to_write() { barrier_wait(&slots_.empty[at_], parity_ ^ 1); }
  __device__ void wait_to_read() { barrier_wait(&slots_.full[at_], parity_); }
  __device__ void written() { arrive(slots_.full); }
  __device__ void read() { arrive(slots_.empty); }

 private:
  __device__ void arrive(uint64_t* barriers) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers[at_], cluster_rank());
    if (++at_ == IncreaseSlots::kSlots) at_ = 0, parity_ ^= 1;
  }

  IncreaseSlots& slots_;
  int at_ = 0;
  uint32_t parity_ = 0;
};

// A computing warp's side.
struct IncreaseReader : IncreaseQueue {
  using IncreaseQueue::IncreaseQueue;

  int next = 0;  // the token of the group at which it looks for increases
};

}  // namespace mxep::cuda::sm90
