// A tile of values that are made in the kernel, scaled along rows, along columns or both.
//
//    load_piece       16 bytes of 4 rows a lane, fetched while earlier rows or the last columns are worked on
//
//    scale_rows       4 lanes share a block and trade maxima until each has one row's scale; codes go to q
//
//    keep             the values, into shared memory
//
//    scale_columns    a lane: 32 rows of 2 columns, so an amax needs no other lane; codes to shared memory
//
//    Columns::write   codes and scales, in whole cache lines of q_t
#pragma once

#include "cuda/tile.cuh"

namespace mxep::cuda {

inline constexpr int kRowsAtOnce = 4;

template <int kTileRows, int kTileCols>
struct SharedTile {
  static constexpr int kRows = kTileRows, kCols = kTileCols, kThreads = kRows * kCols / 64;
  static constexpr int kPairs = 4, kPieces = kCols / 8;  // of a piece; of a row
  static constexpr int kBlockLanes = kBlock / 8;         // lanes that share a block of a row
  static constexpr int kPasses = kRows / (kThreads / kPieces * kRowsAtOnce);

  using Values = Bf16x2[kRows][kCols / 2];
  using Columns = cuda::Columns<kRows, kCols, 2>;
};

// What a lane has of a row.
struct alignas(16) Piece {
  Bf16x2 at[4];
};

// The pieces that a thread has in one pass: kRowsAtOnce rows from `row` of the tile on, at column `col` of it.
struct Spot {
  int row, col;
  int rows;         // that exist
  int64_t columns;  // that exist from `col` on
  int64_t offset;   // of the first in the matrix

  template <typename T>
  static __device__ Spot of(const Grid& grid, const Place& at, int pass) {
    Spot spot;
    spot.row = (pass * (T::kThreads / T::kPieces) + static_cast<int>(threadIdx.x) / T::kPieces) * kRowsAtOnce;
    spot.col = threadIdx.x % T::kPieces * 8;
    spot.columns = grid.cols - at.col - spot.col;
    spot.rows = spot.columns > 0 ? static_cast<int>(min(grid.rows - at.row - spot.row, int64_t{kRowsAtOnce})) : 0;
    spot.offset = (at.row + spot.row) * grid.cols + at.col + spot.col;
    return spot;
  }
};

// One row's piece; kVector: rows start at multiples of 16 bytes. Zero where the matrix has nothing.
template <bool kVector>
__device__ Piece load_piece(const bf16* from, bool exists, int64_t columns) {
  Piece piece;
  if constexpr (kVector) {
    const uint4 bits = exists ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
    piece = reinterpret_cast<const Piece&>(bits);
  } else {
#pragma unroll
    for (int p = 0; p < 4; ++p)
      piece.at[p] = pair_of(exists && 2 * p < columns ? from[2 * p] : bf16{0},
                            exists && 2 * p + 1 < columns ? from[2 * p + 1] : bf16{0});
  }
  return piece;
}

// Scales `rows` rows. `q` and `sf`: where the first piece's codes and its block's scale go.
template <typename T>
__device__ void scale_rows(const Piece (&pieces)[kRowsAtOnce], ScaleRule rule, int rows, uint8_t* q, int64_t q_pitch,
                           uint8_t* sf, int64_t sf_pitch) {
  uint32_t words[kRowsAtOnce / 2];
#pragma unroll
  for (int w = 0; w < kRowsAtOnce / 2; ++w) {
    Bf16x2 largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = pieces[2 * w + i].at[0].magnitude();
#pragma unroll
      for (int p = 1; p < T::kPairs; ++p) largest[i] = max_magnitude(largest[i], pieces[2 * w + i].at[p].magnitude());
    }
    words[w] = row_word(largest);
  }
  exchange_halves<T::kBlockLanes / 2, 1>(words, Bf16x2::max_words);
  const uint32_t two = Bf16x2::max_words(words[0], __shfl_xor_sync(~0u, words[0], 1));
  static_assert(T::kBlockLanes == kRowsAtOnce);  // so that each lane has one row
  const int own = threadIdx.x % kRowsAtOnce;
  const uint32_t byte = e8m0_from_amax(Bf16x2::word_bits(two, own % 2), rule);
  if (own < rows) sf[own * sf_pitch] = byte;

  const uint32_t own_factor = Bf16x2::both(inverse_scale(byte)).bits;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, q += q_pitch) {
    const Bf16x2 factor{__shfl_sync(~0u, own_factor, r, kRowsAtOnce)};
    uint32_t codes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Bf16x2 x = pieces[r].at[2 * i] * factor, y = pieces[r].at[2 * i + 1] * factor;
      codes[i] = e4m3x4(x.low(), x.high(), y.low(), y.high());
    }
    if (r < rows) *reinterpret_cast<uint2*>(q) = make_uint2(codes[0], codes[1]);
  }
}

template <typename T>
__device__ void keep(const Piece (&pieces)[kRowsAtOnce], const Spot& spot, typename T::Values& values) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) *reinterpret_cast<Piece*>(&values[spot.row + r][spot.col / 2]) = pieces[r];
}

template <typename T>
__device__ void scale_columns(const typename T::Values& values, ScaleRule rule, typename T::Columns& columns) {
  constexpr int kAcross = T::kCols / 2;
  const int across = threadIdx.x % kAcross, block = threadIdx.x / kAcross;
  Bf16x2 own[kBlock];
#pragma unroll
  for (int r = 0; r < kBlock; ++r) own[r] = values[block * kBlock + r][across];
  columns.scale(own, rule, block, 2 * across);
}

}  // namespace mxep::cuda
