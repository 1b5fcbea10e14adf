#include <map>
#include <mutex>

#include "cuda/launch.h"
#include "peer/exchange_ops.h"
#include "peer/program.h"

namespace mxep::cuda {
namespace {

const CudaOp* find(const std::string& name) {
  for (const std::span<const CudaOp> table : {std::span<const CudaOp>(kCudaOps), std::span<const CudaOp>(kExchangeOps)})
    for (const CudaOp& op : table)
      if (name == op.name) return &op;
  return nullptr;
}

void require(bool holds, const Step& step, const char* what) {
  if (!holds) throw std::invalid_argument("CudaProgram: step " + step.op + ": " + what + " do not match its op");
}

}  // namespace

struct Program::State {
  int device;
  std::vector<Step> steps;
  std::vector<const CudaOp*> ops;  // null for a mark
  std::map<int64_t, cudaEvent_t> marks;
  std::mutex mutex;
};

Program::Program(int device, size_t num_arrays, const std::vector<Step>& steps) : state_(std::make_unique<State>()) {
  state_->device = device;
  state_->steps = steps;
  for (const Step& step : steps) {
    const CudaOp* op = find(step.op);
    const bool marks = step.op == "record" || step.op == "wait";
    require(op || marks, step, "its name and the names of the table");
    require(step.inputs.size() == static_cast<size_t>(op ? op->num_inputs : 0), step, "inputs");
    require(step.outputs.size() == static_cast<size_t>(op ? op->num_outputs : 0), step, "outputs");
    require(step.attrs.size() == static_cast<size_t>(op ? op->num_attrs : 1), step, "attrs");
    for (const auto* numbers : {&step.inputs, &step.outputs})
      for (const int number : *numbers)
        require(number >= 0 && static_cast<size_t>(number) < num_arrays, step, "arrays");
    state_->ops.push_back(op);
    if (marks) state_->marks[step.attrs[0]] = nullptr;
  }
}

Program::~Program() {
  for (const auto& [number, event] : state_->marks)
    if (event) cudaEventDestroy(event);
}

void Program::run(std::span<const Array> arrays, cudaStream_t main, cudaStream_t side) {
  constexpr const char* kOp = "CudaProgram";
  const std::lock_guard lock(state_->mutex);
  const CurrentDevice current(kOp, state_->device);
  for (auto& [number, event] : state_->marks)
    if (!event) check(kOp, cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::vector<Array> in, out;
  for (size_t i = 0; i < state_->steps.size(); ++i) {
    const Step& step = state_->steps[i];
    const cudaStream_t stream = step.stream ? side : main;
    if (const CudaOp* op = state_->ops[i]) {
      in.clear(), out.clear();
      for (const int number : step.inputs) in.push_back(arrays[number]);
      for (const int number : step.outputs) out.push_back(arrays[number]);
      op->run({in, out, step.attrs, step.share}, stream);
    } else if (step.op == "record") {
      check(kOp, cudaEventRecord(state_->marks[step.attrs[0]], stream));
    } else {
      check(kOp, cudaStreamWaitEvent(stream, state_->marks[step.attrs[0]], 0));
    }
  }
}

}  // namespace mxep::cuda
