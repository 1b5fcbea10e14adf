"""The M-grouped tiles of grouped_gemm/schedule/schedule.cuh, compiled for the CPU: each value of the output, up to the
largest group end, belongs to one tile of one CTA. Ends that decrease, or are negative or past the rows, are among the
problems. Undefined behaviour, such as a division by zero, ends the program.

The choice of tiles of grouped_gemm/schedule/tile_choice.h, as a table."""

import subprocess
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PROGRAM = r"""
#include "cta.h"
#include "grouped_gemm/schedule/schedule.cuh"
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <vector>
using namespace mxep::cuda::sm90;

// Whether the tiles of all CTAs cover each value of the groups once; counts the flat ones. kDualOutput: one output
// follows the other.
template <int kM, int kN, bool kDualOutput, bool kFlat>
bool covered(Problem p, int first_row, int last_row, int& flat) {
  std::vector<uint8_t> tiles(size_t(kDualOutput + 1) * p.rows * p.cols);
  p.second_output.to_out = int64_t{p.rows} * p.cols;
  for (blockIdx.x = 0; blockIdx.x < p.clusters * kCluster; ++blockIdx.x) {
    cta.run(32, [&] {
      Schedule<false, kM, kN, 1, kDualOutput, kFlat> schedule(p, LptSchedule{});
      for (Tile tile; schedule.next(&tile);) {
        if (threadIdx.x != 31) continue;  // all lanes have the tile
        flat += tile.flat;
        const int height = tile.flat ? kM / 2 : kM, width = tile.flat ? 2 * kN : kN;
        for (int i = 0; i < min(height, tile.rows); ++i)
          for (int j = 0; j < min(width, tile.cols); ++j) ++tiles[tile.out + int64_t{i} * p.cols + j];
      }
    });
  }
  for (size_t i = 0; i < tiles.size(); ++i) {
    const int row = int(i / p.cols) % p.rows;
    if (tiles[i] != (first_row <= row && row < last_row)) return false;
  }
  return true;
}

int main(int, char** arguments) {
  std::mt19937 random(0);
  const auto any = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int wrong = 0, flat = 0, of_bf16 = 0;
  for (int problem = 0; problem < std::atoi(arguments[1]); ++problem) {
    std::vector<int32_t> ends(any({1, 2, 3, 9, 33, 70}));
    const bool many = ends.size() > 9, breaks = any({0, 0, 1});
    int rows = 0;
    for (int32_t& end : ends)
      end = rows += many ? any({0, 0, 0, 1, 2, 130})
                         : any({0, 0, 1, 32, 127, 128, 129, 200, 255, 256, 257, 384, 385, 512, 600, 858});
    Problem p{};
    p.rows = max(rows + any({0, 40}), 1), p.cols = any({8, 128, 136, 256, 264, 384, 520, 768, 1408}), p.depth = 128;
    if (breaks) ends[random() % ends.size()] = any({-40, 0, rows / 2, p.rows + 70});
    p.first_group = random() % ends.size() * any({0, 1});
    p.groups = int(ends.size()), p.clusters = any({1, 2, 5, 66});
    // A group ends at the largest end up to its own.
    const int first_row = p.first_group ? std::clamp(ends[p.first_group - 1], 0, p.rows) : 0;
    const int last_row = std::clamp(*std::max_element(ends.begin() + p.first_group, ends.end()), first_row, p.rows);
    ends.resize(ends.size() + 32, p.rows);  // of no group
    p.group_ends = ends.data();
    wrong += !covered<256, 128, false, true>(p, first_row, last_row, flat);
    wrong += !covered<256, 128, true, true>(p, first_row, last_row, flat);
    wrong += !covered<128, 256, false, false>(p, first_row, last_row, of_bf16);
  }
  std::printf("wrong: %d, flat tiles: %s and %s\n", wrong, flat ? "some" : "none", of_bf16 ? "some" : "none");
}
"""


