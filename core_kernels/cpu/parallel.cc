#include "cpu/parallel.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>

namespace mxep {
namespace {

// Read once, not per call: XLA calls from threads of its own, and torch may load a second OpenMP.
const int g_at_most = omp_get_max_threads();
thread_local int t_at_most = 0;

std::atomic<bool> g_forked{false};
[[maybe_unused]] const int g_registered =
    pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });

}  // namespace

int num_threads() {
  if (g_forked.load(std::memory_order_relaxed)) return 1;
  return t_at_most ? t_at_most : g_at_most;
}

Threads::Threads(int n) : before_(t_at_most) {
  if (n) t_at_most = n;
}
Threads::~Threads() { t_at_most = before_; }

}  // namespace mxep
