// Ops whose first input is distributed over the GPUs of a group.
//
//   rows (R, W) of rank 0, 1, ...      row r of rank q is row q R + r of the op
//
// A device's kernel reads the rows of the other ranks in their memory, over NVLink, and writes its own output. The
// result equals the op of the same name on the concatenated rows of all ranks. group/group.h has the ranks.
#pragma once

#include "cuda/ops.h"

namespace mxep::cuda {

constexpr int kMostPeers = 16;

// Arrays of one rank, at addresses of this process.
struct Peer {
  const char* rows;
  char *slots, *numbers;  // its first two outputs, which kernels of a program write (program_of_peers.h)
};

// of: in device memory, by rank. side: a stream for what a program overlaps.
struct Peers {
  const Peer* of;
  int count;
  cudaStream_t side;
};

// Launches on `stream` of the current device. in: the rows, the map, this rank (1,) int32, of a gather the number of
// rows (1,) int32 after which the map is -1 alone; out, attrs: of the op.
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

}  // namespace mxep::cuda
