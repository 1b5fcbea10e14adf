// MXFP8 arithmetic on one value: amax -> E8M0 byte, f32 -> E4M3, and back.
//
// core_kernels/quantize/oracle.py is the definition. No branch depends on data, so that loops over these vectorise.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/floats.h"
#include "cpu/simd.h"
#include "formats.h"

namespace mxep {

// Magnitudes order as their bits do, and NaN is above infinity: an integer maximum is an amax that propagates NaN.
// bf16 magnitudes are compared in 16 bits and widened once per block.
MXEP_INLINE uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }
MXEP_INLINE uint16_t magnitude(bf16 x) { return x & 0x7FFF; }
MXEP_INLINE uint32_t f32_bits(uint32_t magnitude) { return magnitude; }
MXEP_INLINE uint32_t f32_bits(uint16_t magnitude) { return static_cast<uint32_t>(magnitude) << 16; }

struct ScaleRule {
  int64_t rounding;
  bool satfinite;
};

// Scale byte of a block from the fp32 bits of its largest magnitude.
MXEP_INLINE uint32_t e8m0_from_amax(uint32_t amax, ScaleRule rule) {
  // RCEIL is ceil(log2(amax / 448)). 448 = 1.75 * 2^8, so the result is the exponent less 8, plus one when the mantissa
  // is above 1.75. For one value of amax the fp32 quotient is a subnormal that rounds down to 2^-127.
  const bool ceil = rule.rounding == kRceil;
  const uint32_t exponent = (amax + (ceil && amax != kQuotientRoundsDown ? 0x1FFFFFu : 0u)) >> 23;
  uint32_t byte = exponent < 8 ? 0 : exponent - 8;
  byte = amax >= kInf ? kE8m0Nan : byte;
  return rule.satfinite && amax == kInf ? kE8m0Max : byte;
}

// 2^(127 - byte): the factor that quantizes a block. Meaningless for byte 255.
MXEP_INLINE float inverse_scale(uint32_t byte) {
  return std::bit_cast<float>(byte == kE8m0Max ? kE8m0Smallest : (254u - byte) << 23);
}
// 2^(byte - 127). Meaningless for byte 255.
MXEP_INLINE float scale(uint32_t byte) { return std::bit_cast<float>(byte == 0 ? kE8m0Smallest : byte << 23); }

// Rounds to the nearest E4M3, ties to even, saturating; y is not NaN. Adding 2^20 times the binade moves the last bit
// that E4M3 keeps to fp32's last bit, so that the addition rounds. E4M3's subnormals have the spacing of its lowest
// binade, hence the maximum.
MXEP_INLINE uint32_t e4m3_from_f32(float y) {
  constexpr uint32_t kMinBinade = 121u << 23;  // 2^-6
  const uint32_t bits = std::bit_cast<uint32_t>(y);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t value_binade = magnitude & kInf;
  const uint32_t binade = value_binade < kMinBinade ? kMinBinade : value_binade;
  const uint32_t magic = binade + (20u << 23);
  const float rounded = std::bit_cast<float>(magnitude) + std::bit_cast<float>(magic);
  const uint32_t code = std::bit_cast<uint32_t>(rounded) - magic + ((binade - kMinBinade) >> 20);
  return (code < 0x7Eu ? code : 0x7Eu) | (bits >> 24 & 0x80u);
}

MXEP_INLINE float f32_from_e4m3(uint32_t q) {
  const uint32_t magnitude = q & 0x7Fu;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const float value = magnitude < 8 ? subnormal : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (q & 0x80u) << 24);
}

// e^-a of a >= 0 as 2^(-a log2 e); below 2^-126 it is 0.
MXEP_INLINE float exp_minus(float a) {
  const float scaled = a * -kLog2e;
  const float y = scaled > -127.0f ? scaled : -127.0f;
  const float m = y + kRoundToInteger;  // the low bits are the nearest integer plus 127
  const float f = y - (m - kRoundToInteger);
  float p = kExp2C5;
  p = __builtin_fmaf(p, f, kExp2C4);
  p = __builtin_fmaf(p, f, kExp2C3);
  p = __builtin_fmaf(p, f, kExp2C2);
  p = __builtin_fmaf(p, f, kExp2C1);
  p = __builtin_fmaf(p, f, 1.0f);
  return p * std::bit_cast<float>(std::bit_cast<uint32_t>(m) << 23);
}

// 1 / (1 + e^-g) through t = e^-|g|, which never overflows.
MXEP_INLINE float sigmoid(float g) {
  const float t = exp_minus(std::bit_cast<float>(magnitude(g)));
  const float r = 1.0f / (1.0f + t);
  return g < 0 ? t * r : r;
}

// A word whose lowest byte is the first in memory.
MXEP_INLINE uint32_t little_endian(uint32_t word) {
  return std::endian::native == std::endian::little ? word : __builtin_bswap32(word);
}

}  // namespace mxep
