// Blocks apart: blocks of 32 along K whose scale is not that of their row. Three warps of the first warpgroup find the
// stages of a tile that have one, ahead of the products.
//
//   a bit per 32 rows and stage --> stages of the tile --> scales of their steps of 32 --> ring of notes
//                                                                                           |  full, empty
//   a stage in steps of 32: partial --x 2^(scale of block - scale of row), fma--> sum    <--'
//
// Steps of a sum with one factor share their partial, as all four do in a stage without blocks apart. A sum's factor is
// that of its row times that of its column. So the bytes of an output depend on its row and its column alone, and not
// on what else the tile holds.
#pragma once

#include <climits>

#include "formats.h"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/note_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStepsOfStage = kStage / kBlock, kNoCommonPower = 255;

struct BlocksApart {
  static constexpr int kSlots = 6, kLanes = 32;
  int k;                                            // first term of the stage; INT_MAX: the tile has no more
  uint32_t apart[kNoteParts];                       // a bit per step in which the part has a block apart
  uint32_t changes[kNoteParts];                     // a bit per step whose scales are not those of the step before
  uint8_t common_power[kNoteParts][kStepsOfStage];  // of all 128 rows or columns, if it is one
  // 127 + scale of block - scale of row, from 0 to 254, of four neighbours in a word: of rows in order, of columns as
  // word_of. Written for the steps in `apart`.
  alignas(16) uint8_t power[kNoteParts][kStepsOfStage][128];
};

// Called by one warp per part. Parts: the rows of either warpgroup, the common columns; of a flat tile the columns of
// either warpgroup, the common rows.
__device__ inline void find_apart(const Problem& p, int part, const Tile& tile, NoteQueue<BlocksApart>& notes) {
  const bool common = part == kCommonPart, columns = common != tile.flat;
  const int lane = threadIdx.x % 32, first = (common ? 0 : part * 128) + lane * 4;
  const int steps = p.depth / 32, stages = (steps + kStepsOfStage - 1) / kStepsOfStage;
  const int group = tile.b_row / p.cols, col = tile.b_row - group * p.cols;
  const int pitch = columns ? p.cols : p.rows, left = (columns ? tile.cols : tile.rows) - first;
  const auto four = [&](const uint8_t* from) {
    if (left >= 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = 0; i < min(left, 4); ++i) bytes |= from[i] << i * 8;
    return bytes;
  };
  const uint32_t of_line = four((columns ? p.col_scale + tile.col_scale : p.row_scale + tile.row_scale) + first);
  const uint8_t* scales =
      columns ? p.steps.col + static_cast<int64_t>(group) * steps * p.cols + col : p.steps.row + tile.a_row;
  scales += first;
  // A lane reads the words of 32 rows or columns: lanes 0 to 15 those of the rows, the others those of the columns.
  const int of = lane % 16, base = lane < 16 ? tile.a_row : col;
  const int size = min(lane < 16 ? tile.rows : tile.cols, (lane < 16) == tile.flat ? kTileN : kTileM);
  const bool reads = size > 0 && base / 32 + of <= (base + size - 1) / 32;
  const int64_t line = base / 32 + of + (lane < 16 ? 0 : static_cast<int64_t>(group) * ((p.cols + 31) / 32));
  const uint32_t* words = (lane < 16 ? p.steps.row_apart : p.steps.col_apart) + line * p.steps.words;
  for (int word = 0; word < p.steps.words; ++word) {
    uint32_t with_apart = __reduce_or_sync(~0u, reads ? words[word] : 0);
    for (; with_apart; with_apart &= with_apart - 1) {
      const int stage = word * kStagesOfWord + __ffs(with_apart) - 1;
      if (stage >= stages) break;
      constexpr uint32_t kOnes = kOne * 0x01010101u;
      uint32_t before = kOnes, apart = 0, changes = 0;
      notes.wait_to_write();
      BlocksApart& note = notes.current();
#pragma unroll 1
      for (int i = 0; i < kStepsOfStage; ++i) {
        const int step = stage * kStepsOfStage + i;
        const uint32_t of_block = step < steps ? four(scales + static_cast<int64_t>(step) * pitch) : of_line;
        const uint32_t up = __vsubus4(of_block, of_line), down = __vsubus4(of_line, of_block);
        const uint32_t power = __vminu4(__vsubus4(__vaddus4(kOnes, up), down), 0xFEFEFEFEu);
        const uint32_t first_power = __shfl_sync(~0u, power & 0xFF, 0);
        if (i > 0 && __any_sync(~0u, power != before)) changes |= 1 << i;
        before = power;
        if (!__any_sync(~0u, power != kOnes)) continue;
        apart |= 1 << i;
        const bool common_power = __all_sync(~0u, power == first_power * 0x01010101u);
        if (lane == 0) note.common_power[part][i] = common_power ? first_power : kNoCommonPower;
        reinterpret_cast<uint32_t*>(note.power[part][i])[columns ? word_of(lane) : lane] = power;
      }
      if (lane == 0) {
        note.apart[part] = apart;
        note.changes[part] = changes;
        if (common) note.k = stage * kTileK;
      }
      notes.written();
    }
  }
  notes.wait_to_write();
  if (common && lane == 0) notes.current().k = INT_MAX;
  notes.written();
}

