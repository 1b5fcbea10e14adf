// One source, compiled per instruction set; the best one is picked at run time.
//
//   vectorized([=]() MXEP_ALWAYS_INLINE { plain loops });
//
// The body is inlined into one function per x86 level and vectorised there. The functions that it calls must be
// MXEP_INLINE, or they stay at the lowest level. On other machines the compiler's target is the only level.
#pragma once

#define MXEP_ALWAYS_INLINE __attribute__((always_inline))
#define MXEP_INLINE inline MXEP_ALWAYS_INLINE

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MXEP_X86_LEVELS 1
#endif

namespace mxep {

#ifdef MXEP_X86_LEVELS

// gcc prefers 256-bit vectors on AVX-512 machines; they measured 1.7 times slower.
template <typename Body>
__attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))) void run_avx512(const Body& body) {
  body();
}
template <typename Body>
__attribute__((target("arch=x86-64-v3"))) void run_avx2(const Body& body) {
  body();
}

template <typename Body>
void vectorized(const Body& body) {
  static const int level = __builtin_cpu_supports("x86-64-v4") ? 4 : __builtin_cpu_supports("x86-64-v3") ? 3 : 1;
  if (level == 4)
    run_avx512(body);
  else if (level == 3)
    run_avx2(body);
  else
    body();
}

#else

template <typename Body>
void vectorized(const Body& body) {
  body();
}

#endif

}  // namespace mxep
