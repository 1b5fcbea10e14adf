"""The meetings of core_kernels/peer/meeting.h: threads of several runs exchange values, and a thread that waits in vain
gets an error."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
#include "peer/meeting.h"
#include <algorithm>
#include <cstdio>
#include <thread>

constexpr int kRuns = 3, kThreads = 5, kTimes = 2000;
mxep::Meetings<int> meetings;

bool complete(int64_t run, int thread, int time) {
  const int mine = (time * kRuns + run) * kThreads + thread;
  std::vector<int> values = meetings.meet(run, kThreads, mine, std::chrono::minutes(1));
  std::sort(values.begin(), values.end());
  for (int i = 0; i < kThreads; ++i)
    if (values.size() != kThreads || values[i] != mine - thread + i) return false;
  return true;
}

int main() {
  std::vector<std::thread> threads;
  int wrong[kRuns][kThreads] = {};
  for (int run = 0; run < kRuns; ++run)
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([=, &wrong] {
        for (int time = 0; time < kTimes; ++time) wrong[run][thread] += !complete(run, thread, time);
      });
  for (auto& thread : threads) thread.join();
  int sum = 0;
  for (const auto& run : wrong) for (int w : run) sum += w;
  std::printf("wrong: %d\n", sum);
  for (int time = 0; time < 2; ++time) try {
    meetings.meet(7, 2, 0, std::chrono::milliseconds(20));
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
  std::thread other([] { meetings.meet(7, 2, 1, std::chrono::minutes(1)); });
  std::printf("after that: %zu\n", meetings.meet(7, 2, 0, std::chrono::minutes(1)).size());
  other.join();
}
"""


def test_threads_meet(tmp_path: Path) -> None:
    source, program = tmp_path / "meeting.cc", tmp_path / "meeting"
    source.write_text(PROGRAM)
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover", "-pthread"]
    build = ["c++", "-std=c++20", "-O1", *checks, f"-I{ROOT / 'core_kernels'}", str(source), "-o", str(program)]
    subprocess.run(build, check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=100, check=True)
    late = "waited 0 s for 1 of 2 devices"
    assert ran.stdout.splitlines() == ["wrong: 0", late, late, "after that: 2"]
