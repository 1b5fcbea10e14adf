// A program (program.h) whose ranks are the devices of one process, for XLA.
//
//   rows, slots of each device --meeting--> addresses on every device | program | meeting     (cuda_run.cu)
//
// in: packed rows, home, place (2,), then inputs of any number. out: slots, numbers, then outputs of any number, the
// last one the buffer of the arrays with a place. attrs: `encode` of programs/program.py.
#pragma once

#include "peer/peers.h"

namespace mxep::cuda {

void program_of_peers(const Call& call, const Peers& peers, cudaStream_t stream);

inline constexpr PeerOp kProgramOp{"exchange_program", 0, 0, 0, program_of_peers};

}  // namespace mxep::cuda
