// SwiGLU on one value: the fp32 operations of oracle.py, in the same order.
#pragma once

#include "cuda/mx_math.cuh"

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
  // The reciprocal of a number in [1, 2] with an exact residual: correctly rounded for every bf16 g.
  const float s = __fadd_rn(1.0f, t);
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(s));
  const float r = __fmaf_rn(__fmaf_rn(-s, guess, 1.0f), guess, guess);
  return __fmul_rn(r, g < 0 ? t : 1.0f);
}

// A table of the sigmoid of every bf16, a quarter of the instructions. The sigmoid is 1/2 for |g| up to 2^-25, and 0 or
// 1 from 88 on.
struct SigmoidTable {
  static constexpr int kFirst = 0x3300, kLast = 0x42B0;  // bits of 2^-25 and 88
  float of[kLast - kFirst + 1][2];                       // of g and of -g

  __device__ void fill() {
    for (int i = threadIdx.x; i <= kLast - kFirst; i += blockDim.x) {
      const float g = __uint_as_float(static_cast<uint32_t>(kFirst + i) << 16);
      of[i][0] = sigmoid(g);
      of[i][1] = sigmoid(-g);
    }
  }
  __device__ void look_up(Bf16x2 g, float& low, float& high) const {
    constexpr uint32_t kTwice = 0x10001;
    const uint32_t i =
        __viaddmin_s16x2_relu(g.magnitude().bits, kTwice * (0x10000 - kFirst), kTwice * (kLast - kFirst));
    const uint32_t place = 2 * i + (g.bits >> 15 & kTwice);
    low = of[0][place & 0xFFFF];
    high = of[0][place >> 16];
  }
};

// Rounds to nearest even.
__device__ inline Bf16x2 round_to_bf16(float low, float high) {
  Bf16x2 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair.bits) : "f"(high), "f"(low));
  return pair;
}

}  // namespace mxep::cuda
