#include "parallel.h"

#include <omp.h>

#include <atomic>

namespace mxep {
namespace {
// One number for the module: omp_set_num_threads is per calling thread, and XLA calls from its own.
std::atomic<int> g_num_threads{omp_get_max_threads()};
}  // namespace

int num_threads() { return g_num_threads.load(std::memory_order_relaxed); }
void set_num_threads(int n) { g_num_threads.store(n, std::memory_order_relaxed); }

}  // namespace mxep
