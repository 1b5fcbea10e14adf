// The C++ op table as XLA FFI handlers for JAX on a CPU.
//
//   XLA buffers --> ffi_targets()[name] --> run_op(Op, Call)
#include "ffi.h"

#include <nanobind/nanobind.h>

#include <iterator>

#include "bindings.h"
#include "cpu/ops.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace mxep {
namespace {

// One type for all entries: the decoding of a call is compiled once.
auto* bind(const Op& op) {
  return ffi::Ffi::Bind()
      .RemainingArgs()
      .RemainingRets()
      .Attr<ffi::Span<const int64_t>>("attrs")
      .To([&op](ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const int64_t> attrs) -> ffi::Error {
        return call_op(op, args, rets, attrs, [&](const Call& call) { run_op(op, call); });
      })
      .release();
}

// XLA's handler is a plain function pointer: one instantiation per table entry.
template <size_t Index>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = bind(kCpuOps[Index]);
  return bound->Call(frame);
}

template <size_t... Index>
nb::dict targets(std::index_sequence<Index...>) {
  nb::dict out;
  ((out[kCpuOps[Index].name] = nb::capsule(reinterpret_cast<void*>(handler<Index>))), ...);
  return out;
}

}  // namespace

void bind_ffi(nb::module_& m) {
  m.def("ffi_targets", [] { return targets(std::make_index_sequence<std::size(kCpuOps)>()); });
}

}  // namespace mxep
