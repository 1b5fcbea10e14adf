// MXFP8 arithmetic on one value or one block: amax -> E8M0 byte, f32 -> E4M3, and back.
//
// numerics.md of the design is the contract. Everything is branch-free or decided once per block.
#pragma once

#include <bit>
#include <cstdint>

namespace mxep {

inline constexpr int kBlock = 32;
inline constexpr uint32_t kInf = 0x7F800000u;
inline constexpr uint8_t kE4m3Nan = 0x7F;
inline constexpr uint8_t kE8m0Nan = 255, kE8m0Max = 254;
enum Rounding : int64_t { kRceil = 0, kFloor = 1 };

using bf16 = uint16_t;

inline float to_f32(float x) { return x; }
inline float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Magnitudes order as their bits do, and a NaN lies above infinity: an integer max is an amax that
// propagates NaN.
inline uint32_t abs_bits(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }

// Scale byte of a block whose largest magnitude has these fp32 bits.
inline uint8_t e8m0_byte(uint32_t amax, int64_t rounding, bool satfinite) {
  if (amax >= kInf) return amax == kInf && satfinite ? kE8m0Max : kE8m0Nan;
  if (rounding == kFloor) {
    const int32_t byte = static_cast<int32_t>(amax >> 23) - 8;
    return byte < 0 ? 0 : byte;
  }
  // ceil(log2(amax / 448)): 448 = 1.75 * 2^8, so the exponent less 8, and one more when the mantissa
  // is above 1.75. In one place the fp32 quotient is a subnormal that rounds down to a power of two.
  constexpr uint32_t kQuotientRoundsDown = 0x04600001u;
  const int32_t byte = static_cast<int32_t>((amax + 0x1FFFFFu) >> 23) - 8;
  return byte < 0 || amax == kQuotientRoundsDown ? 0 : byte;
}

// 2^(127 - byte), by which a value is multiplied; 2^-127 is a subnormal.
inline float inverse_scale(uint8_t byte) {
  const uint32_t exponent = 254u - byte;
  return std::bit_cast<float>(exponent ? exponent << 23 : 0x00400000u);
}
// 2^(byte - 127).
inline float scale(uint8_t byte) {
  return std::bit_cast<float>(byte ? static_cast<uint32_t>(byte) << 23 : 0x00400000u);
}

// Round to nearest even E4M3, saturating; y is not NaN. The binade's last E4M3 bit is aligned with
// fp32's last bit by adding 2^20 times the binade, so the addition itself rounds, subnormals too.
inline uint8_t e4m3_from_f32(float y) {
  constexpr uint32_t kMinBinade = 121u << 23;  // 2^-6; below it the spacing stays 2^-9
  const uint32_t bits = std::bit_cast<uint32_t>(y);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t binade = magnitude & 0x7F800000u;
  binade = binade < kMinBinade ? kMinBinade : binade;
  const uint32_t magic = binade + (20u << 23);
  const float rounded = std::bit_cast<float>(magnitude) + std::bit_cast<float>(magic);
  const uint32_t code = std::bit_cast<uint32_t>(rounded) - magic + ((binade - kMinBinade) >> 20);
  return (code < 0x7Eu ? code : 0x7Eu) | (bits >> 24 & 0x80u);
}

inline float f32_from_e4m3(uint8_t q) {
  const uint32_t magnitude = q & 0x7Fu;
  const float normal = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  const float value = magnitude < 8 ? subnormal : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (q & 0x80u) << 24);
}

inline bf16 bf16_from_f32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > kInf) return 0x7FC0;
  return static_cast<bf16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace mxep
