// Where the scales of a K-grouped tile rise, noted ahead of its products by three warps of the first warpgroup.
//
//   scales of span after span --> what rises at the first token of each of 16 spans --> ring of two notes
//                                                                                          |  full, empty
//   products up to there --> sum --x 2^-rise of the row--x 2^-rise of the column--> sum   <'
//
// Where nothing rises, consumers look at a note once in 16 spans. When those warps said with every stage what rises,
// and consumers looked at that before they added, it cost 4% of the rate.
#pragma once

#include "cuda/sm90.cuh"
#include "grouped_gemm/folded_epilogue.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

// Rows of consuming warpgroup 0, of warpgroup 1, columns: a warp for each.
constexpr int kRiseParts = 3, kColumnRises = 2;
constexpr int kNotedSpans = 16;  // of a note. Nothing is summed yet where a group begins: the first is its second span

struct Rises {
  uint32_t rising[kRiseParts];                             // a bit for every span
  uint32_t raised[kRiseParts][kNotedSpans];                // a bit for every four neighbours, set where one rises
  alignas(4) uint8_t power[kRiseParts][kNotedSpans][128];  // 127 - rise, at least 0, of neighbours where one rises
};

// In shared memory. full: all three parts are said; empty: all warps that compute are through with the note.
struct RiseSlots {
  static constexpr int kSlots = 2;
  Rises notes[kSlots];
  uint64_t full[kSlots], empty[kSlots];

  // By one thread, before the first barrier.
  __device__ void init(int warps) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&full[i], kRiseParts);
      barrier_init(&empty[i], warps);
    }
  }
};

// For one side of the ring; whole warps ask.
class RiseQueue {
 public:
  __device__ explicit RiseQueue(RiseSlots& slots) : slots_(slots) {}

  __device__ Rises& current() { return slots_.notes[at_]; }
  __device__ void wait_to_write() { barrier_wait(&slots_.empty[at_], parity_ ^ 1); }
  __device__ void wait_to_read() { barrier_wait(&slots_.full[at_], parity_); }
  __device__ void written() { pass_on(slots_.full); }
  __device__ void read() { pass_on(slots_.empty); }

 private:
  __device__ void pass_on(uint64_t* barriers) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&barriers[at_], cluster_rank());
    if (++at_ == RiseSlots::kSlots) at_ = 0, parity_ ^= 1;
  }

  RiseSlots& slots_;
  int at_ = 0;
  uint32_t parity_ = 0;
};

// By a warp for every part; four neighbours a lane.
__device__ inline void note_rises(const Problem& p, int part, const Tile& tile, RiseQueue& notes) {
  constexpr int kTogether = 4;  // spans whose scales are on their way at a time: there are 24 registers
  constexpr uint32_t kOnes = kOne * 0x01010101u;
  const bool columns = part == kColumnRises;
  const int lane = threadIdx.x % 32, line = lane * 4, first = columns ? line : part * 128 + line;
  const int pitch = columns ? p.cols : p.rows;
  const int left = (columns ? tile.cols : tile.rows) - first;  // what the tile has from this lane's first on
  const uint8_t* scales = columns ? p.col_scale + tile.b_row : p.row_scale + tile.a_row;
  int at = tile.slot * pitch + first;
  const auto next_scales = [&] {
    uint32_t bytes = 0;
    if (left >= 4 && pitch % 4 == 0) {
      bytes = *reinterpret_cast<const uint32_t*>(scales + at);
    } else {
      for (int i = 0; i < min(left, 4); ++i) bytes |= scales[at + i] << i * 8;
    }
    at += pitch;
    return bytes;
  };
  int spans = (tile.k_end - tile.k_begin + kSpan - 1) / kSpan - 1;  // still to look at
  uint32_t before = spans > 0 ? next_scales() : 0;
  while (spans > 0) {
    notes.wait_to_write();
    Rises& note = notes.current();
    uint32_t rising = 0;
#pragma unroll 1
    for (int first_span = 0; first_span < kNotedSpans; first_span += kTogether, spans -= kTogether) {
      uint32_t fetched[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) fetched[i] = i < spans ? next_scales() : before;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint32_t rise = __vsubus4(fetched[i], before), raised = __ballot_sync(~0u, rise != 0);
        before = fetched[i];
        if (raised == 0) continue;
        const int span = first_span + i;
        rising |= 1 << span;
        if (lane == 0) note.raised[part][span] = raised;
        *reinterpret_cast<uint32_t*>(&note.power[part][span][line]) = __vsubus4(kOnes, rise);
      }
    }
    if (lane == 0) note.rising[part] = rising;
    notes.written();
  }
}

// Takes a warp's sums, rows `row` and on of either product of its warpgroup, to larger units. Few rise at a time, so
// sums are looked at by eight rows or columns.
__device__ __forceinline__ void rescale(float (&sum)[2][64], int row, uint32_t raised_rows, const uint8_t* row_power,
                                        uint32_t raised_cols, const uint8_t* col_power) {
  const int lane = threadIdx.x % 32;
  const auto factor = [](int power) { return __int_as_float(power << 23); };  // 0 stands for everything below 2^-126
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
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if ((raised_cols >> i * 2 & 3) == 0) continue;
    const auto two = *reinterpret_cast<const uchar2*>(col_power + i * 8 + lane % 4 * 2);
    const float f[2] = {factor(two.x), factor(two.y)};
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j / 4][i * 4 + j % 4] *= f[j % 2];
  }
}

// What a warp does to its sums at the group's token `k`. Returns the first token where it is to look again.
__device__ __forceinline__ int rescale_at(int k, float (&sum)[2][64], int row, int group, RiseQueue& notes) {
  const int span = (k / kSpan - 1) & (kNotedSpans - 1);
  if (span == 0) {
    if (k > kSpan) notes.read();
    notes.wait_to_read();
  }
  const Rises& note = notes.current();
  const uint32_t rows = note.rising[group] >> span, cols = note.rising[kColumnRises] >> span;
  if ((rows | cols) & 1)
    rescale(sum, row, rows & 1 ? note.raised[group][span] : 0, note.power[group][span],
            cols & 1 ? note.raised[kColumnRises][span] : 0, note.power[kColumnRises][span]);
  const uint32_t later = (rows | cols) >> 1;
  return k + kSpan * (later ? __ffs(later) : kNotedSpans - span);
}

}  // namespace mxep::cuda::sm90
