// Codes of a register tile's rows and columns, folded to scales that are known only after the tile's own.
//
//   tile --column_bytes, row_bytes--> scale bytes of its blocks
//   tile, bytes, a scale per row    --fold_rows------> qf
//   tile, bytes, a scale per column --stage_columns--> StagedCodes --> qf_t
//
// A lane has kColumns columns and the maxima of as many rows. Their bytes share a word, four or two of them.
#pragma once

#include <type_traits>

#include "cuda/mx_math.cuh"
#include "fold/magnitudes.cuh"
#include "formats.h"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// A tile of the height of a span: one of 256 rows x 128 columns of bf16, or x 64 columns of fp32.
template <typename P>
using FoldTile = RegisterTile<P, 16 / sizeof(P), kSpan / kBlock, 1>;

// One byte for each column of a lane.
template <typename T>
using ColumnBytes = std::conditional_t<T::kColumns == 4, uint32_t, uint16_t>;

// A lane's rows after `row_maxima`: kCount rows from lane % kBlockLanes * kCount on, one byte of a word per row.
template <typename T>
struct LaneRows {
  static constexpr int kWords = T::kWords / T::kBlockLanes, kStride = T::Pair::kRowsPerWord, kCount = kWords * kStride;
  static_assert(kCount == T::kColumns && (kCount == 4 || kCount == 2));

  // Conversions for the 32 rows of a warp: from a lane's own rows to the word of rows lane % 8 * 4 to lane % 8 * 4 + 3,
  // and back.
  static __device__ uint32_t by_fours(uint32_t own) {
    if constexpr (kCount == 4) return own;
    const int lane = threadIdx.x % 8 * 2;
    return __shfl_sync(~0u, own, lane) & 0xFFFF | __shfl_sync(~0u, own, lane + 1) << 16;
  }
  static __device__ uint32_t of_fours(uint32_t word) {
    if constexpr (kCount == 4) return word;
    return __shfl_sync(~0u, word, threadIdx.x % 16 / 2) >> threadIdx.x % 2 * 16;
  }
};

// Scale bytes of the blocks of a lane's columns.
template <typename T>
__device__ uint32_t column_bytes(const T& tile, ScaleRule rule) {
  uint32_t bytes = 0;
  for_column_pairs(tile, [&](const typename T::Pair* values, int, int col) {
    const auto two = TwoScales::of(values, rule);
    bytes |= (two.low | two.high << 8) << col % T::kColumns * 8;
  });
  return bytes;
}

// Scale bytes of the blocks of a lane's rows.
template <typename T>
__device__ uint32_t row_bytes(const T& tile, ScaleRule rule) {
  uint32_t words[T::kWords], bytes = 0;
  row_maxima(tile, words);
#pragma unroll
  for (int i = 0; i < LaneRows<T>::kCount; ++i) {
    constexpr int kStride = LaneRows<T>::kStride;
    bytes |= e8m0_from_amax(T::Pair::word_bits(words[i / kStride], i % kStride), rule) << i * 8;
  }
  return bytes;
}

// The largest of four bytes each over the blocks across a warp's columns.
template <typename T>
__device__ uint32_t max_over_blocks(uint32_t bytes) {
#pragma unroll
  for (int step = T::kBlockLanes; step < 32; step *= 2) bytes = __vmaxu4(bytes, __shfl_xor_sync(~0u, bytes, step));
  return bytes;
}

// 2^(byte - scale) for `folded`, of a scale that is not smaller, or of a NaN block, whose codes stay NaN with any
// factor. 448 * 2^-32 rounds to zero, and so does everything smaller.
__device__ inline uint32_t fold_power(uint32_t byte, uint32_t scale) {
  return f16x2_power(__viaddmax_s32(static_cast<int>(byte), -static_cast<int>(scale), -32));
}

// The powers that fold a block of a line twice: to `least`, the scale that the line's blocks have at least, -1 for
// none, and to the line's scale.
struct TwoFolds {
  uint32_t first, second;

  static __device__ TwoFolds of(uint32_t byte, int least, uint32_t scale) {
    const auto raised = static_cast<uint32_t>(max(static_cast<int>(byte), least));
    return {fold_power(byte, raised), fold_power(raised, scale)};
  }
  template <typename Codes>
  __device__ Codes operator()(Codes codes) const {
    return folded(folded(codes, first), second);
  }
};

// Writes the codes of a tile's rows. `bytes`: the blocks' scales, `magnitudes`: the rows' scales + 1, both of the
// lane's rows.
template <typename T, typename Store = DefaultStore>
__device__ void fold_rows(const T& tile, uint32_t bytes, uint32_t magnitudes, uint8_t* qf, uint32_t pitch, bool exists,
                          Store store = {}) {
  using Pair = typename T::Pair;
  using Lane = LaneRows<T>;
  constexpr int kStride = Lane::kStride;
  uint32_t factors[Lane::kWords], powers[Lane::kWords];
#pragma unroll
  for (int w = 0; w < Lane::kWords; ++w) {
    uint32_t factor[kStride], power[kStride];
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int shift = (w * kStride + i) * 8;
      const uint32_t byte = bytes >> shift & 0xFF, scale = (magnitudes >> shift & 0xFF) - 1;
      factor[i] = inverse_scale(byte);
      power[i] = fold_power(byte, scale);
    }
    factors[w] = Pair::pack_word(factor);
    powers[w] = kStride == 2 ? __byte_perm(power[0], power[kStride - 1], 0x5410) : power[0];
  }
#pragma unroll
  for (int w = 0; w < T::kWords; ++w) {
    const uint32_t factor = __shfl_sync(~0u, factors[w % Lane::kWords], w / Lane::kWords, T::kBlockLanes);
    const uint32_t power = __shfl_sync(~0u, powers[w % Lane::kWords], w / Lane::kWords, T::kBlockLanes);
#pragma unroll
    for (int i = 0; i < kStride; ++i) {
      const int r = w * kStride + i;
      const auto& row = tile.rows[r];
      const Pair by = Pair::of_row(factor, i), x = row.at[0] * by, y = row.at[T::kPairs - 1] * by;
      const uint32_t codes =
          folded(e4m3x4(x.low(), x.high(), y.low(), y.high()), __byte_perm(power, 0, i ? 0x3232 : 0x1010));
      if (exists) store(reinterpret_cast<ColumnBytes<T>*>(at_row(qf, pitch, r)), static_cast<ColumnBytes<T>>(codes));
    }
  }
}

// Stages the codes of a tile's columns. `bytes`: the blocks' scales, of the lane's columns; scale_of(col): the scale of
// a column of the tile.
template <typename T>
__device__ void stage_columns(const T& tile, uint32_t bytes, ScaleRule,
                              StagedCodes<T::kRows, T::kCols, T::kColumns>& codes, auto scale_of) {
  for_column_pairs(tile, [&](const typename T::Pair* values, int block, int col) {
    const TwoScales two{bytes >> col % T::kColumns * 8 & 0xFF, bytes >> (col % T::kColumns * 8 + 8) & 0xFF};
    const uint32_t powers[] = {fold_power(two.low, scale_of(col)), fold_power(two.high, scale_of(col + 1))};
    codes.put(values, two.template factor<typename T::Pair>(), block, col,
              [&](uint4 chunk, int i) { return folded(chunk, powers[i]); });
  });
}

}  // namespace mxep::cuda
