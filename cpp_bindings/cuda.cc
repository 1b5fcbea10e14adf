// The CUDA op table (core_kernels/cuda/ops.h), for torch and for XLA.
//
//   torch: Launch  --> CudaLaunch(exchange, device, name, inputs, outputs, attrs)     once per PreparedCall
//          tensors --> launch(inputs, outputs) ----.                                  every call
//                                                  +--> CudaOp.run(call, stream)
//   XLA:   buffers --> cuda_ffi_targets()[name] ---'
//
// And the table of ops whose rows are on the GPUs of a group (core_kernels/peer/peers.h), for XLA:
//
//          buffers --> peer_ffi_targets()[name] --> Group::run(number, op, call, stream)
//          addresses, MappedRegion --> PeerGroup(number, members, limit): the group of that number, while it lives
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "cuda/ops.h"
#include "exchange.h"
#include "ffi.h"
#include "find_op.h"
#include "peer/group/group.h"
#include "peer/group/regions.h"
#include "peer/peers.h"
#include "peer/program.h"
#include "peer/program_of_peers.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace mxep {
namespace {

using cuda::CudaOp;
using ArrayTypes = std::vector<std::pair<std::vector<int64_t>, std::string>>;  // shape, dtype name

DType dtype_of(const char* op, const std::string& name) {
  if (name == "uint8") return DType::u8;
  if (name == "int32") return DType::i32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float32") return DType::f32;
  throw nb::type_error(
      (std::string(op) + ": dtype: got " + name + "; allowed: uint8, int32, bfloat16 or float32").c_str());
}

void require_count(const CudaOp& op, const char* what, size_t got, size_t allowed) {
  if (got != allowed)
    throw std::invalid_argument(std::string(op.name) + ": " + what + ": got " + std::to_string(got) +
                                "; allowed: " + std::to_string(allowed));
}

void* address_of(const char* op, const Exchange& exchange, nb::handle array) {
  nb::dlpack::dltensor found;
  if (!exchange.read(array, &found))
    throw nb::type_error(
        (std::string(op) + ": arrays: got a " + nb::inst_name(array).c_str() + "; allowed: dense arrays").c_str());
  return static_cast<char*>(found.data) + found.byte_offset;
}

// A prepared launch: everything but the addresses of the arrays and the stream, which a call adds.
class CudaLaunch {
 public:
  CudaLaunch(const Exchange& exchange, int device, const std::string& name, ArrayTypes inputs, ArrayTypes outputs,
             std::vector<int64_t> attrs)
      : exchange_(exchange),
        device_(device),
        op_(find_op<CudaOp>(cuda::kCudaOps, "CudaLaunch", name)),
        types_(std::move(inputs)),
        num_inputs_(types_.size()),
        attrs_(std::move(attrs)) {
    require_count(op_, "inputs", num_inputs_, op_.num_inputs);
    require_count(op_, "outputs", outputs.size(), op_.num_outputs);
    require_count(op_, "attrs", attrs_.size(), op_.num_attrs);
    types_.insert(types_.end(), std::make_move_iterator(outputs.begin()), std::make_move_iterator(outputs.end()));
    require_count(op_, "arrays", types_.size(), std::min(types_.size(), kMostArrays));
    for (const auto& [shape, dtype] : types_) arrays_.push_back({nullptr, shape, dtype_of(op_.name, dtype)});
  }
  CudaLaunch(const CudaLaunch&) = delete;  // arrays_ points into types_

  void operator()(const nb::tuple& inputs, const nb::tuple& outputs) const {
    require_count(op_, "inputs", inputs.size(), num_inputs_);
    require_count(op_, "outputs", outputs.size(), arrays_.size() - num_inputs_);
    // A copy, since threads may launch at the same time.
    std::array<Array, kMostArrays> arrays;
    std::copy(arrays_.begin(), arrays_.end(), arrays.begin());
    Array* next = arrays.data();
    for (nb::handle array : inputs) next++->data = address(array);
    for (nb::handle array : outputs) next++->data = address(array);
    const std::span<const Array> all(arrays.data(), arrays_.size());
    const auto stream = static_cast<cudaStream_t>(exchange_.cuda_stream(device_));
    // A launch blocks while the stream's queue is full.
    nb::gil_scoped_release unlocked;
    cuda::run_on(device_, op_, {all.first(num_inputs_), all.subspan(num_inputs_), attrs_}, stream);
  }

