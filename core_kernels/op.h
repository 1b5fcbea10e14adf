// The C++ interface of a kernel: dense arrays in, dense arrays out, integer options.
//
//   Python plan (core_kernels/*/plan.py): argument checks, output shapes ---.
//                                                                          v
//   torch tensor --DLPack--.                                        one Op table entry
//                          +--> Array[] in, Array[] out, attrs[] -->  run(call)
//   XLA buffer  --FFI------'
//
// Neither this header nor any kernel includes a header of torch, XLA or Python. FP8 data and scales are bytes.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <span>

namespace mxep {

enum class DType { u8, i32, bf16, f32 };
constexpr int64_t itemsize(DType dtype) { return dtype == DType::u8 ? 1 : dtype == DType::bf16 ? 2 : 4; }

// A dense row-major array. KernelOp.check has checked its shape and dtype.
struct Array {
  void* data;
  std::span<const int64_t> shape;
  DType dtype;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t dim(int axis) const { return shape[axis < 0 ? shape.size() + axis : axis]; }
  // Number of elements in the leading dims: all dims but the last `trailing`.
  int64_t leading(int trailing) const {
    int64_t n = 1;
    for (size_t i = 0; i + trailing < shape.size(); ++i) n *= shape[i];
    return n;
  }
  int64_t nbytes() const { return leading(0) * itemsize(dtype); }
};

// Of an M-grouped op on a GPU: the groups of the call that a launch computes, and the multiprocessors that it leaves to
// other kernels. The rows of other groups are neither read nor written.
struct Share {
  int first = 0, last = INT_MAX;
  int reserved = 0;  // even
};

// `attrs` are the values of Signature.attrs in order; for CUDA, of Launch.cuda_attrs.
struct Call {
  std::span<const Array> in;
  std::span<const Array> out;
  std::span<const int64_t> attrs;
  Share share = {};
};

// Writes every byte of every output, but for what the op's documentation leaves unspecified. Throws
// std::invalid_argument when the data break the op's contract, for example a row map that points outside its input;
// nothing outside the outputs is written before.
using Run = void (*)(const Call&);

// The rows up to the last of the group ends, at most `rows`. The ends follow `arguments` inputs; all rows without ends.
inline int64_t rows_with_ends(const Call& call, size_t arguments, int64_t rows) {
  const int64_t groups = call.in.size() > arguments ? call.in[arguments].dim(0) : 0;
  if (groups == 0) return rows;
  const int64_t end = call.in[arguments].as<const int32_t>()[groups - 1];
  return end < 0 ? 0 : end < rows ? end : rows;
}

struct Op {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  Run run;
};

}  // namespace mxep
