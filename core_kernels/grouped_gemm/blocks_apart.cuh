// Blocks apart: blocks of 32 along K whose scale is not that of their row. Three warps of the first warpgroup find the
// stages of a tile that have one, ahead of the products.
//
//   a bit per 32 rows and stage --> stages of the tile --> scales of their steps of 32 --> ring of notes
//                                                                                           |  full, empty
//   a stage in steps of 32: partial --x 2^(scale of block - scale of row), fma--> sum    <--'  stepped_stage.cuh
//
// Steps of a sum with the same power of two share their partial, as all four do in a stage without blocks apart. A
// sum's power is that of its row plus that of its column. So the bytes of an output depend on its row and its column
// alone, and not on what else the tile holds.
#pragma once

#include <climits>

#include "formats.h"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/note_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStepsOfStage = kStage / kBlock;

// Powers of two are bytes, 127 + scale of block - scale of row, from 0 to 254.
struct BlocksApart {
  static constexpr int kSlots = 6, kLanes = 32;

  // Of the 128 rows or columns of a part.
  struct alignas(8) Summary {
    uint32_t common;  // a byte per step: the power that all have, or 0
    // Bits: step of the first 64 lines, and 4 + step of the others: some have another power than in the step before; 8
    // bits on: all have. Columns: of all 128, in either place. Bit 16: in some step they have no common power.
    uint32_t bits;

    __device__ __forceinline__ uint32_t some() const { return bits; }
    __device__ __forceinline__ uint32_t all() const { return bits >> 8; }
    __device__ __forceinline__ bool differ() const { return bits >> 16; }
  };

  int k;  // first term of the stage; INT_MAX: the tile has no more
  Summary of[kNoteParts];
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
      uint32_t fetched[kStepsOfStage];  // in flight together
#pragma unroll
      for (int i = 0; i < kStepsOfStage; ++i) {
        const int step = stage * kStepsOfStage + i;
        fetched[i] = step < steps ? four(scales + static_cast<int64_t>(step) * pitch) : of_line;
      }
      constexpr uint32_t kOnes = kOne * 0x01010101u;
      uint32_t before = kOnes;
      BlocksApart::Summary summary{};
      notes.wait_to_write();
      BlocksApart& note = notes.current();
#pragma unroll
      for (int i = 0; i < kStepsOfStage; ++i) {
        const uint32_t up = __vsubus4(fetched[i], of_line), down = __vsubus4(of_line, fetched[i]);
        uint32_t power = __vminu4(__vsubus4(__vaddus4(kOnes, up), down), 0xFEFEFEFEu);
        const uint32_t common_power = __shfl_sync(~0u, power & 0xFF, 0);
        if (left <= 0) power = common_power * 0x01010101u;  // lines outside the output are as its first
        if (i > 0) {
          uint32_t some = __ballot_sync(~0u, power != before), same = __ballot_sync(~0u, __vcmpeq4(power, before));
          if (columns) some = some ? ~0u : 0, same = same ? ~0u : 0;
          summary.bits |= (some & 0xFFFF ? 0x01 << i : 0) | (some >> 16 ? 0x10 << i : 0);
          summary.bits |= (same & 0xFFFF ? 0 : 0x100 << i) | (same >> 16 ? 0 : 0x1000 << i);
        }
        before = power;
        if (common_power != 0 && __all_sync(~0u, power == common_power * 0x01010101u)) {
          summary.common |= common_power << i * 8;
        } else {
          summary.bits |= 0x10000;
        }
        reinterpret_cast<uint32_t*>(note.power[part][i])[lane] = power;
      }
      if (lane == 0) {
        note.of[part] = summary;
        if (common) note.k = stage * kTileK;
      }
      notes.written();
    }
  }
  notes.wait_to_write();
  if (common && lane == 0) notes.current().k = INT_MAX;
  notes.written();
}

}  // namespace mxep::cuda::sm90
