// A tile of MXFP8 codes, quantized along columns and folded: the bytes of folded_tile.cuh on the bf16 values of the
// codes. A lane keeps its 32 rows x 4 columns as codes, half the registers of values, and the whole kernel takes 10
// instructions per value, 17 with bf16 values.
//
//   codes, row scales --> maxima of columns --> scale bytes        per two values: unpack, multiply, half a maximum
//   codes, row scales, scales of columns and spans --> qf_t        unpack, multiply three times, pack
//
// The arithmetic is f16, whose limits do the rounding:
//
//   p = code * 2^(7 + row - largest)   row: the row's scale byte, largest: the largest one of the block. |p| <= 57344
//   q = p * 2^(largest - 7 - column - 15)   the code of the column's block times 2^-15: f16's subnormals have the
//                                           spacing 2^-24, E4M3's 2^-9, and larger values have 4 significant bits
//   folded = q * 2^(15 + column - span)     exact, or too small for E4M3; packed, which is the second rounding
//
// p loses bits below 2^-24. Such values are at most 448 * 2^-25, and E4M3 rounds them to zero at the scale of a column
// whose largest p is 4 or more. Bf16 holds the values of blocks with scale bytes of 3 to 246 exactly; values of blocks
// with smaller bytes are zeros in columns with bytes of 21 and more. A warp with another column, that is neither zeros
// alone nor NaN, takes the bf16 values instead. tests/kernels/headers/test_code_tile.py tries all codes and scales.
#pragma once

#include "cuda/mx_math.cuh"
#include "fold/folded_tile.cuh"
#include "formats.h"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {

// A half of a word in both halves, as part of an operand like the choice in f16x2_from_codes.
__device__ inline uint32_t both_halves(uint32_t word, int half) {
  uint32_t both;
  if (half)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }" : "=r"(both) : "r"(word));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(both) : "r"(word));
  return both;
}

// `a` times `b`, as pairs of f16.
__device__ inline uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ inline uint32_t f16x2_magnitude(uint32_t values) {
  uint32_t magnitude;
  asm("abs.f16x2 %0, %1;" : "=r"(magnitude) : "r"(values));
  return magnitude;
}

// The smaller magnitudes, with the signs of `values`; NaN where they are NaN.
__device__ inline uint32_t at_most(uint32_t values, uint32_t limits) {
  uint32_t smaller;
  asm("min.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(smaller) : "r"(values), "r"(limits));
  return smaller;
}

// fp32 bits of a half.
__device__ inline uint32_t float_from_f16(uint32_t values, int half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(values >> half * 16)));
  return __float_as_uint(value);
}

__device__ inline uint32_t f16x2_from_floats(uint32_t low, uint32_t high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(__uint_as_float(low)), "f"(__uint_as_float(high)));
  return both;
}

// The codes of two rows of two columns.
__device__ inline uint32_t codes_from_f16(uint32_t row0, uint32_t row1) {
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "r"(row0), "r"(row1));
  return codes;
}

// The bf16 values of codes and scales.
struct MxValues {
  // Two codes, in the upper bytes of two halves -> values times 2^-120, which are the bits of E4M3 in the fields of
  // bf16. The code of NaN, 0x7F, gets all exponent bits.
  static __device__ Bf16x2 unscaled(uint32_t codes) {
    const uint32_t magnitude = codes >> 4 & 0x07F007F0u, nan = magnitude + 0x00100010u & 0x08000800u;
    return {codes & 0x80008000u | magnitude | nan * 15};
  }
  // Codes 2 * pair and 2 * pair + 1 of four times `scale`: exact up to the one rounding to bf16.
  static __device__ Bf16x2 scaled(uint32_t codes, int pair, Bf16x2 scale) {
    return unscaled(__byte_perm(codes, 0, pair ? 0x3424 : 0x1404)) * Bf16x2{0x7B807B80u} * scale;  // 2^120
  }
  // A scale in both halves.
  static __device__ Bf16x2 scale_of(uint32_t byte) {
    const uint32_t bits = byte == kE8m0Nan ? 0x7FC0u : byte ? byte << 7 : 0x0040u;
    return {bits * 0x00010001u};
  }
};

// Shared memory: a factor of 16 bits for each row and block.
template <typename T>
struct RowFactors {
  uint4 factors[T::kDown][T::kBlocks][kBlock / 8];
};

// fp32 bits of 4, the smallest maximum of p that gives exact codes; the smallest byte of its column, and the largest
// byte of a row.
inline constexpr uint32_t kSmallestMaximum = 0x40800000u;
inline constexpr int kSmallestColumn = 21, kLargestRow = 246;
// 448 * 2^-15 twice in f16, the limit of q.
inline constexpr uint32_t kLargestCode = 0x23002300u;

