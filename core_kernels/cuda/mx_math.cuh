// MXFP8 arithmetic on the device: amax bits -> E8M0 byte -> factor, values -> E4M3 codes.
//
// core_kernels/quantize/oracle.py is the definition, cpu/mx_math.h has the same steps in plain C++. Values come in
// pairs of neighbouring columns: two bf16 share a register and most instructions.
#pragma once

#include <cstdint>

#include "formats.h"

namespace mxep::cuda {

// The options as integers: with bools the compiler would clone the whole kernel per option.
struct ScaleRule {
  uint32_t round_up;  // added to an amax, carries a mantissa above 1.75 into the exponent; 0 for FLOOR
  uint32_t infinite;  // byte of a block with an infinite amax

  ScaleRule(int64_t rounding, int64_t satfinite)
      : round_up(rounding == kRceil ? 0x1FFFFF : 0), infinite(satfinite ? kE8m0Max : kE8m0Nan) {}
};

// Scale byte of a block from the fp32 bits of its largest magnitude; see cpu/mx_math.h.
__device__ inline uint32_t e8m0_from_amax(uint32_t amax, ScaleRule rule) {
  const uint32_t exponent = (amax + (amax != kQuotientRoundsDown ? rule.round_up : 0)) >> 23;
  const uint32_t byte = max(exponent, 8u) - 8;
  return amax < kInf ? byte : amax == kInf ? rule.infinite : kE8m0Nan;
}

// fp32 bits of 2^(127 - byte), the factor that quantizes a block; NaN for byte 255.
__device__ inline uint32_t inverse_scale(uint32_t byte) {
  return byte < kE8m0Max ? (254u - byte) << 23 : byte == kE8m0Max ? kE8m0Smallest : kNan;
}

// Rounds to nearest even; +-448 beyond the range, NaN becomes 0x7F. `a` is the lowest byte.
__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// 2^exponent twice in f16, for `folded`, of an exponent from -127 to 15: rounded below 2^-24.
__device__ inline uint32_t f16x2_power(int exponent) {
  const float power = __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(both) : "f"(power));
  return both;
}

// Codes 2 * half and 2 * half + 1 of a word as f16. In the form of these statements a choice of a half is part of an
// operand; a shift or a permutation would be an instruction.
__device__ inline uint32_t f16x2_from_codes(uint32_t codes, int half) {
  uint32_t values;
  if (half)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(values) : "r"(codes));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(values) : "r"(codes));
  return values;
}

// Codes times a power of two, rounded once, to E4M3. A product above 2^-10 is an f16 number; a smaller product becomes
// zero however f16 rounds it.
__device__ inline uint32_t folded(uint32_t codes, uint32_t power) {
  uint32_t result;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 a, b;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 a, low;\n"
      "cvt.rn.f16x2.e4m3x2 b, high;\n"
      "mul.rn.f16x2 a, a, %2;\n"
      "mul.rn.f16x2 b, b, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, a;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, b;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(result)
      : "r"(codes), "r"(power));
  return result;
}
__device__ inline uint4 folded(uint4 codes, uint32_t power) {
  return make_uint4(folded(codes.x, power), folded(codes.y, power), folded(codes.z, power), folded(codes.w, power));
}

// Two neighbouring columns of a row. Lanes exchange row maxima in words of kRowsPerWord rows. A factor is a power of
// two that bf16 represents, so that scaling in bf16 rounds only values that E4M3 rounds to zero.
struct Bf16x2 {
  static constexpr int kRowsPerWord = 2;
  uint32_t bits;

  __device__ uint32_t low_bits() const { return bits << 16; }  // as fp32
  __device__ uint32_t high_bits() const { return bits & 0xFFFF0000u; }
  __device__ float low() const { return __uint_as_float(low_bits()); }
  __device__ float high() const { return __uint_as_float(high_bits()); }
  __device__ Bf16x2 magnitude() const { return {bits & 0x7FFF7FFFu}; }
  static __device__ Bf16x2 from_bits(uint32_t low, uint32_t high) { return {__byte_perm(low, high, 0x7632)}; }

  static __device__ uint32_t pack_word(const uint32_t (&rows)[2]) { return __byte_perm(rows[0], rows[1], 0x7632); }
  static __device__ uint32_t word_bits(uint32_t word, int row) { return (row ? word : word << 16) & 0x7FFF0000u; }
  static __device__ uint32_t max_words(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  // The same value for both columns: a row of a packed word, or fp32 bits, whose upper half is a bf16.
  static __device__ Bf16x2 of_row(uint32_t word, int row) { return {__byte_perm(word, 0, row ? 0x3232 : 0x1010)}; }
  static __device__ Bf16x2 both(uint32_t bits) { return of_row(bits, 1); }
};

struct F32x2 {
  static constexpr int kRowsPerWord = 1;
  float x, y;

  __device__ uint32_t low_bits() const { return __float_as_uint(x); }
  __device__ uint32_t high_bits() const { return __float_as_uint(y); }
  __device__ float low() const { return x; }
  __device__ float high() const { return y; }
  __device__ F32x2 magnitude() const { return from_bits(low_bits() & 0x7FFFFFFFu, high_bits() & 0x7FFFFFFFu); }
  static __device__ F32x2 from_bits(uint32_t low, uint32_t high) {
    return {__uint_as_float(low), __uint_as_float(high)};
  }

  static __device__ uint32_t pack_word(const uint32_t (&rows)[1]) { return rows[0]; }
  static __device__ uint32_t word_bits(uint32_t word, int) { return word & 0x7FFFFFFFu; }
  static __device__ uint32_t max_words(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
  }
  static __device__ F32x2 of_row(uint32_t word, int) { return both(word); }
  static __device__ F32x2 both(uint32_t bits) { return from_bits(bits, bits); }
};

using bf16 = uint16_t;
__device__ inline Bf16x2 pair_of(bf16 left, bf16 right) { return {left | static_cast<uint32_t>(right) << 16}; }
__device__ inline F32x2 pair_of(float left, float right) { return {left, right}; }

// The larger magnitudes, NaN if either is NaN, in one instruction. The signs of the result are arbitrary.
__device__ inline Bf16x2 max_magnitude(Bf16x2 a, Bf16x2 b) { return {Bf16x2::max_words(a.bits, b.bits)}; }
__device__ inline F32x2 max_magnitude(F32x2 a, F32x2 b) {
  return F32x2::from_bits(F32x2::max_words(a.low_bits(), b.low_bits()), F32x2::max_words(a.high_bits(), b.high_bits()));
}

// A word from the maxima of its rows' left and right columns.
__device__ inline uint32_t row_word(const Bf16x2 (&rows)[2]) {
  const uint32_t a = rows[0].bits, b = rows[1].bits;
  return Bf16x2::max_words(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}
__device__ inline uint32_t row_word(const F32x2 (&rows)[1]) {
  return F32x2::max_words(rows[0].low_bits(), rows[0].high_bits());
}

__device__ inline Bf16x2 operator*(Bf16x2 a, Bf16x2 b) {
  Bf16x2 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product.bits) : "r"(a.bits), "r"(b.bits));
  return product;
}
__device__ inline F32x2 operator*(F32x2 a, F32x2 b) { return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)}; }

}  // namespace mxep::cuda
