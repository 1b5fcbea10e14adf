// Rescaling of a K-grouped accumulator where scales increase. Three warps of the first warpgroup find the increases
// ahead of the products (scale_increases.cuh).
//
//   scales of consecutive spans --> increases at the first token of each of 16 spans --> ring of two entries
//                                                                                          |  full, empty
//   products up to there --> sum --x 2^-increase of the row--x 2^-increase of the column--> sum   <'
//
// Without increases, consumers read an entry once in 16 spans. An entry per stage, which consumers read before every
// promotion, cost 4% of the rate.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded/epilogue.cuh"
#include "grouped_gemm/schedule/scale_increases.cuh"
#include "grouped_gemm/schedule/tile_queue.cuh"

namespace mxep::cuda::sm90 {

// The index of the word of columns 4 i to 4 i + 3. A thread has one pair of columns of every second word, and such
// words are neighbours.
__device__ constexpr int word_of(int i) { return i % 2 * 16 + i / 2; }

// Called by one warp per part; four neighbours per lane. With two outputs, rows and columns are multiples of
// 4: the general loads would take more registers than there are.
template <bool kDualOutput>
__device__ void find_increases(const Problem& p, int part, const Tile& tile, IncreaseQueue& increases) {
  constexpr int kTogether = 2;                        // spans whose scales are in flight; the warps have 24 registers
  constexpr uint32_t kPowerOne = kOne * 0x01010101u;  // 2^0 for four neighbours
  const bool columns = part == kCommonPart;
  const int lane = threadIdx.x % 32, line = lane * 4, first = columns ? line : part * 128 + line;
  const int pitch = columns ? p.cols : p.rows;
  // Number of rows or columns of the tile from this lane's first on.
  const int left = (columns ? tile.cols : tile.rows) - first;
  const uint8_t* scales = columns ? p.col_scale + tile.b_row : p.row_scale + tile.a_row;
  if (kDualOutput && !columns) scales += tile.output * p.second_output.to_scales;
  int at = tile.slot * pitch + first;
  const auto next_scales = [&] {
    uint32_t bytes = 0;
    if (left >= 4 && (kDualOutput || pitch % 4 == 0)) {
      bytes = *reinterpret_cast<const uint32_t*>(scales + at);
    } else if constexpr (!kDualOutput) {
      for (int i = 0; i < min(left, 4); ++i) bytes |= scales[at + i] << i * 8;
    }
    at += pitch;
    return bytes;
  };
  int spans = (tile.k_end - tile.k_begin + kSpan - 1) / kSpan - 1;  // spans left
  uint32_t before = spans > 0 ? next_scales() : 0;
  while (spans > 0) {
    increases.wait_to_write();
    ScaleIncreases& entry = increases.current();
    uint32_t increased_spans = 0;
#pragma unroll 1
    for (int first_span = 0; first_span < kSpansPerEntry; first_span += kTogether, spans -= kTogether) {
      uint32_t fetched[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) fetched[i] = i < spans ? next_scales() : before;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint32_t increase = __vsubus4(fetched[i], before), increased = __ballot_sync(~0u, increase != 0);
        before = fetched[i];
        if (increased == 0) continue;
        const int span = first_span + i;
        increased_spans |= 1 << span;
        if (lane == 0) entry.increased[part][span] = increased;
        reinterpret_cast<uint32_t*>(entry.power[part][span])[columns ? word_of(lane) : lane] =
            __vsubus4(kPowerOne, increase);
      }
    }
    if (lane == 0) entry.increased_spans[part] = increased_spans;
    increases.written();
  }
}

// Converts a warp's sums, rows `row` and on of both products of its warpgroup, to larger units. Few scales increase at
// a time: rows are tested in groups of eight, columns in groups of 32. A test that skips takes as long as a dozen
// multiplications, since this code is seldom in the instruction cache.
__device__ __forceinline__ void rescale_accumulator(float (&sum)[2][64], int row, uint32_t raised_rows,
                                                    const uint8_t* row_power, uint32_t raised_cols,
                                                    const uint8_t* col_power) {
  const int lane = threadIdx.x % 32;
  const auto factor = [](int power) { return __int_as_float(power << 23); };  // 0 for increases of 127 and more
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int half = i / 2, of = i % 2, at = row + half * 64 + of * 8;
    if ((raised_rows >> at / 4 & 3) == 0) continue;
    const float f = factor(row_power[at + lane / 4]);
#pragma unroll
    for (int j = 2 * of; j < 64; j += 4) {
      sum[half][j] *= f;
      sum[half][j + 1] *= f;
    }
  }
  if (raised_cols == 0) return;
  const auto* words = reinterpret_cast<const uint4*>(col_power) + lane % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if ((raised_cols >> i * 8 & 0xFF) == 0) continue;
    const uint4 four = words[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t two = (&four.x)[j] >> lane % 2 * 16;
      const float f[2] = {factor(two & 0xFF), factor(two >> 8 & 0xFF)};
#pragma unroll
      for (int n = 0; n < 8; ++n) sum[n / 4][(i * 4 + j) * 4 + n % 4] *= f[n % 2];
    }
  }
}

// Rescales a warp's sums at the group's token `k` if a scale increases there. Returns the next token at which to call
// it.
__device__ __forceinline__ int rescale_at(int k, float (&sum)[2][64], int row, int group, IncreaseQueue& increases) {
  const int span = (k / kSpan - 1) & (kSpansPerEntry - 1);
  if (span == 0) {
    if (k > kSpan) increases.read();
    increases.wait_to_read();
  }
  const ScaleIncreases& entry = increases.current();
  const uint32_t rows = entry.increased_spans[group] >> span, cols = entry.increased_spans[kCommonPart] >> span;
  if ((rows | cols) & 1)
    rescale_accumulator(sum, row, rows & 1 ? entry.increased[group][span] : 0, entry.power[group][span],
                        cols & 1 ? entry.increased[kCommonPart][span] : 0, entry.power[kCommonPart][span]);
  const uint32_t later = (rows | cols) >> 1;
  return k + kSpan * (later ? __ffs(later) : kSpansPerEntry - span);
}

}  // namespace mxep::cuda::sm90
