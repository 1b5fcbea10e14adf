// The op table of core_kernels/op.h, exposed twice.
//
//   torch tensors --DLPack--> run(name, inputs, outputs, attrs) --.
//                                                                 +--> run_op(Op, Call)
//   XLA buffers ----FFI-----> ffi_targets()[name] ----------------'
//
// Callers plan first: the plan checks shapes and sizes outputs. Here only device, layout and the number of
// arrays are checked again; a call with other sizes than the plan's reads and writes out of bounds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "op.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace mxep {
namespace {

// ---- DLPack

using AnyInput = nb::ndarray<nb::ro>;
using AnyOutput = nb::ndarray<>;

const Op& find_op(std::string_view name) {
  std::string known;
  for (const Op& op : cpu_ops()) {
    if (name == op.name) return op;
    known += std::string(known.empty() ? "" : ", ") + op.name;
  }
  throw std::invalid_argument("run: name: got '" + std::string(name) + "'; allowed: " + known);
}

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
         const std::vector<int64_t>& attrs) {
  const Op& op = find_op(name);
  const auto in = arrays_of(op, "input", inputs, op.num_inputs);
  const auto out = arrays_of(op, "output", outputs, op.num_outputs);
  if (attrs.size() != static_cast<size_t>(op.num_attrs))
    throw std::invalid_argument(std::string(op.name) + ": attrs: got " + std::to_string(attrs.size()) +
                                "; allowed: " + std::to_string(op.num_attrs));
  nb::gil_scoped_release unlocked;
  run_op(op, {in, out, attrs});
}

// ---- XLA FFI

bool array_of(const ffi::AnyBuffer& buffer, Array* array) {
  const auto dims = buffer.dimensions();
  array->data = buffer.untyped_data();
  array->shape = {dims.begin(), dims.size()};
  switch (buffer.element_type()) {
    case ffi::DataType::U8:
      array->dtype = DType::u8;
      return true;
    case ffi::DataType::S32:
      array->dtype = DType::i32;
      return true;
    case ffi::DataType::BF16:
      array->dtype = DType::bf16;
      return true;
    case ffi::DataType::F32:
      array->dtype = DType::f32;
      return true;
    default:
      return false;
  }
}

ffi::Error call_op(const Op& op, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> attrs) {
  const auto mismatch = [&](const char* what) {
    return ffi::Error::InvalidArgument(std::string(op.name) + ": " + what + " do not match the op table");
  };
  if (args.size() != static_cast<size_t>(op.num_inputs)) return mismatch("inputs");
  if (rets.size() != static_cast<size_t>(op.num_outputs)) return mismatch("outputs");
  if (attrs.size() != static_cast<size_t>(op.num_attrs)) return mismatch("attrs");
  std::vector<Array> in(args.size()), out(rets.size());
  for (size_t i = 0; i < in.size(); ++i)
    if (!array_of(*args.get<ffi::AnyBuffer>(i), &in[i])) return mismatch("input dtypes");
  for (size_t i = 0; i < out.size(); ++i)
    if (!array_of(**rets.get<ffi::AnyBuffer>(i), &out[i])) return mismatch("output dtypes");
  try {
    run_op(op, {in, out, {attrs.begin(), attrs.size()}});
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// XLA's handler is a plain function pointer: one instantiation per table entry.
template <size_t Index>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound =
      ffi::Ffi::Bind()
          .RemainingArgs()
          .RemainingRets()
          .Attr<ffi::Span<const int64_t>>("attrs")
          .To([](ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> attrs) -> ffi::Error {
            return call_op(cpu_ops()[Index], args, rets, attrs);
          })
          .release();
  return bound->Call(frame);
}

template <size_t... Index>
nb::dict targets(std::index_sequence<Index...>) {
  nb::dict out;
  ((out[cpu_ops()[Index].name] = nb::capsule(reinterpret_cast<void*>(handler<Index>))), ...);
  return out;
}

void set_threads(int n) {
  if (n < 1) throw std::invalid_argument("set_num_threads: n: got " + std::to_string(n) + "; allowed: at least 1");
  set_num_threads(n);
}

}  // namespace
}  // namespace mxep

NB_MODULE(_ops, m) {
  using namespace nb::literals;
  m.def("run", &mxep::run, "name"_a, "inputs"_a, "outputs"_a, "attrs"_a);
  m.def("ffi_targets", [] { return mxep::targets(std::make_index_sequence<mxep::kNumCpuOps>()); });
  m.def("num_threads", &mxep::num_threads);
  m.def("set_num_threads", &mxep::set_threads, "n"_a);
}
