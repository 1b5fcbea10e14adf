// Constants of the formats for both C++ sides. A test compares them with core_kernels/formats.py.
#pragma once

#include <cstdint>

namespace mxep {

inline constexpr int kBlock = 32;  // values that share a scale
inline constexpr int kSpan = 256;  // tokens of a group that share a scale per row in a weight gradient's operand
// Values of a row that share an fp32 scale in blockwise FP8, and the fp32 bits of the smallest such scale, 2^-126.
inline constexpr int kSquare = 128;
inline constexpr uint32_t kSmallestScale = 0x00800000u;
// A group's first span gets a scale 2^kHeadroom times larger than it needs. A later span then seldom needs a larger
// scale, for which the GEMM would have to rescale its accumulator.
inline constexpr int kHeadroom = 3;

// A weight's row or column gets a scale 2^kWeightHeadroom times larger than its first span needs.
inline constexpr int kWeightHeadroom = 2;
// Likewise for the rows of SwiGLU's gradients.
inline constexpr int kGradientHeadroom = 2;

inline constexpr uint32_t kE4m3Nan = 0x7F;
inline constexpr uint32_t kE8m0Max = 254, kE8m0Nan = 255;

// fp32 bits of infinity, of the NaN that kernels write, and of 2^-127, the smallest E8M0 value and an fp32 subnormal.
inline constexpr uint32_t kInf = 0x7F800000u, kNan = 0x7FC00000u, kE8m0Smallest = 0x00400000u;
// fp32 bits of the one amax whose fp32 quotient by 448 rounds down to a power of two, 2^-127.
inline constexpr uint32_t kQuotientRoundsDown = 0x04600001u;

// How a block's amax becomes its scale; see Rounding in formats.py.
enum Rounding : int64_t { kRceil = 0, kFloor = 1 };

// 2^f = 1 + kExp2C1 f + ... + kExp2C5 f^5 on [-1/2, 1/2].
inline constexpr float kLog2e = 1.44269502f;
inline constexpr float kExp2C1 = 0.69314698f, kExp2C2 = 0.24022242f, kExp2C3 = 0.05550734f, kExp2C4 = 0.0096715f,
                       kExp2C5 = 0.00132647f;
// 1.5 * 2^23 + 127. Adding it to a value in [-127, 0] leaves the nearest integer plus 127 in the low bits.
inline constexpr float kRoundToInteger = 12583039.0f;

}  // namespace mxep
