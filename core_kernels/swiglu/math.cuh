// SwiGLU on one value: the fp32 operations of oracle.py, in the same order.
#pragma once

#include "cuda/mx_math.cuh"
#include "swiglu/activation.h"

namespace mxep::cuda {

// 1 / (1 + e^-g) through t = 2^(-|g| log2 e), which never overflows; t below 2^-126 is 0.
__device__ inline float sigmoid(float g) {
  const float y = fmaxf(__fmul_rn(fabsf(g), -kLog2e), -127.0f);
  const float m = __fadd_rn(y, kRoundToInteger), f = __fsub_rn(y, __fsub_rn(m, kRoundToInteger));
  float p = kExp2C5;
  p = __fmaf_rn(p, f, kExp2C4);
  p = __fmaf_rn(p, f, kExp2C3);
  p = __fmaf_rn(p, f, kExp2C2);
  p = __fmaf_rn(p, f, kExp2C1);
  p = __fmaf_rn(p, f, 1.0f);
  const float t = __fmul_rn(p, __uint_as_float(__float_as_uint(m) << 23));
  // The reciprocal of a number in [1, 2]: the steps of rcp.rn without its test for subnormals.
  const float s = __fadd_rn(1.0f, t);
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(s));
  const float r = __fmaf_rn(__fmaf_rn(-s, guess, 1.0f), guess, guess);
  return __fmul_rn(r, g < 0 ? t : 1.0f);
}

// A table of the sigmoid of every bf16 gate, a quarter of the instructions. The sigmoid is 1/2 for |alpha gate| up to
// 2^-25, and 0 or 1 from 88 on. Without PlainSwiGLU the gate is clamped and multiplied in the table too; alpha is in
// (2^(k-1), 2^k] and the table reaches from 2^(-25-k) to 88 * 2^(1-k).
template <typename By>
struct SigmoidTable {
  static constexpr int kOctave = 128, kFirst = 0x3300, kLast = 0x42B0;  // bits of 2^-25 and 88
  static constexpr int kEntries = kLast - kFirst + 1 + (By::kPlain ? 0 : kOctave);
  float of[kEntries][2];  // of gate and of -gate

  // The bits of the first gate.
  static __device__ uint32_t first(const By& by) {
    if constexpr (By::kPlain)
      return kFirst;
    else
      return kFirst - (((__float_as_uint(by.alpha) + 0x7FFFFF) >> 23) - 127) * kOctave;
  }
  __device__ void fill(const By& by) {
    for (int i = threadIdx.x; i < kEntries; i += blockDim.x) {
      const float g = __uint_as_float((first(by) + i) << 16);
      if constexpr (By::kPlain) {
        of[i][0] = sigmoid(g);
        of[i][1] = sigmoid(-g);
      } else {
        of[i][0] = sigmoid(__fmul_rn(fminf(g, by.limit), by.alpha));
        of[i][1] = sigmoid(__fmul_rn(-g, by.alpha));
      }
    }
  }
  __device__ void look_up(Bf16x2 g, const By& by, float& low, float& high) const {
    constexpr uint32_t kTwice = 0x10001, kSign = sizeof(float);
    static_assert(sizeof(of) <= 0x10000);  // an offset in bytes is half a word
    const uint32_t i =
        __viaddmin_s16x2_relu(g.magnitude().bits, kTwice * (0x10000 - first(by)), kTwice * (kEntries - 1));
    const uint32_t offsets = sizeof(of[0]) * i + (g.bits >> 13 & kTwice * kSign);
    const auto* bytes = reinterpret_cast<const uint8_t*>(of);
    low = *reinterpret_cast<const float*>(bytes + (offsets & 0xFFFF));
    high = *reinterpret_cast<const float*>(bytes + (offsets >> 16));
  }
};

// The values that h and the gradients share. A NaN passes the limit.
struct Gated {
  float silu, up;
};

template <typename By>
__device__ Gated gated(float g, float u, float sigmoid, const By& by) {
  if constexpr (By::kPlain) {
    return {__fmul_rn(g, sigmoid), u};
  } else {
    u = fabsf(u) > by.limit ? copysignf(by.limit, u) : u;
    return {__fmul_rn(g > by.limit ? by.limit : g, sigmoid), __fadd_rn(u, by.offset)};
  }
}

// Rounds to nearest even.
__device__ inline Bf16x2 round_to_bf16(float low, float high) {
  Bf16x2 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(high), "f"(low));
  return pair;
}

// h of a row's values. Vector: pairs `at`.
template <typename Vector, typename By>
__device__ Vector hidden(const Vector& gate, const Vector& up, const SigmoidTable<By>& table, const By& by,
                         float prob) {
  Vector h;
#pragma unroll
  for (int p = 0; p < static_cast<int>(sizeof(h.at) / sizeof(h.at[0])); ++p) {
    const Bf16x2 g = gate.at[p], u = up.at[p];
    float low, high;
    table.look_up(g, by, low, high);
    const Gated first = gated(g.low(), u.low(), low, by), second = gated(g.high(), u.high(), high, by);
    h.at[p] = round_to_bf16(__fmul_rn(__fmul_rn(first.silu, first.up), prob),
                            __fmul_rn(__fmul_rn(second.silu, second.up), prob));
  }
  return h;
}

}  // namespace mxep::cuda
