// Rows whose blocks are folded to a least scale, as far as their own scales are not larger. Where one is, the row is
// folded again, to the largest. Of such a row the blocks with a smaller scale are read and written; a block is a sector
// of DRAM.
//
//   scales of 16 rows --> shared memory --> the largest of each row --> row_sf
//                                             |
//   qf -- blocks with a smaller one --> times 2^(block's scale - largest) --> qf
//
// A CTA also adds up the parts of a sum per row: every kSlices-th one in order, then these sums.
#pragma once

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "cuda/tokens.cuh"
#include "fold/folded_tile.cuh"
#include "fold/magnitudes.cuh"

namespace mxep::cuda {

template <int kResults>
struct RowsInPlace {
  EndedRows rows;  // a multiple of kRowsOfCta; the rows past the last end keep their bytes, their sums are 0
  int64_t cols;
  uint8_t *qf[kResults], *row_sf[kResults];
  const uint8_t* scales;  // of the blocks before any fold: (pairs of blocks, kResults, rows, 2)
  const uint8_t* least;   // (kResults, rows): magnitudes of the scales that blocks have at least
  const float* parts;     // (blocks, rows)
  float* sum;             // (rows,), or null
  int pairs;              // of blocks in a row, the last one perhaps alone
};

inline constexpr int kRowsOfCta = 16, kRowThreads = 256, kRowWarps = kRowThreads / 32;

template <int kResults, int kSlices>
__global__ void __launch_bounds__(kRowThreads) fold_rows_in_place(const __grid_constant__ RowsInPlace<kResults> p) {
  extern __shared__ uint16_t staged[];  // (kResults, kRowsOfCta, pairs)
  __shared__ float part_sums[kSlices][kRowsOfCta];
  const int64_t first_row = int64_t{blockIdx.x} * kRowsOfCta, all_rows = p.rows.rows;
  if (first_row >= p.rows.count()) {
    if (p.sum && threadIdx.x < kRowsOfCta) p.sum[first_row + threadIdx.x] = 0;
    return;
  }
  const int pairs = p.pairs, blocks = static_cast<int>(p.cols / kBlock);
  for (int i = threadIdx.x; i < kResults * pairs * 2; i += kRowThreads) {
    const int pair = i / 2 % pairs, which = i / 2 / pairs, half = i % 2;
    const uint4 eight = __ldg(
        reinterpret_cast<const uint4*>(p.scales + ((int64_t{pair} * kResults + which) * all_rows + first_row) * 2) +
        half);
    const uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int r = 0; r < 8; ++r)
      staged[(which * kRowsOfCta + half * 8 + r) * pairs + pair] = static_cast<uint16_t>(words[r / 2] >> r % 2 * 16);
  }
  if (p.sum && threadIdx.x < kSlices * kRowsOfCta) {
    const int row = threadIdx.x % kRowsOfCta, slice = threadIdx.x / kRowsOfCta;
    float sum = 0;
#pragma unroll 8
    for (int i = slice; i < blocks; i += kSlices) sum += __ldg(p.parts + i * all_rows + first_row + row);
    part_sums[slice][row] = sum;
  }
  __syncthreads();
  if (p.sum && threadIdx.x < kRowsOfCta) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) sum += part_sums[i][threadIdx.x];
    p.sum[first_row + threadIdx.x] = sum;
  }

  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int line = threadIdx.x / 32; line < kResults * kRowsOfCta; line += kRowWarps) {
    const int which = line / kRowsOfCta;
    const int64_t row = first_row + line % kRowsOfCta;
    const auto* scales = reinterpret_cast<const uint8_t*>(staged + line * pairs);
    const uint32_t least = __ldg(p.least + which * all_rows + row);
    uint32_t largest = least;
    for (int i = lane; i < blocks; i += 32) largest = max(largest, (scales[i] + 1u) & 0xFF);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) p.row_sf[which][row] = largest - 1;
    if (largest == least) continue;
    const uint32_t row_scale = largest - 1, at_least = max(least, 1) - 1;

    constexpr int kAtOnce = 8;
    uint8_t* codes = p.qf[which] + row * p.cols + lane * 16;
#pragma unroll 1
    for (int first = lane / 2; first - lane / 2 < blocks; first += 16 * kAtOnce, codes += 512 * kAtOnce) {
      uint4 found[kAtOnce];
      uint32_t byte[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        byte[i] = first + 16 * i < blocks ? max(uint32_t{scales[first + 16 * i]}, at_least) : row_scale;
        if (byte[i] != row_scale) found[i] = *reinterpret_cast<const uint4*>(codes + 512 * i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (byte[i] != row_scale)
          *reinterpret_cast<uint4*>(codes + 512 * i) = folded(found[i], fold_power(byte[i], row_scale));
    }
  }
}

template <int kSlices, int kResults>
void fold_in_place(const char* op, const RowsInPlace<kResults>& folds, cudaStream_t stream) {
  constexpr auto kKernel = fold_rows_in_place<kResults, kSlices>;
  const auto bytes = static_cast<int>(kResults * kRowsOfCta * folds.pairs * sizeof(uint16_t));
  launch_kernel(op, kKernel, grid_x(op, folds.rows.rows / kRowsOfCta), kRowThreads, bytes, stream, folds);
}

}  // namespace mxep::cuda