@pytest.mark.parametrize("problems", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_each_value_is_in_one_tile(problems: int, tmp_path: Path) -> None:
    source, program = tmp_path / "schedule.cc", tmp_path / "schedule"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover", "-D_GLIBCXX_ASSERTIONS"]
    include = [f"-I{HERE}", f"-I{ROOT / 'core_kernels'}"]
    subprocess.run(["c++", "-std=c++20", "-O1", *checks, *include, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program), str(problems)], capture_output=True, text=True, timeout=100)
    assert (ran.stdout, ran.stderr) == ("wrong: 0, flat tiles: some and none\n", "")


CHOICE = r"""
#include "grouped_gemm/schedule/tile_choice.h"
#include <cstdio>
#include <initializer_list>
using namespace mxep::cuda::sm90;

constexpr TileShape kMGrouped{256, 128, true}, kKGrouped{256, 128, false}, kBf16{128, 256, false};
static_assert(choose_tiles<kMGrouped, Outputs::kOne>(4096, 2048).wide == 2, "computed by the compiler");

template <TileShape kTile, Outputs kOutputs>
void print(const char* product, int rows, int cols) {
  const TileChoice choice = choose_tiles<kTile, kOutputs>(rows, cols);
  const int whole = choice.pairs_m * choice.pairs_n;
  std::printf("%s %d x %d: %s, %d x %d pairs, %d of flat tiles, panels of %d\n", product, rows, cols,
              choice.wide == 2 ? "side by side" : "stacked", choice.pairs_m, choice.pairs_n, choice.pairs - whole,
              choice.panel(kTile));
  if (!kTile.flat && k_grouped_pairs<kTile, kOutputs>(rows, cols) != whole) std::printf("another number of pairs\n");
}

int main() {
  for (int rows : {32, 256, 300, 400, 4096}) print<kMGrouped, Outputs::kOne>("m_grouped_fp8", rows, 2048);
  print<kMGrouped, Outputs::kOne>("m_grouped_fp8", 512, 1408);
  print<kMGrouped, Outputs::kTwoInPair>("m_grouped_fp8, two outputs", 300, 1408);
  print<kKGrouped, Outputs::kOne>("k_grouped_fp8", 2048, 7168);
  print<kKGrouped, Outputs::kOne>("k_grouped_fp8", 512, 1408);
  print<kKGrouped, Outputs::kTwoAlternating>("k_grouped_fp8, two outputs", 2048, 7168);
  print<kBf16, Outputs::kOne>("bf16", 4096, 2048);
  print<kBf16, Outputs::kOne>("bf16", 128, 2048);
}
"""
TABLE = """\
m_grouped_fp8 32 x 2048: side by side, 0 x 8 pairs, 4 of flat tiles, panels of 8
m_grouped_fp8 256 x 2048: side by side, 1 x 8 pairs, 0 of flat tiles, panels of 8
m_grouped_fp8 300 x 2048: side by side, 1 x 8 pairs, 4 of flat tiles, panels of 8
m_grouped_fp8 400 x 2048: side by side, 2 x 8 pairs, 0 of flat tiles, panels of 8
m_grouped_fp8 4096 x 2048: side by side, 16 x 8 pairs, 0 of flat tiles, panels of 8
m_grouped_fp8 512 x 1408: stacked, 1 x 11 pairs, 0 of flat tiles, panels of 4
m_grouped_fp8, two outputs 300 x 1408: side by side, 1 x 11 pairs, 6 of flat tiles, panels of 8
k_grouped_fp8 2048 x 7168: side by side, 8 x 28 pairs, 0 of flat tiles, panels of 8
k_grouped_fp8 512 x 1408: stacked, 1 x 11 pairs, 0 of flat tiles, panels of 4
k_grouped_fp8, two outputs 2048 x 7168: side by side, 16 x 28 pairs, 0 of flat tiles, panels of 8
bf16 4096 x 2048: stacked, 16 x 8 pairs, 0 of flat tiles, panels of 8
bf16 128 x 2048: side by side, 1 x 4 pairs, 0 of flat tiles, panels of 16
"""


def test_the_choice_of_tiles_is_a_table(tmp_path: Path) -> None:
    source, program = tmp_path / "choice.cc", tmp_path / "choice"
    source.write_text(CHOICE)
    command = ["c++", "-std=c++20", "-O1", f"-I{ROOT / 'core_kernels'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    assert subprocess.run([str(program)], capture_output=True, text=True, timeout=100).stdout == TABLE