 private:
  void* address(nb::handle array) const { return address_of(op_.name, exchange_, array); }

  static constexpr size_t kMostArrays = 17;
  const Exchange exchange_;
  const int device_;
  const CudaOp& op_;
  ArrayTypes types_;
  size_t num_inputs_;
  std::vector<int64_t> attrs_;
  std::vector<Array> arrays_;
};

using StepTuple = std::tuple<std::string, int, std::vector<int>, std::vector<int>, std::vector<int64_t>,
                             std::tuple<int, int, int>>;  // a cuda::Step

// A program and the types of its arrays; a call adds their addresses. places: the offset of each array in the buffer of
// a call, or -1 for an array that a call passes.
class CudaProgram {
 public:
  CudaProgram(const Exchange& exchange, int device, ArrayTypes types, std::vector<int64_t> places,
              const std::vector<StepTuple>& steps)
      : exchange_(exchange),
        device_(device),
        types_(std::move(types)),
        places_(std::move(places)),
        program_(device, types_.size(), of(steps)) {
    if (places_.size() != types_.size()) throw std::invalid_argument("CudaProgram: places do not match the types");
    for (const auto& [shape, dtype] : types_) arrays_.push_back({nullptr, shape, dtype_of("CudaProgram", dtype)});
  }
  CudaProgram(const CudaProgram&) = delete;  // arrays_ points into types_

  void operator()(const nb::tuple& passed, nb::handle buffer, intptr_t side) {
    if (std::cmp_not_equal(passed.size(), std::count(places_.begin(), places_.end(), -1)))
      throw std::invalid_argument("CudaProgram: passed arrays do not match the places");
    std::vector<Array> all(arrays_);
    char* base = static_cast<char*>(address_of("CudaProgram", exchange_, buffer));
    size_t next = 0;
    for (size_t i = 0; i < all.size(); ++i)
      all[i].data = places_[i] < 0 ? address_of("CudaProgram", exchange_, passed[next++]) : base + places_[i];
    const auto stream = static_cast<cudaStream_t>(exchange_.cuda_stream(device_));
    nb::gil_scoped_release unlocked;
    program_.run(all, stream, reinterpret_cast<cudaStream_t>(side));
  }

 private:
  static std::vector<cuda::Step> of(const std::vector<StepTuple>& steps) {
    std::vector<cuda::Step> out;
    for (const auto& [op, stream, inputs, outputs, attrs, share] : steps) {
      const auto [first, last, reserved] = share;
      out.push_back({op, stream, inputs, outputs, attrs, {first, last, reserved}});
    }
    return out;
  }

  const Exchange exchange_;
  const int device_;
  ArrayTypes types_;
  std::vector<int64_t> places_;
  std::vector<Array> arrays_;
  cuda::Program program_;
};

// XLA makes the device current. A handler only launches, so that a CUDA graph can capture it.
auto* bind(const CudaOp& op) {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("attrs")
      .To([&op](cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> attrs)
              -> ffi::Error { return call_op(op, args, rets, attrs, [&](const Call& c) { op.run(c, stream); }); },
          {ffi::Traits::kCmdBufferCompatible})
      .release();
}

template <size_t Index>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = bind(cuda::kCudaOps[Index]);
  return bound->Call(frame);
}

// group: the number of a PeerGroup. No CUDA graph captures it: the calls of a graph may run at the same time, and ranks
// meet in one order.
auto* bind(const cuda::PeerOp& op) {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("group")
      .To([&op](cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t group) -> ffi::Error {
        return call_op(op, args, rets, {}, [&](const Call& c) { cuda::Group::run(group, op, c, stream); });
      })
      .release();
}

// The same of a program.
auto* bind_program() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("attrs")
      .Attr<int64_t>("group")
      .To([](cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> attrs,
             int64_t group) -> ffi::Error {
        return call_any(args, rets, attrs,
                        [&](const Call& c) { cuda::Group::run(group, cuda::kProgramOp, c, stream); });
      })
      .release();
}

XLA_FFI_Error* program_handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = bind_program();
  return bound->Call(frame);
}

