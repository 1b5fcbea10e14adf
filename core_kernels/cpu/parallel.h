// Threads, and the floating-point environment that the contract needs in each of them.
#pragma once

#include <cfenv>
#include <cstdint>

namespace mxep {

// Number of threads that an op on the calling thread may use: the limit of a Threads object on this thread, or else the
// number that OpenMP reported when the module was loaded. 1 in the child of a fork: the parent's OpenMP team does not
// exist there, and OpenMP would wait for it.
int num_threads();

// Limits ops on this thread to `n` threads during its lifetime; 0 sets no limit.
class Threads {
 public:
  explicit Threads(int n);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

// The default environment: round to nearest even, subnormals kept. XLA:CPU flushes subnormals to zero in its threads,
// and a block scale of 2^-127 is a subnormal.
class DefaultFloatEnv {
 public:
  DefaultFloatEnv() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnv() { std::fesetenv(&saved_); }
  DefaultFloatEnv(const DefaultFloatEnv&) = delete;
  DefaultFloatEnv& operator=(const DefaultFloatEnv&) = delete;

 private:
  std::fenv_t saved_;
};

// Splits [0, n) into one contiguous range per thread and calls body(begin, end) on each. Work below `kSerialBytes`
// stays on the calling thread. `body` must not throw.
template <typename Body>
void parallel_ranges(int64_t n, int64_t bytes_per_item, const Body& body) {
  constexpr int64_t kSerialBytes = 64 * 1024;
  const int64_t useful = n * bytes_per_item / kSerialBytes;
  const int64_t threads = useful < num_threads() ? (useful < 1 ? 1 : useful) : num_threads();
  DefaultFloatEnv of_new_threads;  // new threads inherit it, and torch's matmul reuses them later
#pragma omp parallel for num_threads(static_cast<int>(threads)) schedule(static, 1) if (threads > 1)
  for (int64_t t = 0; t < threads; ++t) {
    DefaultFloatEnv of_this_thread;  // a reused thread may have another environment
    body(n * t / threads, n * (t + 1) / threads);
  }
}

}  // namespace mxep
