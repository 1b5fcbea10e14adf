// The lines of cuda.cu with a larger block than their scale allows, once more: folded to that scale, which the
// larger blocks exceed, and then to the scale of the largest block.
//
//   magnitudes of lines --> the lines to rewrite, mostly none --.
//   x ----------------------------------------------------------+--> codes and scales of these lines
//
//   rewrite_rows      256 rows of a CTA; a warp takes one, in steps of 128 values
//   rewrite_columns   128 columns of a CTA; a thread takes 32 rows of four neighbours, of which it writes those to
//                     rewrite: neighbouring threads read neighbouring columns
#pragma once

#include "fold/matrix/tile.cuh"

namespace mxep::cuda {

inline constexpr int kRewriters = 256, kRowsOfCta = kRewriters, kColumnsOfCta = 128, kColumnsOfThread = 4;

// Numbers below kCount, in any order.
template <int kCount>
struct List {
  uint32_t count;
  uint16_t numbers[kCount];

  // Called by all threads, of which thread i < kCount knows whether i is wanted.
  __device__ void collect(bool wanted) {
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (wanted) numbers[atomicAdd(&count, 1u)] = threadIdx.x;
    __syncthreads();
  }
};

// The scale that the blocks of a line have at least; -1: none.
__device__ inline int least_scale(uint32_t first) {
  return static_cast<int>(least_magnitudes(first, kWeightHeadroom)) - 1;
}

// Four values of a row of a block that eight neighbouring lanes have.
__device__ inline uint32_t row_codes(uint2 values, int least, uint32_t scale, ScaleRule rule) {
  const Bf16x2 two[2] = {{values.x}, {values.y}};
  uint32_t largest = max_magnitude(two[0], two[1]).magnitude().bits;
#pragma unroll
  for (int step = 1; step < 8; step *= 2) largest = Bf16x2::max_words(largest, __shfl_xor_sync(~0u, largest, step));
  const uint32_t low = Bf16x2::word_bits(largest, 0), high = Bf16x2::word_bits(largest, 1);
  const uint32_t byte = e8m0_from_amax(max(low, high), rule);  // as integers: NaN is the largest
  const uint32_t both[2] = {inverse_scale(byte), inverse_scale(byte)};
  const Bf16x2 factor{Bf16x2::pack_word(both)}, a = two[0] * factor, b = two[1] * factor;
  return TwoFolds::of(byte, least, scale)(e4m3x4(a.low(), a.high(), b.low(), b.high()));
}

__global__ void __launch_bounds__(kRewriters)
    rewrite_rows(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ List<kRowsOfCta> list;
  const int64_t first = int64_t{blockIdx.x} * kRowsOfCta, own = first + threadIdx.x, cols = p.grid.cols;
  const bool wanted = own < p.rows.count && p.rows.larger[own] != 0;
  if (!__syncthreads_or(wanted)) return;
  list.collect(wanted);
  const int lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x / 32; i < list.count; i += kRewriters / 32) {
    const int64_t row = first + list.numbers[i];
    const uint32_t scale = p.rows.larger[row] - 1;
    const int least = least_scale(p.rows.first[row]);
    if (lane == 0) p.row_sf[row] = scale;
    for (int64_t at = 0; at < cols; at += 128) {
      const int64_t col = at + lane * 4;
      const bool exists = col < cols;
      const uint2 values = exists ? __ldg(reinterpret_cast<const uint2*>(x + row * cols + col)) : uint2{};
      const uint32_t codes = row_codes(values, least, scale, rule);
      if (exists) *reinterpret_cast<uint32_t*>(p.qf + row * cols + col) = codes;
    }
  }
}

__global__ void __launch_bounds__(kRewriters, 2)
    rewrite_columns(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  __shared__ List<kColumnsOfCta / kColumnsOfThread> list;
  const int64_t first = int64_t{blockIdx.x} * kColumnsOfCta, rows = p.grid.rows, cols = p.grid.cols;
  const auto larger_of = [&](int64_t line) { return *reinterpret_cast<const uint4*>(p.columns.larger + line); };
  const int64_t own = first + threadIdx.x * kColumnsOfThread;
  bool wanted = false;
  if (threadIdx.x < kColumnsOfCta / kColumnsOfThread && own < p.columns.count) {
    const uint4 of = larger_of(own);
    wanted = of.x | of.y | of.z | of.w;
  }
  if (!__syncthreads_or(wanted)) return;
  list.collect(wanted);
  const auto units = static_cast<uint32_t>(list.count * (rows / kBlock));
  for (uint32_t unit = threadIdx.x; unit < units; unit += kRewriters) {
    const int64_t line = first + list.numbers[unit % list.count] * kColumnsOfThread;
    const int64_t matrix = line / cols, col = line % cols, row = int64_t{unit / list.count} * kBlock;
    const uint4 larger = larger_of(line);
    const bf16* from = x + (matrix * rows + row) * cols + col;
    uint2 vectors[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; ++r) vectors[r] = __ldg(reinterpret_cast<const uint2*>(from + r * cols));
#pragma unroll
    for (int pair = 0; pair < kColumnsOfThread / 2; ++pair) {
      Bf16x2 values[kBlock];
#pragma unroll
      for (int r = 0; r < kBlock; ++r) values[r] = {pair ? vectors[r].y : vectors[r].x};
      const auto two = TwoScales::of(values, rule);
      const uint32_t of_lines[2] = {pair ? larger.z : larger.x, pair ? larger.w : larger.y};
      const uint32_t bytes[2] = {two.low, two.high};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 codes[2];
        column_codes(values + 16 * half, two.template factor<Bf16x2>(), codes[0], codes[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (of_lines[i] == 0) continue;
          const int64_t to = line + 2 * pair + i;
          const uint32_t scale = of_lines[i] - 1;
          const auto folds = TwoFolds::of(bytes[i], least_scale(p.columns.first[to]), scale);
          reinterpret_cast<uint4*>(p.qf_t + to * rows + row)[half] = folds(codes[i]);
          if (row == 0) p.col_sf[to] = scale;
        }
      }
    }
  }
}

}  // namespace mxep::cuda