template <size_t Index>
XLA_FFI_Error* peer_handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = bind(cuda::kPeerOps[Index]);
  return bound->Call(frame);
}

template <size_t... Index>
nb::dict peer_targets(std::index_sequence<Index...>) {
  nb::dict out;
  ((out[cuda::kPeerOps[Index].name] = nb::capsule(reinterpret_cast<void*>(peer_handler<Index>))), ...);
  out[cuda::kProgramOp.name] = nb::capsule(reinterpret_cast<void*>(program_handler));
  return out;
}

template <size_t... Index>
nb::dict targets(std::index_sequence<Index...>) {
  nb::dict out;
  ((out[cuda::kCudaOps[Index].name] = nb::capsule(reinterpret_cast<void*>(handler<Index>))), ...);
  return out;
}

using MemberTuple = std::tuple<int, int, std::vector<int64_t>, std::vector<int64_t>, std::vector<int>,
                               std::pair<int64_t, int64_t>>;  // a cuda::Member

std::vector<cuda::Member> members_of(const std::vector<MemberTuple>& members) {
  std::vector<cuda::Member> out;
  for (const auto& [device, rank, pads, shifts, ordinals, memory] : members)
    out.push_back({device, rank, pads, shifts, ordinals, memory.first, memory.second});
  return out;
}

// The compute capabilities of the whole build, or of one op.
nb::tuple archs(int only) {
  nb::list out;
  for (const int arch : cuda::cuda_archs())
    if (!only || arch == only) out.append(nb::make_tuple(arch / 100, arch / 10 % 10));
  return nb::tuple(out);
}

nb::dict op_archs() {
  nb::dict out;
  for (const CudaOp& op : cuda::kCudaOps) out[op.name] = archs(op.only);
  return out;
}

}  // namespace

void bind_cuda(nb::module_& m) {
  using namespace nb::literals;
  m.attr("cuda_archs") = archs(0);
  m.attr("cuda_op_archs") = op_archs();
  m.def("cuda_ffi_targets", [] { return targets(std::make_index_sequence<std::size(cuda::kCudaOps)>()); });
  m.def("peer_ffi_targets", [] { return peer_targets(std::make_index_sequence<std::size(cuda::kPeerOps)>()); });
  m.attr("SIGNAL_PAD_BYTES") = cuda::kSignalPadBytes;
  m.attr("MOST_PEERS") = cuda::kMostPeers;
  m.def(
      "peer_region",
      [](int64_t address) {
        const cuda::Region found = cuda::region_of(address);
        return std::make_tuple(found.base, found.nbytes, found.descriptor);
      },
      "address"_a);
  nb::class_<cuda::MappedRegion>(m, "MappedRegion")
      .def(nb::init<int, int64_t, const std::vector<int>&>(), "descriptor"_a, "nbytes"_a, "devices"_a)
      .def_prop_ro("address", &cuda::MappedRegion::address);
  nb::class_<cuda::Group>(m, "PeerGroup")
      .def(
          "__init__",
          [](cuda::Group* self, int64_t number, const std::vector<MemberTuple>& members, int64_t limit_ms, nb::handle) {
            new (self) cuda::Group(number, members_of(members), std::chrono::milliseconds(limit_ms));
          },
          "number"_a, "members"_a, "limit_ms"_a, "memory"_a, nb::keep_alive<1, 5>())
      .def("test", &cuda::Group::test, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<CudaLaunch>(m, "CudaLaunch")
      .def(nb::init<const Exchange&, int, const std::string&, ArrayTypes, ArrayTypes, std::vector<int64_t>>(),
           "exchange"_a, "device"_a, "name"_a, "inputs"_a, "outputs"_a, "attrs"_a)
      .def("__call__", &CudaLaunch::operator(), "inputs"_a, "outputs"_a);
  nb::class_<CudaProgram>(m, "CudaProgram")
      .def(nb::init<const Exchange&, int, ArrayTypes, std::vector<int64_t>, const std::vector<StepTuple>&>(),
           "exchange"_a, "device"_a, "types"_a, "places"_a, "steps"_a)
      .def("__call__", &CudaProgram::operator(), "passed"_a, "buffer"_a, "side"_a);
}

}  // namespace mxep
