// The C++ op table (core_kernels/cpu/ops.h) as one function on DLPack arrays.
//
//   torch tensors --DLPack--> run(name, inputs, outputs, attrs) --> run_op(Op, Call)
//
// Callers ask KernelOp.check first, which checks shapes and sizes the outputs. This function checks the device, the
// layout and the number of arrays alone; a call with other sizes reads and writes out of bounds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "find_op.h"

namespace nb = nanobind;

namespace mxep {
namespace {

using AnyInput = nb::ndarray<nb::ro>;
using AnyOutput = nb::ndarray<>;

DType dtype_of(const std::string& who, nb::dlpack::dtype t) {
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return t.code == static_cast<uint8_t>(code) && t.bits == bits && t.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::UInt, 8)) return DType::u8;
  if (is(nb::dlpack::dtype_code::Int, 32)) return DType::i32;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return DType::bf16;
  if (is(nb::dlpack::dtype_code::Float, 32)) return DType::f32;
  throw nb::type_error((who + ": dtype: allowed: uint8, int32, bfloat16 or float32").c_str());
}

template <typename A>
Array array_of(const std::string& who, const A& a) {
  if (a.device_type() != nb::device::cpu::value)
    throw std::invalid_argument(who + ": device: got another than the CPU; move the array to the CPU");
  int64_t expected = 1;
  for (int axis = static_cast<int>(a.ndim()) - 1; axis >= 0; --axis) {
    if (a.size() && a.shape(axis) != 1 && a.stride(axis) != expected)
      throw std::invalid_argument(who + ": layout: got a strided array; make it contiguous");
    expected *= a.shape(axis);
  }
  return {const_cast<void*>(static_cast<const void*>(a.data())), {a.shape_ptr(), a.ndim()}, dtype_of(who, a.dtype())};
}

template <typename A>
std::vector<Array> arrays_of(const Op& op, const char* kind, const std::vector<A>& arrays, int expected) {
  if (arrays.size() != static_cast<size_t>(expected))
    throw std::invalid_argument(std::string(op.name) + ": " + kind + "s: got " + std::to_string(arrays.size()) +
                                " arrays; allowed: " + std::to_string(expected));
  std::vector<Array> out;
  for (size_t i = 0; i < arrays.size(); ++i)
    out.push_back(array_of(std::string(op.name) + ": " + kind + " " + std::to_string(i), arrays[i]));
  return out;
}

void run(std::string_view name, const std::vector<AnyInput>& inputs, const std::vector<AnyOutput>& outputs,
         const std::vector<int64_t>& attrs, std::optional<int> threads) {
  const Op& op = find_op<Op>(kCpuOps, "run", name);
  if (threads && *threads < 1)
    throw std::invalid_argument("run: num_threads: got " + std::to_string(*threads) + "; allowed: at least 1");
  const auto in = arrays_of(op, "input", inputs, op.num_inputs);
  const auto out = arrays_of(op, "output", outputs, op.num_outputs);
  if (attrs.size() != static_cast<size_t>(op.num_attrs))
    throw std::invalid_argument(std::string(op.name) + ": attrs: got " + std::to_string(attrs.size()) +
                                "; allowed: " + std::to_string(op.num_attrs));
  nb::gil_scoped_release unlocked;
  const Threads at_most(threads.value_or(0));
  run_op(op, {in, out, attrs});
}

}  // namespace

void bind_cpu(nb::module_& m) {
  using namespace nb::literals;
  m.def("run", &run, "name"_a, "inputs"_a, "outputs"_a, "attrs"_a, "num_threads"_a = nb::none());
  m.def("num_threads", &num_threads);
}

}  // namespace mxep
