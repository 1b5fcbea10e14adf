// Hopper's asynchronous instructions, one thin function per instruction: mbarriers, TMA loads, FP8 and bf16 wgmma.
// CUTLASS's headers have them too; so few instructions do not justify a dependency that every build compiles.
// Source: PTX ISA 8.x, sections "mbarrier", "cp.async.bulk.tensor", "wgmma".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mxep::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t shared_address(uint32_t address) { return address; }

// Addresses in the shared memory of this CTA; constructed by whole warps. With a plain pointer the compiler may
// recompute the base of shared memory at every use, also in loops, and wait for it: 4% of a product. A value that comes
// from a shuffle stays in a uniform register.
template <typename Shared>
class Addresses {
 public:
  __device__ explicit Addresses(const Shared& s) : s_(s), base_(__shfl_sync(~0u, shared_address(&s), 0)) {}

  template <typename Member>
  __device__ uint32_t of(const Member& member) const {
    return base_ + static_cast<uint32_t>(reinterpret_cast<const char*>(&member) - reinterpret_cast<const char*>(&s_));
  }

 private:
  const Shared& s_;
  uint32_t base_;
};

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- mbarrier. An Address is a pointer to shared memory or a shared_address. Every wait terminates: the arrivals come
// from the TMA unit or from CTAs of the same cluster, which start together; clusters never wait for each other.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes initialised barriers visible to the other CTAs of the cluster and to the TMA unit.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives on the same barrier of CTA `rank` of the cluster.
template <typename Address>
__device__ __forceinline__ void barrier_arrive(Address barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

template <typename Address>
__device__ __forceinline__ void barrier_wait(Address barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The position of a producer or consumer in a ring of stages. A producer waits for `empty` with the other parity, since
// all stages are empty at first.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }

  // Waits until every stage is empty: until then consumers of the other CTA arrive on this CTA's barriers.
  __device__ void drain(uint64_t (&empty)[kStages]) {
    for (int i = 0; i < kStages; ++i, advance()) barrier_wait(&empty[stage], parity ^ 1);
  }
};

// ---- TMA

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box of `map` at (x, y) into shared memory; its bytes count on `barrier`. Coordinates outside the array read
// as zeros.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// The same into every CTA of `cta_mask`, at the same address and on the same barrier of each.
__device__ __forceinline__ void load_box_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                                   uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(cta_mask)
      : "memory");
}

// The box of a map with three dims, of matrix z.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void load_box_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                                   int z, uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(cta_mask)
      : "memory");
}

// Stores a box of shared memory, written before a `shared_to_async_fence`, to (x, y, z) of `map`. Values outside the
// array are not stored. The store belongs to this thread's next group of stores.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups of stores but the latest kInFlight have read shared memory.
template <int kInFlight>
__device__ __forceinline__ void stores_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kInFlight) : "memory");
}
// Waits until all of this thread's stores are complete.
__device__ __forceinline__ void stores_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- wgmma

// Matrices in shared memory, as the low words of their descriptors: a step of 16 bytes adds 1. The high word is the
// same for all: 128-byte swizzle, 1024 bytes between groups of eight rows. Additions to whole 64-bit descriptors, with
// a carry that never occurs, delay the next step of a product: 1%.
#define MXEP_DESCRIPTORS(a, b) "mov.b64 a, {" a ", 0x40000040};\nmov.b64 b, {" b ", 0x40000040};\n"

// Rows of 128 bytes in the 128-byte swizzle, eight rows (1024 bytes) per core group; aligned to 1024 bytes.
template <typename Address>
__device__ __forceinline__ uint32_t descriptor(Address tile) {
  return 1 << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}

// Consecutive boxes of 64 columns (128 bytes) by kRows rows in the same swizzle: the transposed matrix, whose
// contiguous dim is not the contraction dim. Groups of eight rows are contiguous, the pitch of boxes is kRows * 128
// bytes.
template <int kRows, typename Address>
__device__ __forceinline__ uint32_t columns_descriptor(Address boxes) {
  return (kRows * 128 >> 4) << 16 | (shared_address(boxes) & 0x3FFFF) >> 4;
}

// After the next barrier, wgmma and the TMA unit see this thread's writes to shared memory.
__device__ __forceinline__ void shared_to_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed groups but the latest kInFlight.
template <int kInFlight = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

#define MXEP_R8(d, i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MXEP_R64(d, i)                                                                                              \
  MXEP_R8(d, i), MXEP_R8(d, i + 8), MXEP_R8(d, i + 16), MXEP_R8(d, i + 24), MXEP_R8(d, i + 32), MXEP_R8(d, i + 40), \
      MXEP_R8(d, i + 48), MXEP_R8(d, i + 56)
// The first 64 operands of an instruction.
#define MXEP_64                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (64, 128) = a (64, 32) b (128, 32)^T [+ d], E4M3 operands, fp32 sums; 64 values per thread.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint32_t a, uint32_t b, bool accumulate) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n" MXEP_DESCRIPTORS(
                   "%64", "%65") "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MXEP_64
                                 "}, a, b, p, 1, 1;\n}"
               : MXEP_R64(d, 0)
               : "r"(a), "r"(b), "r"(static_cast<int>(accumulate)));
}

// d (64, 256) += a (64, 16) b (256, 16)^T, bf16 operands, fp32 sums; 128 values per thread. kColumnsA, kColumnsB: the
// operand is given by `columns_descriptor`.
template <bool kColumnsA, bool kColumnsB>
__device__ __forceinline__ void wgmma_bf16(float (&d)[128], uint32_t a, uint32_t b) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.eq.b32 p, 0, 0;\n" MXEP_DESCRIPTORS("%128", "%129")
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" MXEP_64 ", "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "a, b, p, 1, 1, %130, %131;\n}"
      : MXEP_R64(d, 0), MXEP_R64(d, 64)
      : "r"(a), "r"(b), "n"(static_cast<int>(kColumnsA)), "n"(static_cast<int>(kColumnsB)));
}
#undef MXEP_R8
#undef MXEP_R64
#undef MXEP_64
#undef MXEP_DESCRIPTORS

template <int kRegisters>
__device__ __forceinline__ void alloc_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void dealloc_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8x8 matrices of 16-bit values, in wgmma's register layout, to rows of shared memory.
__device__ __forceinline__ void store_matrices(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Barrier of kThreads threads, by default one warpgroup. Ids start at 1; 0 is __syncthreads.
template <int kThreads = 128>
__device__ __forceinline__ void threads_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// The same barrier; returns whether `vote` holds in all threads.
template <int kThreads = 128>
__device__ __forceinline__ bool threads_all(int id, bool vote) {
  int all;
  asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %2, 0;\nbar.red.and.pred q, %1, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
               : "=r"(all)
               : "r"(id), "r"(static_cast<int>(vote)), "n"(kThreads)
               : "memory");
  return all;
}

}  // namespace mxep::cuda::sm90
