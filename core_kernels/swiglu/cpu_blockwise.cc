// SwiGLU's h, and its gradients, in blockwise FP8; see plan_blockwise.py. They are stored in bf16 in between.
#include <array>
#include <vector>

#include "cpu/ops.h"

namespace mxep {
namespace {

// A matrix in bf16 of the shape of gate.
struct Values {
  explicit Values(const Array& gate)
      : shape{gate.dim(0), gate.dim(1)}, data(static_cast<size_t>(shape[0] * shape[1])) {}
  Values(const Values&) = delete;

  Array array() { return {data.data(), shape, DType::bf16}; }
  void quantize(const Array& ends, std::span<const Array> out, std::span<const int64_t> attrs) {
    const std::array given{array(), ends};
    quantize_blockwise({given, out, attrs.first(1)});
  }

  std::array<int64_t, 2> shape;
  std::vector<uint16_t> data;
};

}  // namespace

void swiglu_blockwise(const Call& call) {
  Values h(call.in[0]);
  const std::array out{h.array()};
  swiglu({call.in, out, call.attrs});
  h.quantize(call.in[3], call.out, call.attrs);
}

void swiglu_blockwise_bwd(const Call& call) {
  Values dgate(call.in[1]), dup(call.in[1]);
  std::vector<float> dprob(static_cast<size_t>(call.in[3].dim(0)));
  const std::array out{dgate.array(), dup.array(), Array{dprob.data(), call.in[3].shape, DType::f32}};
  swiglu_bwd({call.in, out, call.attrs});
  dgate.quantize(call.in[4], call.out.first(2), call.attrs);
  dup.quantize(call.in[4], call.out.subspan(2), call.attrs);
}

}  // namespace mxep
