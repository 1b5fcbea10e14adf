// The least scales of the rows of SwiGLU's gradients, before cuda_bwd_both.cu computes the whole rows.
//
//   first 256 columns of dh, gate, up --> dgate, dup --> largest scale of a row's blocks --times 4--> least
#pragma once

#include "cuda/launch.h"
#include "cuda/tokens.cuh"
#include "fold/magnitudes.cuh"
#include "formats.h"
#include "swiglu/backward/bwd.cuh"
#include "swiglu/folded/rows.cuh"

namespace mxep::cuda {

inline constexpr int kMeasuring = 512;  // threads

// `least` (2, M): of dgate and dup, magnitudes of the scales that a row's blocks have at least. A warp has a row at
// a time.
template <typename By>
__global__ void __launch_bounds__(kMeasuring, 2)
    measure_rows(const BackwardInputs in, const EndedRows all, int64_t cols, ScaleRule rule, By by, uint8_t* least) {
  __shared__ SigmoidTable<By> table;
  static_assert(kSpan == 32 * 8);  // a vector of each lane
  const int lane = threadIdx.x % 32;
  const int64_t rows = all.count();
  const bool exists = lane * 8 < cols;
  Vector8 dh, gate, up;
  float prob = 1;
  const auto fetch_row = [&](int64_t row) {
    const int64_t at = row * cols + lane * 8;
    dh = load_vector<true>(in.dh + at, exists, 8);
    gate = load_vector<true>(in.gate + at, exists, 8);
    up = load_vector<true>(in.up + at, exists, 8);
    if (in.prob) prob = __ldg(in.prob + row);
  };
  const int64_t step = int64_t{gridDim.x} * (kMeasuring / 32);
  int64_t row = int64_t{blockIdx.x} * (kMeasuring / 32) + threadIdx.x / 32;
  if (row < rows) fetch_row(row);
  table.fill(by);
  __syncthreads();
  for (; row < rows; row += step) {
    Vector8 dgate, dup;
    float sum = 0;
    backward(dh, gate, up, table, by, prob, dgate, dup, sum);
    if (row + step < rows) fetch_row(row + step);
    uint32_t word = row_word({largest(dgate), largest(dup)});
#pragma unroll
    for (int lanes = 1; lanes < kBlock / 8; lanes *= 2)
      word = Bf16x2::max_words(word, __shfl_xor_sync(~0u, word, lanes));
    const auto largest_magnitude = [&](int which) {
      const uint32_t magnitude = e8m0_from_amax(Bf16x2::word_bits(word, which), rule) + 1 & 0xFF;
      return __reduce_max_sync(~0u, exists ? magnitude : 0);
    };
    const uint32_t magnitudes = largest_magnitude(0) | largest_magnitude(1) << 8;
    const uint32_t both = least_magnitudes(magnitudes, kGradientHeadroom);
    if (lane < 2) least[lane * all.rows + row] = both >> lane * 8;
  }
}

}  // namespace mxep::cuda
