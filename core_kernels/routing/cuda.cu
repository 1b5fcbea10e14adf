// Stable sort of slots by expert: order, inverse, counts.
//
//   expert_ids --count--> counts of every block of slots          (stored in `order` until the last step)
//              --sum----> slots before each block, per expert     (stored in the block's part of `inverse`)
//                         counts
//              --place--> order, inverse
//
// The outputs are the only memory. A block reads its part of `inverse` before it writes it. The last block, whose part
// may be too short, derives its sums from the counts. A single block needs neither of the first two steps.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/driver.h"
#include "cuda/ops.h"

namespace mxep::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32, kSlotsPerThread = 16;
constexpr int kSlots = kThreads * kSlotsPerThread;  // per block
constexpr int kMaxExperts = kSlots / 2;             // so that the counts of all blocks fit in `order`
constexpr int kExpertsPerThread = kMaxExperts / kThreads;

// Clamps ids that break the contract, so that every write is inside the outputs.
__device__ int expert_of(const int* ids, int64_t slot, int num_experts) {
  return min((unsigned)ids[slot], (unsigned)num_experts - 1);
}

__global__ void __launch_bounds__(kThreads) count_slots(const int* ids, int64_t num_slots, int num_experts, int* out) {
  extern __shared__ int counts[];
  for (int e = threadIdx.x; e < num_experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t first = (int64_t)blockIdx.x * kSlots + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int64_t slot = first + i * kThreads;
    if (slot < num_slots) atomicAdd(&counts[expert_of(ids, slot, num_experts)], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += kThreads) out[(int64_t)blockIdx.x * num_experts + e] = counts[e];
}

// 32 experts per block; each warp sums a run of slot blocks.
__global__ void __launch_bounds__(1024)
    sum_counts(const int* block_counts, int num_blocks, int num_experts, int* before, int* counts) {
  __shared__ int sums[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, expert = blockIdx.x * 32 + lane;
  const int run = (num_blocks + 31) / 32, begin = min(warp * run, num_blocks), end = min(begin + run, num_blocks);
  const bool inside = expert < num_experts;
  int sum = 0;
  for (int b = begin; b < end && inside; ++b) sum += block_counts[(int64_t)b * num_experts + expert];
  sums[warp][lane] = sum;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < warp; ++w) total += sums[w][lane];
  if (!inside) return;
  for (int b = begin; b < end; ++b) {
    if (b < num_blocks - 1) before[(int64_t)b * kSlots + expert] = total;
    total += block_counts[(int64_t)b * num_experts + expert];
  }
  if (warp == 31) counts[expert] = total;
}

// In place, by one warp: values[i] becomes the sum of the values before it.
__device__ void exclusive_sums(int* values, int n) {
  int carry = 0;
  for (int i = threadIdx.x; i < (n + 31) / 32 * 32; i += 32) {
    const int value = i < n ? values[i] : 0;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (threadIdx.x >= step) sum += other;
    }
    if (i < n) values[i] = carry + sum - value;
    carry += __shfl_sync(~0u, sum, 31);
  }
}

// A warp places a run of slots, 32 at a time. Lanes with the same expert are ranked by their number.
__global__ void __launch_bounds__(kThreads)
    place_slots(const int* ids, int64_t num_slots, int num_experts, int* order, int* inverse, int* counts) {
  extern __shared__ int memory[];
  int* first = memory;                                                  // position of an expert's next slot
  uint16_t* ranks = reinterpret_cast<uint16_t*>(memory + num_experts);  // per warp: an expert's number of slots so far
  for (int i = threadIdx.x; i < kWarps * num_experts; i += kThreads) ranks[i] = 0;
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_slot = (int64_t)blockIdx.x * kSlots;
  const int64_t first_slot = block_slot + warp * (32 * kSlotsPerThread) + lane;
  uint16_t* mine = ranks + warp * num_experts;
  int expert[kSlotsPerThread], rank[kSlotsPerThread];
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const int64_t slot = first_slot + 32 * i;
    expert[i] = slot < num_slots ? expert_of(ids, slot, num_experts) : -1;
  }
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    const unsigned same = __match_any_sync(~0u, expert[i]);
    const int lower = __popc(same & ((1u << lane) - 1)), so_far = expert[i] < 0 ? 0 : mine[expert[i]];
    rank[i] = so_far + lower;
    __syncwarp();
    if (expert[i] >= 0 && lower == 0) mine[expert[i]] = so_far + __popc(same);
    __syncwarp();
  }
  __syncthreads();

  const bool alone = gridDim.x == 1, last = blockIdx.x == gridDim.x - 1;
  int before[kExpertsPerThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e >= num_experts) break;
    int own = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int count = ranks[w * num_experts + e];
      ranks[w * num_experts + e] = own;
      own += count;
    }
    if (alone) counts[e] = own;
    first[e] = alone ? own : counts[e];
    before[i] = last ? first[e] - own : inverse[block_slot + e];
  }
  __syncthreads();
  if (warp == 0) exclusive_sums(first, num_experts);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kExpertsPerThread; ++i) {
    const int e = threadIdx.x + i * kThreads;
    if (e >= num_experts) break;
    first[e] += before[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSlotsPerThread; ++i) {
    if (expert[i] < 0) continue;
    const int64_t slot = first_slot + 32 * i;
    const int place = first[expert[i]] + mine[expert[i]] + rank[i];
    inverse[slot] = place;
    order[place] = (int)slot;
  }
}

}  // namespace

void sort_by_expert(const Call& call, cudaStream_t stream) {
  const char* op = "sort_by_expert";
  const int64_t num_slots = call.in[0].dim(0), num_experts = call.attrs[0];
  if (num_experts > kMaxExperts)
    throw std::invalid_argument(std::string(op) + ": num_experts: got " + std::to_string(num_experts) +
                                "; allowed: at most " + std::to_string(kMaxExperts) + " in CUDA");
  const int* ids = call.in[0].as<const int>();
  int *order = call.out[0].as<int>(), *inverse = call.out[1].as<int>(), *counts = call.out[2].as<int>();
  const int experts = static_cast<int>(num_experts);
  const int blocks = static_cast<int>(std::max<int64_t>((num_slots + kSlots - 1) / kSlots, 1));
  if (blocks > 1) {
    launch_kernel(op, count_slots, blocks, kThreads, experts * sizeof(int), stream, ids, num_slots, experts, order);
    launch_kernel(op, sum_counts, (experts + 31) / 32, 1024, 0, stream, order, blocks, experts, inverse, counts);
  }
  constexpr int kBytes = sizeof(int) + kWarps * sizeof(uint16_t);  // per expert
  allow_shared_memory<place_slots>(op, stream, kMaxExperts * kBytes);
  launch_kernel(op, place_slots, blocks, kThreads, experts * kBytes, stream, ids, num_slots, experts, order, inverse,
                counts);
}

}  // namespace mxep::cuda
