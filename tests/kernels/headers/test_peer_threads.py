"""The threads of core_kernels/peer/group/threads.h: none returns from a call before all have made it, and a thread that
waits in vain gets an error."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
#include "peer/group/threads.h"
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

constexpr int kThreads = 5, kCalls = 800;

int main() {
  mxep::Threads all(kThreads, std::chrono::minutes(1));
  std::atomic<int> come[kCalls] = {}, early = 0;
  std::vector<std::thread> threads;
  for (int device = 0; device < kThreads; ++device)
    threads.emplace_back([&, device] {
      for (auto& of_call : come) {
        ++of_call;
        all.join(device);
        early += of_call < kThreads;
      }
    });
  for (auto& thread : threads) thread.join();
  std::printf("early: %d\n", early.load());
  mxep::Threads alone(1, std::chrono::minutes(1)), two(2, std::chrono::milliseconds(20));
  alone.join(0);
  std::thread other([&] { two.join(1); });
  two.join(0);
  other.join();
  try {
    two.join(0);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
"""


def test_threads_join(tmp_path: Path) -> None:
    source, program = tmp_path / "join.cc", tmp_path / "join"
    source.write_text(PROGRAM)
    flags = ["-std=c++20", "-O1", "-pthread", "-fsanitize=thread", f"-I{ROOT / 'core_kernels'}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(program)], check=True)
    out = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    allowed = "allowed: one program on all GPUs of the mesh"
    assert out == ["early: 0", f"PeerMemory: waited 0 s for 1 of 2 GPUs of this process; {allowed}"]
