// What the FP8 and the bf16 products on Hopper have in common: the problem of a call, empty sums, the launch in
// clusters, the start of a CTA, and zeros past the last end.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/cluster_launch.h"
#include "cuda/sm90.cuh"
#include "grouped_gemm/schedule/schedule.cuh"
#include "grouped_gemm/schedule/tile_queue.cuh"

namespace mxep::cuda::sm90 {

constexpr int kStages = 4;   // of 48 KiB; more do not fit
constexpr int kLoaders = 1;  // threads that load the tiles of the queue
constexpr int kWarpgroup = 128, kComputing = 2 * kWarpgroup, kThreads = kWarpgroup + kComputing;

// out: (rows, cols), or (groups, rows, cols). depth: K, or the number of tokens.
inline Problem problem_of(const Call& call, int64_t depth) {
  Problem p{};
  p.group_ends = call.in.back().as<const int32_t>();
  p.out = call.out[0].data;
  p.first_group = call.share.first;
  p.groups = static_cast<int>(std::min<int64_t>(call.in.back().dim(0), call.share.last));
  p.rows = static_cast<int>(call.out[0].dim(-2));
  p.cols = static_cast<int>(call.out[0].dim(-1));
  p.depth = static_cast<int>(depth);
  p.clear_rest = !call.attrs.empty() && call.attrs[0];
  return p;
}

// Writes empty sums, or no group's rows, and returns whether that is all: an operand without bytes has no tensor map.
inline bool clear_empty(const char* op, const Call& call, const Problem& p, cudaStream_t stream) {
  if (p.groups != 0 && p.depth != 0) return false;
  for (const Array& out : call.out) check(op, cudaMemsetAsync(out.data, 0, out.nbytes(), stream));
  return true;
}

// TMA and the kernels count in 32 bits; tiles reach up to `beyond` past the last. what: the limit, for the message.
inline void require_32_bits(const char* op, int64_t most, int beyond, const char* what) {
  if (most > INT32_MAX - beyond) throw std::runtime_error(std::string(op) + ": an operand has more than " + what);
}

// Launches as many CTAs as are resident at a time, but for `reserved`.
template <auto kKernel, typename Maps>
void launch_resident(const char* op, size_t shared_bytes, const Maps& maps, Problem p, int reserved,
                     cudaStream_t stream) {
  const unsigned resident = resident_ctas<kKernel>(op, stream, kCluster, kThreads, shared_bytes);
  const unsigned ctas = std::max<int>(resident - reserved, kCluster);
  p.clusters = static_cast<int>(ctas) / kCluster;
  launch_kernel(op, kKernel, ctas, kThreads, shared_bytes, stream, maps, p);
}

// launch(Out{}) with the type of the outputs.
template <typename Launch>
void launch_for(DType out, const Launch& launch) {
  if (out == DType::bf16) {
    launch(__nv_bfloat16{});
  } else {
    launch(float{});
  }
}

// Called by one thread, before the first barrier of the cluster. tile_readers: warps.
template <typename Maps, typename Shared>
__device__ __forceinline__ void init_product(const Maps& maps, Shared& s, int tile_readers) {
  for (const auto& operands : maps.of) {
    prefetch(&operands.a);
    prefetch(&operands.b);
  }
  constexpr int kCount = std::extent_v<decltype(s.full)>;
  for (int i = 0; i < kCount; ++i) {
    barrier_init(&s.full[i], 1);
    barrier_init(&s.empty[i], kComputing / 32 * kCluster);  // every computing warp of both CTAs
  }
  s.tiles.init(tile_readers);
}

// Writes zeros to the rows of `out` past the last end, if the call asks for them. There is at least one group. Called
// by the computing warps of all CTAs.
template <typename Out>
__device__ void clear_rest(const Problem& p, Out* out) {
  if (!p.clear_rest) return;
  constexpr int kVector = 16 / sizeof(Out);
  const int64_t thread = blockIdx.x * int64_t{kComputing} + threadIdx.x - kWarpgroup;
  const int64_t threads = gridDim.x * int64_t{kComputing};
  const int used = min(max(p.group_ends[p.groups - 1], 0), p.rows);
  const int64_t end = static_cast<int64_t>(p.rows) * p.cols;
  for (int64_t i = static_cast<int64_t>(used) * p.cols + thread * kVector; i < end; i += threads * kVector)
    *reinterpret_cast<uint4*>(out + i) = {};
}

}  // namespace mxep::cuda::sm90
