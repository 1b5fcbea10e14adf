// How clusters share the pairs of tiles of a product. Clusters of eight CTAs compute blocks of four pairs; clusters of
// two, on the multiprocessors that hold no more clusters of eight, compute the pairs of other blocks.
//
//   round    | turns x a block for each cluster of eight | turns x a pair for each cluster of two: whole blocks |
#pragma once

#include <cstdint>

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2, kBlockCtas = 8, kPairsOfBlock = kBlockCtas / kCluster;

// What the clusters of a launch compute: pairs, blocks, or pairs of blocks beside a launch that computes blocks.
enum class Part { kPairs, kBlocks, kPairsOfBlocks };
template <Part kPart>
constexpr int kCtasOf = kPart == Part::kBlocks ? kBlockCtas : kCluster;  // of a cluster

// `clusters` of eight CTAs take blocks and `pairs` of two take pairs of blocks, in rounds: `turns` blocks for each
// cluster, then `turns` pairs for each pair, which are whole blocks. Without clusters there are no blocks.
struct Shares {
  int clusters, pairs, turns;

  __host__ __device__ int block() const { return clusters ? kPairsOfBlock : 1; }  // in pairs
};

inline Shares shares_of(int clusters, int pairs) {
  Shares shares{clusters, pairs, 1};
  while (pairs * shares.turns % shares.block() != 0) ++shares.turns;
  return shares;
}

// The pairs of one cluster, of blocks their first ones: `turns` of them `step` apart, then `skip` to the next round.
// `first`: of cluster 0.
struct Turns {
  int first, step, turns, skip, to_next_cluster;

  __device__ int first_of(int cluster) const { return first + cluster * to_next_cluster; }
  // The i-th pair of a cluster, and how many of its pairs are below n.
  __device__ int number(int cluster, int i) const { return first_of(cluster) + i * step + i / turns * skip; }
  __device__ int below(int cluster, int n) const {
    const int round = turns * step + skip, left = n % round - first_of(cluster);
    return n / round * turns + min(max(left + step - 1, 0) / step, turns);
  }
};

inline Turns turns_of(const Shares& shares, Part part) {
  const int of_clusters = shares.clusters * shares.block(), of_pairs = shares.pairs, n = shares.turns;
  if (part == Part::kBlocks) return {0, of_clusters, n, of_pairs * n, shares.block()};
  return {of_clusters * n, of_pairs, n, of_clusters * n, 1};
}

}  // namespace mxep::cuda::sm90
