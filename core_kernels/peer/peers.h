// Ops whose first input is distributed over several GPUs of one process.
//
//   rows (R, W) of rank 0, 1, ...      row r of rank q is row q R + r of the op
//
// A device's kernel reads the rows of the other devices in their memory, over NVLink, and writes its own output. The
// result equals the op of the same name on the concatenated rows of all ranks.
#pragma once

#include "cuda/ops.h"

namespace mxep::cuda {

constexpr int kMostPeers = 16;

// The inputs of one device. place (2,) int32: the number of its group of ranks, and its rank there.
struct Peer {
  const void* rows;
  const int32_t* place;
  void *slots, *numbers;  // its first two outputs, which kernels of a program write (program_of_peers.h)
};

// All devices of the program; the devices of the own group are the ranks.
struct Peers {
  Peer of[kMostPeers];
  int count;
  const int32_t* place;  // of this device
};

// Launches on `stream` of the current device. in: the rows, the map, place, of a gather the number of rows (1,) int32
// after which the map is -1 alone; out, attrs: of the op.
struct PeerOp {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  void (*run)(const Call& call, const Peers& peers, cudaStream_t stream);
};

void permute_rows_of_peers(const Call& call, const Peers& peers, cudaStream_t stream);
void permute_mx_of_peers(const Call& call, const Peers& peers, cudaStream_t stream);
void combine_of_peers(const Call& call, const Peers& peers, cudaStream_t stream);

inline constexpr PeerOp kPeerOps[] = {
    {"permute_rows", 4, 1, 0, permute_rows_of_peers},
    {"permute_mx", 4, 2, 0, permute_mx_of_peers},
    {"combine", 3, 1, 0, combine_of_peers},
};

// Runs the op on the current device together with the `devices` devices of the run, each of which calls this from a
// thread of its own with its own stream. Kernels read a device's rows after the work before in its stream, and the work
// behind in its stream waits for them. Throws std::runtime_error on every device if one fails or does not come.
void run_with_peers(const PeerOp& op, const Call& call, int64_t run, int64_t devices, cudaStream_t stream);

}  // namespace mxep::cuda