// The factors of a step for this thread's values of one product of 64 x 128: two rows, `row` and on of the warpgroup,
// and 16 pairs of columns.
class StepFactors {
 public:
  __device__ __forceinline__ StepFactors(const BlocksApart& note, int of_rows, int of_cols, int step, int row) {
    const bool rows = note.apart[of_rows] >> step & 1, cols = note.apart[of_cols] >> step & 1;
    common_ = cols ? note.common_power[of_cols][step] : kOne;
    words_ = reinterpret_cast<const uint32_t*>(note.power[of_cols][step]) + threadIdx.x % 4 / 2 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      row_[i] = rows ? factor(note.power[of_rows][step][row + i * 8 + threadIdx.x % 32 / 4]) : 1;
  }
  __device__ __forceinline__ bool by_row() const { return common_ != kNoCommonPower; }
  // Of one of the two rows, where all columns have one factor.
  __device__ __forceinline__ float of_row(int i) const { return both(row_[i], factor(common_)); }
  // Of value 4 word + n: n / 2 is the row, n % 2 the column of the pair.
  __device__ __forceinline__ uint32_t word(int word) const {
    return by_row() ? common_ * 0x0101u : words_[word] >> threadIdx.x % 2 * 16;
  }
  __device__ __forceinline__ float of_value(uint32_t word, int n) const {
    return both(row_[n / 2], factor((n % 2 ? word >> 8 : word) & 0xFF));
  }

 private:
  static __device__ float factor(int power) { return __int_as_float(power << 23); }  // 0 for 2^-127
  static __device__ float both(float row, float col) { return fminf(row * col, 0x1p127f); }

  int common_;
  const uint32_t* words_;
  float row_[2];
};

// Where the factor of a sum changes before a step: sum + its factor * partial, and partial = 0.
__device__ __forceinline__ void change_factor(float (&sum)[64], float (&partial)[64], const StepFactors& before,
                                              const StepFactors& after) {
  const auto change = [&](int i, float f, bool changes) {
    if (changes) sum[i] = fmaf(partial[i], f, sum[i]), partial[i] = 0;
  };
  if (before.by_row() && after.by_row()) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float f = before.of_row(row);
      const bool changes = f != after.of_row(row);
      if (!__any_sync(~0u, changes)) continue;
#pragma unroll
      for (int i = 2 * row; i < 64; i += 4) {
        change(i, f, changes);
        change(i + 1, f, changes);
      }
    }
    return;
  }
#pragma unroll
  for (int word = 0; word < 16; ++word) {
    const uint32_t first = before.word(word), second = after.word(word);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float f = before.of_value(first, n);
      change(word * 4 + n, f, f != after.of_value(second, n));
    }
  }
}

// sum + factor * partial.
__device__ __forceinline__ void add_scaled(float (&sum)[64], const float (&partial)[64], const StepFactors& factors) {
  if (factors.by_row()) {
    const float f[2] = {factors.of_row(0), factors.of_row(1)};
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(partial[i], f[i / 2 % 2], sum[i]);
    return;
  }
#pragma unroll
  for (int word = 0; word < 16; ++word) {
    const uint32_t bytes = factors.word(word);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      sum[word * 4 + n] = fmaf(partial[word * 4 + n], factors.of_value(bytes, n), sum[word * 4 + n]);
  }
}

// Whether all factors of the warp are 1, where all rows and all columns are apart in opposite directions.
__device__ __forceinline__ bool cancel(const BlocksApart& note, int of_rows, int of_cols) {
  const int step = threadIdx.x % kStepsOfStage;
  const auto power = [&](int part) { return note.apart[part] >> step & 1 ? note.common_power[part][step] : kOne; };
  const int rows = power(of_rows), cols = power(of_cols);
  return __all_sync(~0u, rows != kNoCommonPower && cols != kNoCommonPower && rows + cols == 2 * kOne);
}

}  // namespace mxep::cuda::sm90
