// Steps of two streams that are launched by one call, between two meetings of the ranks.
//
//   programs/program.py: Step(op, stream, inputs, outputs, attrs, share) ... --> Program(steps), once
//                arrays, streams --> run: launches alone, so that a CUDA graph can capture it
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/ops.h"

namespace mxep::cuda {

// op: of kCudaOps or kExchangeOps, with arrays by their number in the program. Or "record", which marks the work of
// the stream so far, and "wait", after which the stream waits for that work: attrs[0] is the number of the mark.
struct Step {
  std::string op;
  int stream;  // 0 or 1
  std::vector<int> inputs, outputs;
  std::vector<int64_t> attrs;
  Share share;
};

class Program {
 public:
  // Throws std::invalid_argument for an unknown op, another number of arrays, or a number without an array.
  Program(int device, size_t num_arrays, const std::vector<Step>& steps);
  ~Program();
  Program(const Program&) = delete;

  // Throws std::runtime_error when CUDA refuses a launch. Threads take turns.
  void run(std::span<const Array> arrays, cudaStream_t main, cudaStream_t side);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mxep::cuda
