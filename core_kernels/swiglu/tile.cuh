// A tile of computed values, quantized along rows or along columns.
//
//    load_vector           16 bytes of 4 rows a lane, loaded while earlier rows or columns are processed
//
//    scale_rows            4 lanes share a block and exchange maxima until each has one row's scale; codes go to q
//
//    stage                 values to shared memory
//
//    scale_columns         a lane has 32 rows of 2 columns, so that an amax needs no exchange; codes to shared memory
//
//    StagedColumns::write  codes and scales, in whole cache lines of q_t
#pragma once

#include "cuda/tile.cuh"

namespace mxep::cuda {

inline constexpr int kRowsAtOnce = 4;

template <int kTileRows, int kTileCols>
struct SharedTile {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kThreads = kRows * kCols / 64;
  static constexpr int kPairs = 4, kVectors = kCols / 8;  // per vector; per row
  static constexpr int kBlockLanes = kBlock / 8;          // lanes that share a block of a row
  static constexpr int kPasses = kRows / (kThreads / kVectors * kRowsAtOnce);

  using Values = Bf16x2[kRows][kCols / 2];
  using Columns = StagedColumns<kRows, kCols, 2>;
};

// A lane's values of a row.
struct alignas(16) Vector8 {
  Bf16x2 at[4];
};

// A thread's vectors in one pass: kRowsAtOnce rows from `row` of the tile on, at column `col` of the tile.
struct PassSlice {
  int row, col;
  int rows;         // that exist
  int64_t columns;  // that exist from `col` on
  int64_t offset;   // of the first value in the matrix

  template <typename T>
  static __device__ PassSlice of(const Grid& grid, const TileCoord& at, int pass) {
    PassSlice slice;
    slice.row = (pass * (T::kThreads / T::kVectors) + static_cast<int>(threadIdx.x) / T::kVectors) * kRowsAtOnce;
    slice.col = threadIdx.x % T::kVectors * 8;
    slice.columns = grid.cols - at.col - slice.col;
    slice.rows = slice.columns > 0 ? static_cast<int>(min(grid.rows - at.row - slice.row, int64_t{kRowsAtOnce})) : 0;
    slice.offset = (at.row + slice.row) * grid.cols + at.col + slice.col;
    return slice;
  }
};

// One row's vector. kVector: rows start at multiples of 16 bytes. Zero outside the matrix.
template <bool kVector>
__device__ Vector8 load_vector(const bf16* from, bool exists, int64_t columns) {
  Vector8 vector;
  if constexpr (kVector) {
    const uint4 bits = exists ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
    vector = reinterpret_cast<const Vector8&>(bits);
  } else {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      vector.at[p] = pair_of(exists && 2 * p < columns ? from[2 * p] : bf16{0},
                             exists && 2 * p + 1 < columns ? from[2 * p + 1] : bf16{0});
  }
  return vector;
}

// fp32 bits of the amax that a lane has in the end, of row lane % kRowsAtOnce in a block of four lanes. `words`: the
// lane's own maxima of its rows, two in a word.
__device__ inline uint32_t exchanged_amax(uint32_t (&words)[kRowsAtOnce / 2]) {
  static_assert(kBlock / 8 == kRowsAtOnce);  // each lane has one row
  exchange_halves<kRowsAtOnce / 2, 1>(words, Bf16x2::max_words);
  const uint32_t two = Bf16x2::max_words(words[0], __shfl_xor_sync(~0u, words[0], 1));
  return Bf16x2::word_bits(two, threadIdx.x % kRowsAtOnce % 2);
}

// Quantizes `rows` rows. `q` and `sf`: addresses of the first vector's codes and of its block's scale.
template <typename T>
__device__ void scale_rows(const Vector8 (&vectors)[kRowsAtOnce], ScaleRule rule, int rows, uint8_t* q, int64_t q_pitch,
                           uint8_t* sf, int64_t sf_pitch) {
  uint32_t words[kRowsAtOnce / 2];
#pragma unroll
  for (int w = 0; w < kRowsAtOnce / 2; ++w) {
    Bf16x2 largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = vectors[2 * w + i].at[0].magnitude();
#pragma unroll
      for (int p = 1; p < T::kPairs; ++p) largest[i] = max_magnitude(largest[i], vectors[2 * w + i].at[p].magnitude());
    }
    words[w] = row_word(largest);
  }
  const uint32_t byte = e8m0_from_amax(exchanged_amax(words), rule);
  const int lane_row = threadIdx.x % kRowsAtOnce;
  if (lane_row < rows) sf[lane_row * sf_pitch] = byte;

  const uint32_t lane_factor = Bf16x2::both(inverse_scale(byte)).bits;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, q += q_pitch) {
    const Bf16x2 factor{__shfl_sync(~0u, lane_factor, r, kRowsAtOnce)};
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Bf16x2 x = vectors[r].at[2 * i] * factor, y = vectors[r].at[2 * i + 1] * factor;
      codes[i] = e4m3x4(x.low(), x.high(), y.low(), y.high());
    }
    if (r < rows) *reinterpret_cast<uint2*>(q) = make_uint2(codes[0], codes[1]);
  }
}

template <typename T>
__device__ void stage(const Vector8 (&vectors)[kRowsAtOnce], const PassSlice& slice, typename T::Values& values) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) *reinterpret_cast<Vector8*>(&values[slice.row + r][slice.col / 2]) = vectors[r];
}

template <typename T>
__device__ void scale_columns(const typename T::Values& values, ScaleRule rule, typename T::Columns& columns) {
  constexpr int kAcross = T::kCols / 2;
  const int across = threadIdx.x % kAcross, block = threadIdx.x / kAcross;
  Bf16x2 lane_row[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) lane_row[r] = values[block * kBlock + r][across];
  columns.scale(lane_row, rule, block, 2 * across);
}

}  // namespace mxep::cuda
