// One scale per row, or per row and span of tokens: q under its block's scale -> RTNE(q * 2^(sf - row)). Shared by the
// ops that fold.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

#include "cpu/mx_math.h"
#include "op.h"
#include "quantize/cpu.h"
#include "spans.h"

namespace mxep {

// The largest of the row's scale bytes so far, -1 for none: a NaN block has no say.
MXEP_INLINE int larger_scale(int row, uint8_t byte) { return byte == kE8m0Nan ? row : std::max<int>(row, byte); }
MXEP_INLINE int row_scale(const uint8_t* sf, int64_t blocks) {
  int row = -1;
  for (int64_t b = 0; b < blocks; ++b) row = larger_scale(row, sf[b]);
  return row;
}
MXEP_INLINE uint8_t row_scale_byte(int row) { return static_cast<uint8_t>(row < 0 ? kE8m0Nan : row); }

// Group `g` of tokens and the slots of its spans' scales, as plan.py draws them. Past the last end, at
// g = ends.size(), come tokens without a group and slots without a span.
struct SpannedGroup {
  int64_t begin, end, slot, end_slot;

  static SpannedGroup of(std::span<const int32_t> ends, size_t g, int64_t m) {
    const int64_t index = static_cast<int64_t>(g), begin = g ? ends[g - 1] : 0, slot = begin / kSpan + index;
    if (g == ends.size()) return {begin, m, slot, m / kSpan + index};
    return {begin, ends[g], slot, ends[g] / kSpan + index + 1};
  }
};

// One more than the largest scale byte of a row and group so far, 0 for none: with that of another span's blocks. The
// group's first span gets some octaves of headroom, so that those after it seldom raise the scale.
MXEP_INLINE int larger_span(int largest, bool first, const uint8_t* sf, int64_t blocks) {
  const int here = row_scale(sf, blocks) + 1;
  return std::max(largest, first && here > 0 ? std::min<int>(here + kHeadroom, kE8m0Nan) : here);
}
MXEP_INLINE uint8_t span_scale_byte(int largest) { return static_cast<uint8_t>(std::max(largest - 1, 0)); }

// The ends of groups of whole blocks among m tokens. Throws std::invalid_argument for others.
inline std::span<const int32_t> block_ends(const char* op, const Array& group_ends, int64_t m) {
  const std::span<const int32_t> ends(group_ends.as<const int32_t>(), static_cast<size_t>(group_ends.dim(0)));
  for (size_t g = 0; g < ends.size(); ++g)
    if (ends[g] < (g ? ends[g - 1] : 0) || ends[g] > m || ends[g] % kBlock)
      throw std::invalid_argument(std::string(op) + ": group_ends: got " + std::to_string(ends[g]) + " at index " +
                                  std::to_string(g) + "; allowed: non-decreasing multiples of 32 from 0 up to " +
                                  std::to_string(m));
  return ends;
}

// `out` may be `q`. The factors of 16 blocks are spread out first, so that their values are one long loop.
MXEP_INLINE void fold_blocks(const uint8_t* q, const uint8_t* sf, int row, uint8_t* out, int64_t blocks) {
  constexpr int kGroup = 16;
  alignas(64) float factor[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup, q += kGroup * kBlock, out += kGroup * kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    for (int b = 0; b < count; ++b) {
      // 448 * 2^-32 rounds to zero, and 2^-254 is no fp32 number.
      const int shift = std::clamp(sf[first + b] - row, -32, 0);
      std::fill_n(factor + b * kBlock, kBlock, scale(static_cast<uint32_t>(127 + shift)));
    }
    for (int i = 0; i < count * kBlock; ++i) {
      const uint32_t folded = e4m3_from_f32(f32_from_e4m3(q[i]) * factor[i]);
      out[i] = static_cast<uint8_t>((q[i] & 0x7Fu) == kE4m3Nan ? kE4m3Nan : folded);
    }
    for (int b = 0; b < count; ++b)
      if (sf[first + b] == kE8m0Nan) std::memset(out + b * kBlock, kE4m3Nan, kBlock);
  }
}

// The row's scale first, while its values enter the cache; then 16 blocks at a time are quantized and folded.
template <typename T>
MXEP_INLINE uint8_t folded_row_of(const T* x, uint8_t* qf, int64_t blocks, ScaleRule rule) {
  constexpr int kGroup = 16;
  uint8_t sf[kGroup];
  int row = -1;
  for (int64_t b = 0; b < blocks; ++b) row = larger_scale(row, scale_of(x + b * kBlock, rule));
  for (int64_t first = 0; first < blocks; first += kGroup) {
    const int64_t count = std::min<int64_t>(kGroup, blocks - first);
    rows_of(x + first * kBlock, qf + first * kBlock, sf, count, rule);
    fold_blocks(qf + first * kBlock, sf, row, qf + first * kBlock, count);
  }
  return row_scale_byte(row);
}

}  // namespace mxep
