// The choice of tiles of the Hopper products: a pure function of a group's sizes, for the device and for a host that
// prints it (tests/kernels/headers/test_schedule.py).
//
//   a pair, two tiles of 256 x 128        side by side             or stacked, if that takes fewer pairs
//                                         rank 0  rank 1           rank 0  [      ]
//                                         [      ][      ]         rank 1  [      ]
//
// With equal numbers of pairs the squarer pair is better: per k-step a pair of 256 x 256 loads 512 rows, a pair of 512
// x 128 loads 640, and the GPU is power-limited. Tiles of 128 x 256 are therefore stacked if the numbers are equal.
//
// A group's rows past its whole tiles, up to 128, are in flat tiles of 128 x 256, side by side. A tile of
// 256 x 128 costs as much, and at least half of it would be other rows.
//
//   rank 0                rank 1
//   [                    ][                    ]
//
// Two products with one common operand and an output each: M-grouped, a pair has the same tile of both outputs, rank 0
// of the first and rank 1 of the second, and shares the rows of A. K-grouped, where that would load 640 rows, a pair
// belongs to one output, and pairs of both outputs alternate.
//
//   pairs of a group, in                  0  4  8      those that run at the same time form a block of the output
//   panels of a few rows of them:         1  5  9      that is about as high as wide: their parts of both operands
//                                         2  6 10      are small and stay in L2
//                                         3  7 11
#pragma once

#ifdef __CUDACC__
#define MXEP_HOST_DEVICE __host__ __device__
#else
#define MXEP_HOST_DEVICE
#endif

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2;  // CTAs of a cluster, tiles of a pair

struct TileShape {
  int m, n;
  bool flat;  // whether up to m / 2 last rows of a group are in tiles of m / 2 x 2 n
};

// The outputs of a product: one, or two, whose tiles are in one pair or in alternating pairs.
enum class Outputs { kOne, kTwoInPair, kTwoAlternating };

struct TileChoice {
  int wide = kCluster;           // tiles of a pair side by side; 1: they are stacked
  int pairs_m = 0, pairs_n = 0;  // pairs of tiles of m x n, of all outputs
  int pairs = 0;                 // with the pairs of flat tiles, which follow

  MXEP_HOST_DEVICE constexpr int high() const { return kCluster / wide; }
  // Rows of pairs in a panel. 2 to 16 panels of 256 rows measured within half a percent of each other.
  MXEP_HOST_DEVICE constexpr int panel(TileShape tile) const { return 1024 / tile.m * (high() == 1 ? 2 : 1); }
};

MXEP_HOST_DEVICE constexpr int tiles_of(int size, int tile) { return (size + tile - 1) / tile; }

template <TileShape kTile>
MXEP_HOST_DEVICE constexpr int pairs_stacked(int rows, int cols) {
  return tiles_of(rows, 2 * kTile.m) * tiles_of(cols, kTile.n);
}
template <TileShape kTile>
MXEP_HOST_DEVICE constexpr int pairs_side_by_side(int rows, int cols) {
  return tiles_of(rows, kTile.m) * tiles_of(cols, 2 * kTile.n);
}

// rows, cols: of a group in one output. K-grouped, all groups have the same.
template <TileShape kTile, Outputs kOutputs>
MXEP_HOST_DEVICE constexpr TileChoice choose_tiles(int rows, int cols_of_one) {
  const int cols = kOutputs == Outputs::kTwoInPair ? 2 * cols_of_one : cols_of_one;
  int flat_pairs = 0;
  if constexpr (kTile.flat) {
    const int rest = rows % kTile.m;
    if (rest != 0 && rest <= kTile.m / 2) {
      rows -= rest;
      flat_pairs = tiles_of(cols, kCluster * 2 * kTile.n);
    }
  }
  const int stacked = pairs_stacked<kTile>(rows, cols), side_by_side = pairs_side_by_side<kTile>(rows, cols);
  TileChoice choice;
  const bool squarer = kTile.m > kTile.n ? side_by_side <= stacked : side_by_side < stacked;
  choice.wide = kOutputs == Outputs::kTwoInPair || squarer ? kCluster : 1;
  choice.pairs_m = tiles_of(rows, choice.high() * kTile.m) * (kOutputs == Outputs::kTwoAlternating ? 2 : 1);
  choice.pairs_n = tiles_of(cols, choice.wide * kTile.n);
  choice.pairs = choice.pairs_m * choice.pairs_n + flat_pairs;
  return choice;
}

// The pairs of a K-grouped product's group, as choose_tiles counts them.
template <TileShape kTile, Outputs kOutputs>
MXEP_HOST_DEVICE constexpr int k_grouped_pairs(int rows, int cols) {
  const int stacked = pairs_stacked<kTile>(rows, cols), side_by_side = pairs_side_by_side<kTile>(rows, cols);
  return (stacked < side_by_side ? stacked : side_by_side) * (kOutputs == Outputs::kTwoAlternating ? 2 : 1);
}

}  // namespace mxep::cuda::sm90
