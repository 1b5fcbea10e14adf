// SwiGLU's gradient on 8 values of a row, and the launch helpers of both backward kernels. oracle.py defines the fp32
// operations and their order.
#pragma once

#include "cuda/launch.h"
#include "swiglu/math.cuh"
#include "swiglu/tile.cuh"

namespace mxep::cuda {

struct BackwardInputs {
  const bf16 *dh, *gate, *up;
  const float* prob;  // null: every row has probability 1, and there is no dprob

  static BackwardInputs of(const Call& call) {
    const Array& prob = call.in[3];
    return {call.in[0].as<const bf16>(), call.in[1].as<const bf16>(), call.in[2].as<const bf16>(),
            prob.dim(0) ? prob.as<const float>() : nullptr};
  }
};

// Whether there are no values to quantize. The dprob of rows without columns is zero.
inline bool finished_if_empty(const char* op, const Call& call, cudaStream_t stream) {
  const Array &gate = call.in[1], &dprob = call.out.back();
  if (gate.dim(0) && gate.dim(1)) return false;
  check(op, cudaMemsetAsync(dprob.data, 0, dprob.nbytes(), stream));
  return true;
}

// dprob in the kernels that write columns: a part for each block of 32 columns, every fourth of them added in order,
// and then these four sums. Which kernel runs depends on the shape; the bytes do not.
inline constexpr int kProbSlices = 4;

// Adds the contribution of these values to their row's dprob to `sum`. h: where the values of h go, or null.
template <typename By>
__device__ void backward(const Vector8& dh, const Vector8& gate, const Vector8& up, const SigmoidTable<By>& table,
                         const By& by, float prob, Vector8& dgate, Vector8& dup, float& sum, Vector8* h = nullptr) {
  const auto one = [&](float g, float u, float d, float sigmoid, float& new_gate, float& new_up, float& new_h) {
    const Gated of = gated(g, u, sigmoid, by);
    const float steep = By::kPlain ? of.silu : __fmul_rn(of.silu, by.alpha);
    const float slope = __fadd_rn(sigmoid, __fmul_rn(steep, __fsub_rn(1.0f, sigmoid)));
    const float product = __fmul_rn(of.silu, of.up);
    sum = __fmaf_rn(d, product, sum);
    new_h = __fmul_rn(product, prob);
    d = __fmul_rn(d, prob);
    new_up = __fmul_rn(d, of.silu);
    new_gate = __fmul_rn(__fmul_rn(d, of.up), slope);
    if constexpr (!By::kPlain) {  // a NaN is not outside of the limit
      new_up = fabsf(u) > by.limit ? 0.0f : new_up;
      new_gate = g > by.limit ? 0.0f : new_gate;
    }
  };
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const Bf16x2 g = gate.at[p], u = up.at[p], d = dh.at[p];
    float low, high, gates[2], ups[2], hs[2];
    table.look_up(g, by, low, high);
    one(g.low(), u.low(), d.low(), low, gates[0], ups[0], hs[0]);
    one(g.high(), u.high(), d.high(), high, gates[1], ups[1], hs[1]);
    if (h) h->at[p] = round_to_bf16(hs[0], hs[1]);
    dgate.at[p] = round_to_bf16(gates[0], gates[1]);
    dup.at[p] = round_to_bf16(ups[0], ups[1]);
  }
}

}  // namespace mxep::cuda
