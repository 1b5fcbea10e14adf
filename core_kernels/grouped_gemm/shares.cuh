// How the clusters of a product share its pairs of tiles. Clusters of eight CTAs compute blocks of four pairs. The
// multiprocessors that hold no more of them run clusters of two, which compute the pairs of other blocks.
//
//   a round    | `turns` blocks for each cluster of eight | whole blocks: `turns` pairs for each cluster of two |
#pragma once

#include <cstdint>

namespace mxep::cuda::sm90 {

constexpr int kCluster = 2, kBlockCtas = 8, kPairsOfBlock = kBlockCtas / kCluster;

// What the clusters of a launch compute: pairs, blocks, or pairs of blocks beside a launch that computes blocks.
enum class Part { kPairs, kBlocks, kPairsOfBlocks };
template <Part kPart>
constexpr int kCtasOf = kPart == Part::kBlocks ? kBlockCtas : kCluster;  // of a cluster

// How many clusters of eight and of two there are. Without clusters of eight there are no blocks.
struct Shares {
  int eights, twos, turns;

  __host__ __device__ int block() const { return eights ? kPairsOfBlock : 1; }  // in pairs
};

inline Shares shares_of(int eights, int twos) {
  Shares shares{eights, twos, 1};
  while (twos * shares.turns % shares.block() != 0) ++shares.turns;
  return shares;
}

// The pairs of each cluster of a launch; a block is named by its first pair. A cluster's pairs of a round are `step`
// apart, and the next round is `skip` further. `first`: the first pair of cluster 0.
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
  const int of_eights = shares.eights * shares.block(), of_twos = shares.twos, n = shares.turns;  // pairs of a turn
  if (part == Part::kBlocks) return {0, of_eights, n, of_twos * n, shares.block()};
  return {of_eights * n, of_twos, n, of_eights * n, 1};
}

}  // namespace mxep::cuda::sm90
