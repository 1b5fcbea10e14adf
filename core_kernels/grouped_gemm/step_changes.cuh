// Stages of a product in which the scale of a row or a column changes, from one step of 32 to the next. Three warps of
// the first warpgroup find them ahead of the products.
//
//   a bit per 32 rows and stage --> stages of the tile with a change --> scales of their steps --> ring of notes
//                                                                                                   |  full, empty
//   stage in steps of 32: partial of what changes --add--> sum --x 2^(before - after)--> sum     <--'
//
// In such a stage, a sum whose unit does not change keeps its partial of 128 terms: where its row and its column do
// not, or change in opposite directions. So the bytes of an output depend on its row and its column alone, and not on
// what else the tile holds.
#pragma once

#include <climits>

#include "formats.h"
#include "grouped_gemm/note_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStepsOfStage = kStage / kBlock, kNoCommonPower = 255;

struct StepChanges {
  static constexpr int kSlots = 6;  // what a tile needs is often found while the tile before is multiplied
  int k;                            // first term of the stage; INT_MAX: the tile has no more
  uint32_t steps[kNoteParts];       // a bit per step in which the part changes
  uint8_t common_power[kNoteParts][kStepsOfStage];  // of all 128 rows or columns, if it is one
  // 127 + before - after, from 0 to 254, of four neighbours in a word: of rows in order, of columns as word_of.
  alignas(16) uint8_t power[kNoteParts][kStepsOfStage][128];
};

// Called by one warp per part. Parts: the rows of either warpgroup, the common columns; of a flat tile the columns of
// either warpgroup, the common rows.
__device__ inline void find_changes(const Problem& p, int part, const Tile& tile, NoteQueue<StepChanges>& notes) {
  const bool common = part == kCommonPart, columns = common != tile.flat;
  const int lane = threadIdx.x % 32, first = (common ? 0 : part * 128) + lane * 4;
  const int steps = p.depth / 32, stages = (steps + kStepsOfStage - 1) / kStepsOfStage;
  const int group = tile.b_row / p.cols, col = tile.b_row - group * p.cols;
  const int pitch = columns ? p.cols : p.rows, left = (columns ? tile.cols : tile.rows) - first;
  const uint8_t* scales = (columns ? p.steps.col + tile.col_scale : p.steps.row + tile.row_scale) + first;
  const bool aligned = left >= 4 && (reinterpret_cast<uintptr_t>(scales) | pitch) % 4 == 0;
  const auto scales_at = [&](int step) {
    const uint8_t* from = scales + static_cast<int64_t>(step) * pitch;
    if (aligned) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = 0; i < min(left, 4); ++i) bytes |= from[i] << i * 8;
    return bytes;
  };
  // A lane reads the words of 32 rows or columns: lanes 0 to 15 those of the rows, the others those of the columns.
  const int of = lane % 16, base = lane < 16 ? tile.a_row : col;
  const int size = min(lane < 16 ? tile.rows : tile.cols, (lane < 16) == tile.flat ? kTileN : kTileM);
  const bool reads = size > 0 && base / 32 + of <= (base + size - 1) / 32;
  const int64_t line = base / 32 + of + (lane < 16 ? 0 : static_cast<int64_t>(group) * ((p.cols + 31) / 32));
  const uint32_t* words = (lane < 16 ? p.steps.row_changes : p.steps.col_changes) + line * p.steps.words;
  for (int word = 0; word < p.steps.words; ++word) {
    uint32_t changes = __reduce_or_sync(~0u, reads ? words[word] : 0);
    for (; changes; changes &= changes - 1) {
      const int stage = word * kStagesOfWord + __ffs(changes) - 1;
      if (stage >= stages) break;
      uint32_t before = scales_at(max(stage * kStepsOfStage - 1, 0)), changing = 0;
      notes.wait_to_write();
      StepChanges& note = notes.current();
#pragma unroll 1
      for (int i = 0; i < kStepsOfStage; ++i) {
        const uint32_t after = scales_at(min(stage * kStepsOfStage + i, steps - 1));
        const uint32_t up = __vsubus4(after, before), down = __vsubus4(before, after);
        const uint32_t power = __vminu4(__vaddus4(__vsubus4(kOne * 0x01010101u, up), down), 0xFEFEFEFEu);
        const uint32_t first_power = __shfl_sync(~0u, power & 0xFF, 0);
        before = after;
        if (!__any_sync(~0u, (up | down) != 0)) continue;
        changing |= 1 << i;
        const bool common_power = __all_sync(~0u, power == first_power * 0x01010101u);
        if (lane == 0) note.common_power[part][i] = common_power ? first_power : kNoCommonPower;
        reinterpret_cast<uint32_t*>(note.power[part][i])[columns ? word_of(lane) : lane] = power;
      }
      if (lane == 0) {
        note.steps[part] = changing;
        if (common) note.k = stage * kTileK;
      }
      notes.written();
    }
  }
  notes.wait_to_write();
  if (common && lane == 0) notes.current().k = INT_MAX;
  notes.written();
}

// Whether all rows and all columns change in opposite directions, so that no sum of the warp changes its unit.
__device__ __forceinline__ bool keeps_units(const StepChanges& note, int of_rows, int of_cols) {
  const int step = threadIdx.x % kStepsOfStage;
  const auto power = [&](int part) { return note.steps[part] >> step & 1 ? note.common_power[part][step] : kOne; };
  const int rows = power(of_rows), cols = power(of_cols);
  return __all_sync(~0u, rows != kNoCommonPower && cols != kNoCommonPower && rows + cols == 2 * kOne);
}

// Where the unit of a sum changes, the product of the scales of its row and its column: sum + partial, in the new unit,
// and partial = 0. `sum`, `partial`: a warp's values of one product of 64 x 128, rows `row` and on of its warpgroup.
__device__ __forceinline__ void change_step(float (&sum)[64], float (&partial)[64], int row, const StepChanges& note,
                                            int of_rows, int of_cols, int step) {
  const int lane = threadIdx.x % 32;
  const auto factor = [](int power) { return __int_as_float(power << 23); };  // 0 for an increase of 127 and more
  const auto both = [](float row_factor, float col_factor) { return fminf(row_factor * col_factor, 0x1p127f); };
  const auto change = [&](int i, float f) {
    if (f != 1) sum[i] += partial[i], partial[i] = 0;
    sum[i] *= f;
  };
  const bool rows = note.steps[of_rows] >> step & 1, cols = note.steps[of_cols] >> step & 1;
  float row_factor[2];
#pragma unroll
  for (int of = 0; of < 2; ++of) row_factor[of] = rows ? factor(note.power[of_rows][step][row + of * 8 + lane / 4]) : 1;
  const int common = cols ? note.common_power[of_cols][step] : kOne;
  if (common != kNoCommonPower) {
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const float f = both(row_factor[of], factor(common));
      if (!__any_sync(~0u, f != 1)) continue;
#pragma unroll
      for (int i = 2 * of; i < 64; i += 4) {
        change(i, f);
        change(i + 1, f);
      }
    }
    return;
  }
  const auto* words = reinterpret_cast<const uint4*>(note.power[of_cols][step]) + lane % 4 / 2 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 four = words[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t two = (&four.x)[j] >> lane % 2 * 16;
      const float f[2] = {factor(two & 0xFF), factor(two >> 8 & 0xFF)};
#pragma unroll
      for (int n = 0; n < 4; ++n) change((i * 4 + j) * 4 + n, both(row_factor[n / 2], f[n % 2]));
    }
  }
}

}  // namespace mxep::cuda::sm90
