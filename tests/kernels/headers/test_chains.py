"""The chains of spans of swiglu/folded/chains.cuh, compiled for the CPU: all CTAs together have each token of a group
and each slot up to the last group in every tile of columns once, the longest groups first. Ends that break the contract
give no token or slot that does not exist. Undefined behaviour ends the program."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
#include <algorithm>
#include <cstdint>
#define __device__
using std::max, std::min;
struct Index { unsigned x; } threadIdx, blockIdx, gridDim;
template <typename T> T __ldg(const T* from) { return *from; }
unsigned __ballot_sync(unsigned, bool);
int __shfl_sync(unsigned, int, int), __ffs(unsigned);
void __syncthreads() {}
#include "swiglu/folded/chains.cuh"
#include <cstdio>
#include <initializer_list>
#include <random>
#include <vector>
using namespace mxep::cuda;

bool right(const std::vector<int32_t>& ends, int64_t tokens, uint32_t tiles, unsigned ctas, bool broken) {
  Chains p{};
  p.ends = ends.data(), p.groups = int(ends.size()), p.tokens = tokens;
  p.slots = tokens / mxep::kSpan + p.groups;
  p.tiles_across = tiles, p.chains = p.groups * tiles;
  gridDim.x = ctas;
  std::vector<int> of_token(tiles * tokens), of_slot(tiles * p.slots), begins(tiles * p.slots, -1);
  bool fine = true;
  static GroupOrder order;
  for (unsigned cta = 0; cta < ctas; ++cta) {
    std::vector<int> memory(p.groups + 1);
    p.order_groups<1>(order, memory.data());
    uint32_t at = cta;
    int longest = INT32_MAX;
    const auto has_slot = [&](const Chain& chain, int64_t slot) {
      if (slot >= p.slots) fine &= broken;
      else fine &= slot >= 0, ++of_slot[chain.tile * p.slots + slot];
    };
    for (;;) {
      const Chain chain = p.take(order, at, [&](const Chain& of, int slot) { has_slot(of, slot); });
      if (!chain.spans()) break;
      fine &= chain.begin >= 0 && chain.end <= tokens && chain.tile < tiles;
      if (!broken) fine &= chain.first && chain.end - chain.begin <= longest, longest = chain.end - chain.begin;
      for (int span = 0; fine && span < chain.spans(); ++span) {
        has_slot(chain, chain.slot + span);
        const int begin = chain.begin + span * mxep::kSpan;
        for (int i = begin; i < min(begin + mxep::kSpan, chain.end); ++i) ++of_token[chain.tile * tokens + i];
      }
    }
  }
  if (broken) return fine;
  const int64_t end = ends.empty() ? 0 : ends.back(), slots = order.slots[p.groups];
  for (size_t i = 0; i < of_token.size(); ++i) fine &= of_token[i] == (int64_t(i) % tokens < end);
  for (size_t i = 0; i < of_slot.size(); ++i) fine &= of_slot[i] == (int64_t(i) % p.slots < slots);
  return fine;
}

int main() {
  std::mt19937 random(0);
  const auto any = [&](std::initializer_list<int> of) { return of.begin()[random() % of.size()]; };
  int wrong = 0;
  for (int problem = 0; problem < 2000; ++problem) {
    std::vector<int32_t> ends(any({0, 1, 2, 3, 9, 40}));
    int rows = 0;
    for (int32_t& end : ends) end = rows += any({0, 0, 32, 224, 256, 288, 512, 544, 1024});
    const int64_t tokens = max(rows + any({0, 32, 256, 800}), 32);
    const uint32_t tiles = any({1, 2, 5});
    const unsigned ctas = any({1, 3, 7, 132});
    wrong += !right(ends, tokens, tiles, ctas, false);
    for (int32_t& end : ends) end = int(random() % (tokens + 200)) - 100;
    wrong += !right(ends, tokens, tiles, ctas, true);
  }
  std::printf("wrong: %d\n", wrong);
}
"""


def test_chains_have_each_token_and_slot_once(tmp_path: Path) -> None:
    source, program = tmp_path / "chains.cc", tmp_path / "chains"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    command = ["c++", "-std=c++20", "-O1", *checks, f"-I{ROOT / 'core_kernels'}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=100)
    assert (ran.stdout, ran.stderr) == ("wrong: 0\n", "")
