// Blocks apart: blocks of 32 along K whose scale is not that of their row. One warp of a CTA computes its tiles, and
// finds for the other warps the blocks apart of all tiles of the cluster.
//
//   schedule -------------------------------------------------------------------> queue of tiles
//   a bit per 32 rows and block of K --or, for all lines of the cluster, by stage--> ring of notes
//
// A line is a row of the output or a column. All CTAs of a cluster find the same: what one of them loads for the others
// goes to the same place of every ring of stages.
#pragma once

#include "formats.h"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/note_queue.cuh"
#include "grouped_gemm/schedule.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kBlocksOfStage = kStage / kBlock, kTermsOfWord = kBlock * kBlocksOfWord;

// A stage that has blocks apart in some line of the cluster: its first term, a multiple of 128, plus a bit per block.
// The last note of a tile has no blocks.
struct StageApart {
  static constexpr int kSlots = 16, kWriters = 1, kLanes = 32;
  static constexpr int kAllBlocks = (1 << kBlocksOfStage) - 1, kLast = -kStage;

  int bits;

  __device__ __forceinline__ int at() const { return bits & ~kAllBlocks; }
  __device__ __forceinline__ uint32_t blocks() const { return bits & kAllBlocks; }
};

// The next note, of a whole warp; from one lane, so that the compiler knows that all lanes agree.
__device__ __forceinline__ StageApart next_apart(NoteQueue<StageApart>& notes) {
  notes.wait_to_read();
  const StageApart note{__shfl_sync(~0u, notes.current().bits, 0)};
  notes.read();
  return note;
}

// The first column of a tile, also of one outside the output, and its group.
__device__ __forceinline__ int column_of(const Problem& p, const Tile& tile) { return p.cols - tile.cols; }
__device__ __forceinline__ int group_of(const Problem& p, const Tile& tile) {
  return (tile.b_row - column_of(p, tile)) / p.cols;
}

// The lines of a cluster's tiles whose words one warp reads.
template <Part kPart>
class LinesOfCluster {
 public:
  __device__ LinesOfCluster(const Problem& p, const Tile& tile) : words_(p.steps.words) {
    const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32;
    const int high = tile.flat ? kTileM / 2 : kTileM, wide = tile.flat ? 2 * kTileN : kTileN;
    const int tiles_high = tile.shares_b ? 2 : 1, above = tile.shares_b ? (kInBlock ? rank / kBlockWide : rank) : 0;
    const int tiles_wide = kInBlock ? (tile.shares_b ? kBlockWide : kBlockCtas) : tile.shares_a ? kCluster : 1;
    const int before = rank % tiles_wide * wide, row = tile.a_row - above * high, col = column_of(p, tile) - before;
    const int rows = min(tile.rows + above * high, tiles_high * high),
              cols = min(tile.cols + before, tiles_wide * wide);
    const int first_row = row / kBlock + lane, first_col = col / kBlock + lane;
    rows_ = rows > 0 ? (row + rows - 1) / kBlock - first_row : -1;
    cols_ = cols > 0 ? (col + cols - 1) / kBlock - first_col : -1;
    of_rows_ = p.steps.row_apart + static_cast<int64_t>(first_row) * words_;
    const int64_t words_of_group = (p.cols + kBlock - 1) / kBlock;
    of_cols_ = p.steps.col_apart + (group_of(p, tile) * words_of_group + first_col) * words_;
  }

  // What this lane reads of 1024 terms. Its parts are in flight until `all` is called.
  struct Word {
    uint32_t rows, cols, more_cols;

    __device__ uint32_t all() const { return __reduce_or_sync(~0u, rows | cols | more_cols); }
  };
  __device__ Word fetch(int i) const {
    return {rows_ >= 0 ? of_rows_[i] : 0, cols_ >= 0 ? of_cols_[i] : 0, cols_ >= 32 ? of_cols_[32 * words_ + i] : 0};
  }

 private:
  static constexpr bool kInBlock = kPart == Part::kBlocks;

  int words_, rows_, cols_;  // the last of this lane's words of 32 rows, counted from its first one; negative: none
  const uint32_t *of_rows_, *of_cols_;

  static_assert(2 * kTileM / kBlock < 32 && kBlockCtas * 2 * kTileN / kBlock == 64);
};

// Called by one warp: the tiles of its CTA and their notes, as far ahead as the queues hold.
template <Part kPart>
__device__ void find_apart(const Problem& p, const LptSchedule& lpt, TileSlots& tile_slots,
                           NoteSlots<StageApart>& note_slots) {
  FoldedSchedule<false, false, kPart> schedule(p, lpt);
  TileQueue tiles(tile_slots);
  NoteQueue notes(note_slots);
  const bool writes = threadIdx.x % 32 == 0;
  const auto put = [&](int note) {
    notes.wait_to_write();
    if (writes) notes.current().bits = note;
    notes.written();
  };
  for (Tile tile; schedule.next(&tile);) {
    const LinesOfCluster<kPart> lines(p, tile);
    auto in_flight = lines.fetch(0);
    if (writes) tiles.put(tile);
#pragma unroll 1
    for (int word = 0; word < p.steps.words; ++word) {
      uint32_t bits = in_flight.all();
      if (word + 1 < p.steps.words) in_flight = lines.fetch(word + 1);
#pragma unroll 1
      for (int at = word * kTermsOfWord; bits != 0; at += kStage, bits >>= kBlocksOfStage)
        if (const int blocks = bits & StageApart::kAllBlocks; blocks != 0) put(at | blocks);
    }
    put(StageApart::kLast);
  }
  if (writes) tiles.put({});  // the end
}

}  // namespace mxep::cuda::sm90
