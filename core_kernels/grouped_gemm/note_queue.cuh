// Notes on a tile, from warps that read its scales to those that multiply, load or write its operands.
//
//   the warps that write a note --> ring of notes --> every warp that reads them
//                                    |  full: all of its parts are written
//                                    |  empty: every reader has it
#pragma once

#include "cuda/sm90.cuh"

namespace mxep::cuda::sm90 {

// In shared memory. Of each warp Note::kLanes lanes arrive at its barriers: one, or all 32. Where slots are reused,
// racecheck needs all: it reports hazards of the others. Note::kWriters warps write a note.
template <typename Note>
struct NoteSlots {
  static constexpr int kSlots = Note::kSlots;
  Note notes[kSlots];
  uint64_t full[kSlots], empty[kSlots];

  // Called by one thread, before the first barrier.
  __device__ void init(int warps) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], Note::kWriters * Note::kLanes);
      barrier_init(&empty[i], warps * Note::kLanes);
    }
  }
};

// One side of the ring; called by whole warps.
template <typename Note>
class NoteQueue {
 public:
  __device__ explicit NoteQueue(NoteSlots<Note>& slots) : slots_(slots) {}

  __device__ Note& current() { return slots_.notes[at_]; }
  __device__ void wait_to_write() { barrier_wait(&slots_.empty[at_], parity_ ^ 1); }
  __device__ void wait_to_read() { barrier_wait(&slots_.full[at_], parity_); }
  __device__ void written() { pass_on(slots_.full); }
  __device__ void read() { pass_on(slots_.empty); }

 private:
  __device__ void pass_on(uint64_t* barriers) {
    __syncwarp();
    if (threadIdx.x % 32 < Note::kLanes) barrier_arrive(&barriers[at_], cluster_rank());
    if (++at_ == NoteSlots<Note>::kSlots) at_ = 0, parity_ ^= 1;
  }

  NoteSlots<Note>& slots_;
  int at_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace mxep::cuda::sm90
