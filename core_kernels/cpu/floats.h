// bf16 and fp32 values, and arrays of either.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/simd.h"
#include "formats.h"
#include "op.h"

namespace mxep {

using bf16 = uint16_t;

MXEP_INLINE float to_f32(float x) { return x; }
MXEP_INLINE float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Rounds to nearest even; any NaN becomes 0x7FC0.
MXEP_INLINE bf16 bf16_from_f32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<bf16>((bits & 0x7FFFFFFFu) > kInf ? 0x7FC0u : rounded);
}

MXEP_INLINE void store(float* out, float x) { *out = x; }
MXEP_INLINE void store(bf16* out, float x) { *out = bf16_from_f32(x); }

// Calls body with the array's data as bf16* or as float*.
template <typename Body>
void with_data(const Array& x, const Body& body) {
  if (x.dtype == DType::bf16)
    body(x.as<bf16>());
  else
    body(x.as<float>());
}

}  // namespace mxep
