// What plain loops need to become good vector code on every machine.
//
// MXEP_CLONES makes one copy of a hot function per x86 level, chosen when the module loads. Everything
// called from such a function is MXEP_INLINE, or it would be compiled for the lowest level only.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define MXEP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MXEP_CLONES
#endif
#define MXEP_INLINE inline __attribute__((always_inline))