template <typename T>
struct CodeTile {
  static_assert(T::kColumns == 4 && T::kBlockLanes == 8);
  uint32_t codes[kBlock];  // four columns of a row each
  uint32_t scales[4];      // bytes of rows lane % 8 * 4 to lane % 8 * 4 + 3, of the lane's block
  uint4* factors;          // of the rows of the lane's block
  bool exists;
  bool in_bf16;           // the warp takes the bf16 values
  uint32_t to_scales[2];  // of the columns, from p to q

  __device__ void set_factors(uint32_t low, uint32_t high) {
    __syncwarp();
    reinterpret_cast<uint2*>(factors)[threadIdx.x % T::kBlockLanes] = make_uint2(low, high);
    __syncwarp();
  }
  // Calls use(r, codes, word, half) of rows `first` to `first` + kCount - 1, whose factor is a half of `word`.
  template <int kCount>
  __device__ void for_rows(int first, auto use) const {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const uint4 eight = factors[first / 8 + i];
      const uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int r = 0; r < 8; ++r) use(8 * i + r, codes[first + 8 * i + r], words[r / 2], r % 2);
    }
  }
};

// Scale bytes of the blocks of a lane's columns, from bf16 values.
template <typename T>
__device__ uint32_t bf16_column_bytes(CodeTile<T>& tile, ScaleRule rule) {
  uint32_t scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = MxValues::scale_of(tile.scales[i]).bits;
  tile.set_factors(__byte_perm(scales[0], scales[1], 0x5410), __byte_perm(scales[2], scales[3], 0x5410));
  Bf16x2 largest[2];
  tile.template for_rows<kBlock>(0, [&](int r, uint32_t codes, uint32_t word, int half) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const Bf16x2 values = MxValues::scaled(codes, p, Bf16x2::of_row(word, half));
      largest[p] = r ? max_magnitude(largest[p], values) : values;  // ptxas drops values whose maximum with 0 is taken
    }
  });
  uint32_t bytes = 0;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const Bf16x2 amax = largest[p].magnitude();
    bytes |= (e8m0_from_amax(amax.low_bits(), rule) | e8m0_from_amax(amax.high_bits(), rule) << 8) << p * 16;
  }
  return bytes;
}

// Scale bytes of the blocks of a lane's columns. Called by whole warps, before stage_columns.
template <typename T>
__device__ uint32_t column_bytes(CodeTile<T>& tile, ScaleRule rule) {
  int rows[4], largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rows[i] = static_cast<int>(tile.scales[i]);
    largest = max(largest, rows[i] == kE8m0Nan ? 0 : rows[i]);
  }
#pragma unroll
  for (int step = 1; step < T::kBlockLanes; step *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  uint32_t powers[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    powers[i] = rows[i] == kE8m0Nan ? kNan : static_cast<uint32_t>(max(rows[i] - largest, -32) + 7 + 127) << 23;
  tile.set_factors(f16x2_from_floats(powers[0], powers[1]), f16x2_from_floats(powers[2], powers[3]));

  uint32_t maxima[2] = {}, before[2] = {};  // magnitudes of f16 order as integers do, NaN is above
  tile.template for_rows<kBlock>(0, [&](int r, uint32_t codes, uint32_t word, int half) {
    const uint32_t factor = both_halves(word, half);
    const uint32_t left = times(f16x2_magnitude(f16x2_from_codes(codes, 0)), factor);
    const uint32_t right = times(f16x2_magnitude(f16x2_from_codes(codes, 1)), factor);
    if (r % 2) {
      maxima[0] = __vimax3_u16x2(maxima[0], before[0], left);
      maxima[1] = __vimax3_u16x2(maxima[1], before[1], right);
    } else {
      before[0] = left;
      before[1] = right;
    }
  });

  uint32_t bytes = 0, inverse[4];
  bool exact = true, zeros = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t amax = float_from_f16(maxima[i / 2], i % 2), exponent = (amax + rule.round_up) >> 23;
    const int byte = static_cast<int>(exponent) + largest - (127 + 15);
    const bool nan = amax > kInf, zero = amax == 0;
    zeros |= zero;
    exact &= nan || zero || amax >= kSmallestMaximum && byte >= kSmallestColumn && largest <= kLargestRow;
    bytes |= (nan ? kE8m0Nan : zero ? 0 : byte & 0xFF) << i * 8;
    inverse[i] = nan ? kNan : zero ? 0 : (120 - exponent + 127) << 23;
  }
  if (__any_sync(~0u, zeros)) {
    uint32_t ones = 0;
#pragma unroll
    for (int r = 0; r < kBlock; ++r) ones |= tile.codes[r];
    // Codes other than zeros, in a column of which all p are zeros.
    exact &= !(__vcmpeq4(bytes, 0) & ones & 0x7F7F7F7Fu);
  }
  tile.to_scales[0] = f16x2_from_floats(inverse[0], inverse[1]);
  tile.to_scales[1] = f16x2_from_floats(inverse[2], inverse[3]);
  tile.in_bf16 = __any_sync(~0u, tile.exists && !exact);
  return tile.in_bf16 ? bf16_column_bytes(tile, rule) : bytes;
}

