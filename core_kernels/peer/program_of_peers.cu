#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "peer/exchange_ops.h"
#include "peer/program.h"
#include "peer/program_of_peers.h"

namespace mxep::cuda {
namespace {

constexpr const char* kOp = "exchange_program";

// The numbers of `encode` in programs/program.py, one after the other.
class Numbers {
 public:
  explicit Numbers(std::span<const int64_t> all) : all_(all) {}
  int64_t next() {
    if (at_ == all_.size()) throw std::invalid_argument(std::string(kOp) + ": attrs: too few numbers");
    return all_[at_++];
  }
  template <typename T>
  std::vector<T> list() {
    std::vector<T> out(static_cast<size_t>(next()));
    for (T& value : out) value = static_cast<T>(next());
    return out;
  }

 private:
  std::span<const int64_t> all_;
  size_t at_ = 0;
};

struct Addresses {
  int64_t *rows, *slots, *numbers;  // of rank 0, 1, ...
};

__global__ void list_addresses(const __grid_constant__ Peers peers, Addresses out) {
  const int rank = threadIdx.x;
  if (rank >= peers.count) return;
  out.rows[rank] = reinterpret_cast<int64_t>(peers.of[rank].rows);
  out.slots[rank] = reinterpret_cast<int64_t>(peers.of[rank].slots);
  out.numbers[rank] = reinterpret_cast<int64_t>(peers.of[rank].numbers);
}

std::string name_of(int64_t number) {
  if (number < 0) return number == -1 ? "record" : "wait";
  constexpr int64_t kOps = std::size(kCudaOps);
  return number < kOps ? kCudaOps[number].name : kExchangeOps[number - kOps].name;
}

}  // namespace

void program_of_peers(const Call& call, const Peers& peers, cudaStream_t stream) {
  Numbers numbers(call.attrs);
  char* buffer = call.out.back().as<char>();
  std::vector<std::vector<int64_t>> shapes(static_cast<size_t>(numbers.next()));
  std::vector<Array> arrays;
  for (auto& shape : shapes) {
    const int64_t kind = numbers.next(), at = numbers.next();
    const auto dtype = static_cast<DType>(numbers.next());
    shape = numbers.list<int64_t>();
    void* data = kind == 0 ? call.in[at].data : kind == 1 ? call.out[at].data : buffer + at;
    arrays.push_back({data, shape, dtype});
  }
  Addresses addresses;
  for (int64_t** table : {&addresses.rows, &addresses.slots, &addresses.numbers})
    *table = arrays[numbers.next()].as<int64_t>();
  std::vector<Step> steps(static_cast<size_t>(numbers.next()));
  for (Step& step : steps) {
    step.op = name_of(numbers.next());
    step.stream = static_cast<int>(numbers.next());
    step.inputs = numbers.list<int>();
    step.outputs = numbers.list<int>();
    step.attrs = numbers.list<int64_t>();
    const auto share = numbers.list<int>();
    step.share = {share.at(0), share.at(1), share.at(2)};
  }
  int device;
  check(kOp, cudaGetDevice(&device));
  launch_kernel(kOp, list_addresses, 1, kMostPeers, 0, stream, peers, addresses);
  Program(device, arrays.size(), steps).run(arrays, stream, peers.side);
}

}  // namespace mxep::cuda
