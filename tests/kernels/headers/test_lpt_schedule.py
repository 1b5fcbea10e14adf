"""The K-grouped tiles of grouped_gemm/schedule/schedule.cuh, compiled for the CPU: each value of every group's output
belongs to one tile of one CTA. The last cluster ends about when it would if each took the next pair when it is free.

The 384 threads of a CTA compute grouped_gemm/schedule/lpt_schedule.cuh as in cta.h. Undefined behaviour ends the
program."""

import subprocess
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PROGRAM = r"""
#include "cta.h"
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <vector>
#include "grouped_gemm/schedule/schedule.cuh"
using namespace mxep::cuda::sm90;

constexpr int kCta = 384, kM = 256, kN = 128;
LptSchedule lpt;

constexpr int kEnd = 256;  // the fixed cost of a tile, in tokens

// Counts the values of the tiles. Returns the time of each cluster, in tokens.
template <bool kDualOutput>
std::vector<int> cover(const Problem& p, std::vector<uint8_t>& times) {
  using Of = Schedule<true, kM, kN, 32, kDualOutput>;
  std::vector<int> time(p.clusters);
  for (int cluster = 0; cluster < p.clusters; ++cluster) {
    blockIdx.x = cluster * kCluster;
    cta.run(kCta, [&] { Of::template assign<kCta>(p, lpt); });
    for (int rank = 0; rank < kCluster; ++rank, ++blockIdx.x) {
      Of schedule(p, lpt);
      for (Tile tile; schedule.next(&tile);) {
        if (rank == 0) time[cluster] += tile.k_end - tile.k_begin + kEnd;
        for (int i = 0; i < min(kM, tile.rows); ++i)
          for (int j = 0; j < min(kN, tile.cols); ++j) ++times[tile.out + int64_t{i} * p.cols + j];
      }
    }
  }
  return time;
}

// When the last cluster ends if each free cluster takes the next pair, and pairs of the longest group come first.
int best(const Problem& p, int pairs) {
  std::vector<int> free_at(p.clusters), lengths;
  for (int i = 0, before = 0; i < p.groups; before = p.group_ends[i++]) lengths.push_back(p.group_ends[i] - before);
  std::sort(lengths.rbegin(), lengths.rend());
  for (int length : lengths)
    for (int n = 0; n < pairs; ++n) *std::min_element(free_at.begin(), free_at.end()) += length + kEnd;
  return *std::max_element(free_at.begin(), free_at.end());
}

template <bool kDualOutput>
bool right(Problem p, bool by_length) {
  const int64_t size = int64_t{p.groups} * p.rows * p.cols;
  p.second_output.to_out = size;
  std::vector<uint8_t> times(size * (kDualOutput + 1));
  const std::vector<int> time = cover<kDualOutput>(p, times);
  for (uint8_t n : times)
    if (n != 1) return false;
  // Groups whose lengths differ by less than a sixteenth are scheduled as one.
  const int pairs = p.rows / kM * (p.cols / kN) / kCluster * (kDualOutput + 1);
  return !by_length || *std::max_element(time.begin(), time.end()) <= best(p, pairs) * 17 / 16;
}

int main(int, char** arguments) {
  std::mt19937 random(0);
  const auto any = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int wrong = 0;
  for (int number = 0; number < std::atoi(arguments[1]); ++number) {
    const bool many = number % 8 == 7;
    std::vector<int32_t> ends(many ? 70 : any({1, 2, 5, 9}));
    int tokens = 0;
    for (int32_t& end : ends) end = tokens += any({0, 32, 4096, 4096, 4128, 8192, 30720});
    Problem p{};
    p.group_ends = ends.data(), p.groups = int(ends.size()), p.depth = tokens + any({0, 64});
    p.rows = many ? 512 : any({512, 1024, 1536}), p.cols = many ? 512 : any({512, 1024});
    for (int clusters : {1, any({2, 3}), any({7, 8}), any({15, 21})}) {
      p.clusters = clusters;
      wrong += !right<false>(p, !many);
      wrong += !right<true>(p, !many);
    }
  }
  std::printf("wrong: %d\n", wrong);
}
"""


@pytest.mark.parametrize("problems", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_each_value_is_in_one_tile_and_the_last_cluster_ends_early(problems: int, tmp_path: Path) -> None:
    source, program = tmp_path / "schedule.cc", tmp_path / "schedule"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover"]
    include = [f"-I{HERE}", f"-I{ROOT / 'core_kernels'}"]
    subprocess.run(["c++", "-std=c++20", "-O1", *checks, *include, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program), str(problems)], capture_output=True, text=True, timeout=200)
    assert (ran.stdout, ran.stderr) == ("wrong: 0\n", "")
