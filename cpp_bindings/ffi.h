// Conversion of XLA buffers to a kernel's `Call`, shared by the handlers of both tables.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "op.h"
#include "xla/ffi/api/ffi.h"

namespace mxep {

inline bool array_of(const xla::ffi::AnyBuffer& buffer, Array* array) {
  const auto dims = buffer.dimensions();
  array->data = buffer.untyped_data();
  array->shape = {dims.begin(), dims.size()};
  switch (buffer.element_type()) {
    case xla::ffi::DataType::U8:
      array->dtype = DType::u8;
      return true;
    case xla::ffi::DataType::S32:
      array->dtype = DType::i32;
      return true;
    case xla::ffi::DataType::BF16:
      array->dtype = DType::bf16;
      return true;
    case xla::ffi::DataType::F32:
      array->dtype = DType::f32;
      return true;
    default:
      return false;
  }
}

// `run(call)` runs an op of any number of arrays.
template <typename Run>
xla::ffi::Error call_any(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                         xla::ffi::Span<const int64_t> attrs, Run run) {
  using xla::ffi::AnyBuffer;
  using xla::ffi::Error;
  std::vector<Array> in(args.size()), out(rets.size());
  for (size_t i = 0; i < in.size(); ++i)
    if (!array_of(*args.get<AnyBuffer>(i), &in[i]))
      return Error::InvalidArgument("an input has another dtype than kernels take");
  for (size_t i = 0; i < out.size(); ++i)
    if (!array_of(**rets.get<AnyBuffer>(i), &out[i]))
      return Error::InvalidArgument("an output has another dtype than kernels take");
  try {
    run(Call{in, out, {attrs.begin(), attrs.size()}});
  } catch (const std::invalid_argument& error) {
    return Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return Error::Internal(error.what());
  }
  return Error::Success();
}

// `op` is an entry of either table; `run(call)` runs it.
template <typename Entry, typename Run>
xla::ffi::Error call_op(const Entry& op, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                        xla::ffi::Span<const int64_t> attrs, Run run) {
  using xla::ffi::AnyBuffer;
  using xla::ffi::Error;
  const auto mismatch = [&](const char* what) {
    return Error::InvalidArgument(std::string(op.name) + ": " + what + " do not match the op table");
  };
  if (args.size() != static_cast<size_t>(op.num_inputs)) return mismatch("inputs");
  if (rets.size() != static_cast<size_t>(op.num_outputs)) return mismatch("outputs");
  if (attrs.size() != static_cast<size_t>(op.num_attrs)) return mismatch("attrs");
  return call_any(args, rets, attrs, run);
}

}  // namespace mxep
