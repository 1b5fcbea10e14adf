// Notes on scales of a tile, from three warps of the first warpgroup to the computing warps.
//
//   one warp per part: scales --> its part of a note --> ring of notes --> computing warps
//                                                         |  full: all three parts are written
//                                                         |  empty: all computing warps have read the note
#pragma once

#include "cuda/sm90.cuh"

namespace mxep::cuda::sm90 {

// One warp each: what a computing warpgroup has alone, rows of warpgroup 1 and of warpgroup 2; and what both have,
// columns. In flat tiles rows and columns are exchanged.
constexpr int kNoteParts = 3, kCommonPart = 2;

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
