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

// `attrs` are the values of Signature.attrs in order; for CUDA, of Launch.cuda_attrs.
struct Call {
  std::span<const Array> in;
  std::span<const Array> out;
  std::span<const int64_t> attrs;
};

// Writes every byte of every output. Throws std::invalid_argument when the data break the op's contract, for example a
// row map that points outside its input; nothing outside the outputs is written before.
using Run = void (*)(const Call&);

struct Op {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  Run run;
};

}  // namespace mxep