// Stages the codes of a tile's columns. `to_spans`: from q to the spans' scales. kSaturate: a rule rounded the scale of
// a maximum above 448 down.
template <bool kSaturate, typename T>
__device__ void stage_codes(const CodeTile<T>& tile, const uint32_t (&to_spans)[2],
                            StagedCodes<T::kRows, T::kCols, T::kColumns>& staged) {
  const ThreadCoord<T> thread;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t columns[4][4], folded[2][4];
    tile.template for_rows<16>(16 * half, [&](int r, uint32_t codes, uint32_t word, int side) {
      const uint32_t factor = both_halves(word, side),
                     values[] = {f16x2_from_codes(codes, 0), f16x2_from_codes(codes, 1)};
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        uint32_t q = times(times(values[p], factor), tile.to_scales[p]);
        if constexpr (kSaturate) q = at_most(q, kLargestCode);
        folded[p][r % 4] = times(q, to_spans[p]);
        if (r % 4 < 3) continue;
        const uint32_t upper = codes_from_f16(folded[p][0], folded[p][1]);
        const uint32_t lower = codes_from_f16(folded[p][2], folded[p][3]);
        columns[2 * p][r / 4] = __byte_perm(upper, lower, 0x6420);
        columns[2 * p + 1][r / 4] = __byte_perm(upper, lower, 0x7531);
      }
    });
    const int chunk = staged.swizzled(2 * (thread.row / kBlock) + half, thread.col);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      staged.codes[thread.col + i][chunk] = make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
  }
}

// The same by bf16 values.
template <typename T>
__device__ void stage_bf16(const CodeTile<T>& tile, uint32_t bytes, const uint32_t (&powers)[4],
                           StagedCodes<T::kRows, T::kCols, T::kColumns>& staged) {
  const ThreadCoord<T> thread;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const TwoScales two{bytes >> p * 16 & 0xFF, bytes >> (p * 16 + 8) & 0xFF};
    const auto factor = two.template factor<Bf16x2>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Bf16x2 values[16];
      tile.template for_rows<16>(16 * half, [&](int r, uint32_t codes, uint32_t word, int side) {
        values[r] = MxValues::scaled(codes, p, Bf16x2::of_row(word, side));
      });
      uint4 left, right;
      column_codes(values, factor, left, right);
      const int chunk = staged.swizzled(2 * (thread.row / kBlock) + half, thread.col);
      staged.codes[thread.col + 2 * p][chunk] = folded(left, powers[2 * p]);
      staged.codes[thread.col + 2 * p + 1][chunk] = folded(right, powers[2 * p + 1]);
    }
  }
}

// Stages the codes of a tile's columns, as for a tile of values.
template <typename T>
__device__ void stage_columns(const CodeTile<T>& tile, uint32_t bytes, ScaleRule rule,
                              StagedCodes<T::kRows, T::kCols, T::kColumns>& codes, auto scale_of) {
  const ThreadCoord<T> thread;
  uint32_t powers[4];
  const int more = tile.in_bf16 ? 0 : 15;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int shift = (bytes >> i * 8 & 0xFF) - scale_of(thread.col + i);
    powers[i] = f16x2_power(max(shift, -32) + more);
  }
  if (tile.in_bf16) return stage_bf16(tile, bytes, powers, codes);
  const uint32_t to_spans[] = {__byte_perm(powers[0], powers[1], 0x5410), __byte_perm(powers[2], powers[3], 0x5410)};
  rule.round_up ? stage_codes<false>(tile, to_spans, codes) : stage_codes<true>(tile, to_spans, codes);
}

// write_lines with fewer instructions where the tile has all of its columns.
template <typename T>
__device__ void write_columns(const StagedCodes<T::kRows, T::kCols, T::kColumns>& staged, uint8_t* out, int64_t pitch,
                              int64_t cols, int64_t chunks) {
  constexpr int kChunks = T::kRows / 16, kStep = T::kThreads / kChunks;
  static_assert(kChunks == 16 && kStep == 4 * T::kColumns);  // a step changes the slot of a chunk by 4
  if (cols < T::kCols)
    return write_lines<T::kThreads>(staged.codes, staged.swizzled, reinterpret_cast<uint4*>(out), pitch / 16, cols,
                                    chunks);
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  if (chunk >= chunks) return;
  const int slot = staged.swizzled(chunk, first);
  const uint4* from[] = {&staged.codes[first][slot], &staged.codes[first][slot ^ 4]};
  out += first * pitch + chunk * 16;
#pragma unroll
  for (int i = 0; i < T::kCols / kStep; ++i)
    *reinterpret_cast<uint4*>(at_row(out, static_cast<uint32_t>(pitch), i * kStep)) = from[i % 2][i * kStep * kChunks];
}

}  // namespace mxep::cuda
