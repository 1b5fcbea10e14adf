// The GPUs of a group, of one process or of several, and the barrier of their streams.
//
//   stream of rank 0   work | meet --. .--> kernels read and write memory of all ranks | meet --. .--> work
//   stream of rank 1   work | meet ---X---> kernels read and write memory of all ranks | meet ---X---> work
//                             addresses                                                  nothing
//
// `meet` is a kernel of one warp: it tells every rank the addresses of this rank's arrays, signals it, and waits for
// its signal, with release and acquire of system scope. The host waits for no GPU, but a thread waits until the
// other threads of its process have launched the same meeting (threads.h). The ranks call the same ops in one order; a
// kernel compares the calls. After `limit` without a rank the kernel prints a sentence and ends with an error.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "peer/peers.h"

namespace mxep::cuda {

constexpr int64_t kSignalPadBytes = 4096;  // memory of a GPU for the barrier: zeros when the group is made

// A GPU of this process. pads: the address of each rank's signal pad. shifts: what this process adds to an address
// of that rank's process. processes: the ordinals of the ranks' GPUs here, or -1 in another process. begin, nbytes:
// memory that all ranks map; 0 bytes: all memory of the GPU.
struct Member {
  int device, rank;
  std::vector<int64_t> pads, shifts;
  std::vector<int> ordinals;
  int64_t begin, nbytes;
};

class Group {
 public:
  // number: by which calls find the group, while it lives. Throws std::invalid_argument or std::runtime_error.
  Group(int64_t number, const std::vector<Member>& members, std::chrono::milliseconds limit);
  ~Group();
  Group(const Group&) = delete;

  // One meeting of all ranks, for which the host waits: every process calls it.
  void test();

  // Runs the op on the current device, while the other ranks run it on theirs: kernels read a rank's rows after the
  // work before in its stream, and the work behind in its stream waits for them.
  static void run(int64_t number, const PeerOp& op, const Call& call, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mxep::cuda
