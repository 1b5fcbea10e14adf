// The C++ ABI of a kernel: dense arrays in, dense arrays out, integers beside them.
//
//   Python plan (core_kernels/*/plan.py) --- sizes outputs, checks arguments ---.
//                                                                          v
//   torch tensor --DLPack--.                                        one Op table entry
//                          +--> Array[] in, Array[] out, attrs[] -->  run(call)
//   XLA buffer  --FFI------'
//
// No torch, XLA or Python header is included here or in any kernel. fp8 data and scales are bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace mxep {

enum class DType { u8, i32, bf16, f32 };
constexpr int64_t itemsize(DType dtype) { return dtype == DType::u8 ? 1 : dtype == DType::bf16 ? 2 : 4; }

// A dense row-major array. The plan has checked shape and dtype before it gets here.
struct Array {
  void* data;
  std::span<const int64_t> shape;
  DType dtype;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t dim(int axis) const { return shape[axis < 0 ? shape.size() + axis : axis]; }
  // Product of the dims before the last `trailing` ones: rows of a matrix, matrices of a batch.
  int64_t leading(int trailing) const {
    int64_t n = 1;
    for (size_t i = 0; i + trailing < shape.size(); ++i) n *= shape[i];
    return n;
  }
  int64_t nbytes() const { return leading(0) * itemsize(dtype); }
};

// `attrs` are the options of the plan in the order of KernelOp.attrs.
struct Call {
  std::span<const Array> in;
  std::span<const Array> out;
  std::span<const int64_t> attrs;
};

// Writes every byte of every output. Throws std::invalid_argument when the data break the op's
// contract (a row map that points outside its input), before anything outside the outputs is touched.
using Run = void (*)(const Call&);

struct Op {
  const char* name;
  int num_inputs, num_outputs, num_attrs;
  Run run;
};

// What both bindings call to run an op.
void run_op(const Op& op, const Call& call);

// Known at compile time: the XLA binding makes one handler per entry.
inline constexpr size_t kNumCpuOps = 28;
std::span<const Op> cpu_ops();

}  // namespace mxep
