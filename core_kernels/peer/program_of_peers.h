// A program (program.h) whose ranks are the GPUs of a group, for XLA.
//
//   rows, slots of each rank --meet--> addresses on every GPU | program | meet     (group/group.h)
//
// in: packed rows, home, this rank (1,), then inputs of any number. out: slots, numbers, then outputs of any number,
// the last one the buffer of the arrays with a place. attrs: `encode` of programs/program.py.
#pragma once

#include "peer/peers.h"

namespace mxep::cuda {

void program_of_peers(const Call& call, const Peers& peers, cudaStream_t stream);

inline constexpr PeerOp kProgramOp{"exchange_program", 0, 0, 0, program_of_peers};

}  // namespace mxep::cuda
