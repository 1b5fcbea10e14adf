// The places of rows: of each row that a rank sends, and the rank and slot of each row that its experts get.
//
//   counts of all ranks --lay_out--> ends of this rank's groups; which of its own rows have no place anywhere
//   counts, order of each rank --find_home--> home and weight of the rows of its groups
#include "cuda/launch.h"
#include "peer/exchange_ops.h"
#include "peer/row_of_peer.cuh"

namespace mxep::cuda {
namespace {

struct Counts {
  const int32_t* of;  // (ranks, experts)
  int ranks, experts, groups, rank;

  __device__ int operator()(int source, int expert) const { return max(__ldg(of + source * experts + expert), 0); }
};

Counts counts_of(const Call& call, int64_t rank, int64_t groups) {
  const Array& counts = call.in[0];
  return {counts.as<const int32_t>(), static_cast<int>(counts.dim(0)), static_cast<int>(counts.dim(1)),
          static_cast<int>(groups), static_cast<int>(rank)};
}

// ---- the groups of this rank, and its rows without a place

constexpr int kLayoutThreads = 1024;

struct Groups {
  int capacity, alignment;
  bool rounds;  // rows beyond the capacity have a place in a later round

  __device__ int with_padding(int rows) const { return max((rows + alignment - 1) / alignment, 1) * alignment; }
};

struct Layout {
  int32_t *group_ends, *sources, *totals;
  int2* worst;
};

// A CTA has the rows of one expert.
__global__ void __launch_bounds__(kLayoutThreads)
    layouts(Counts counts, Groups of, const int64_t* addresses, int64_t order_at, int missing, int slots, Layout out) {
  extern __shared__ int rows_of_groups[];  // of the expert's rank
  __shared__ int first;                    // the expert's first row in the order of this rank
  const int expert = blockIdx.x, owner = expert / counts.groups, local = expert % counts.groups;
  for (int i = threadIdx.x; i < counts.groups; i += kLayoutThreads) {
    int rows = 0;
    for (int s = 0; s < counts.ranks; ++s) rows += counts(s, owner * counts.groups + i);
    rows_of_groups[i] = rows;
  }
  if (threadIdx.x == 0) first = 0;
  __syncthreads();
  int mine = 0;
  for (int e = threadIdx.x; e < expert; e += kLayoutThreads) mine += counts(counts.rank, e);
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(&first, mine);
  __syncthreads();

  // Groups are whole in a round, up to the first one that does not fit; see core_kernels/policy/rounds.py.
  int end = 0, begin_here = 0, end_here = 0, limit = of.capacity;
  bool beyond = false;
  for (int i = 0; i < counts.groups; ++i) {
    const int begin = end, size = of.with_padding(rows_of_groups[i]);
    end += size;
    if (i == local) begin_here = begin, end_here = end;
    if (end > of.capacity && !beyond) {
      beyond = true;
      if (of.rounds && i * of.alignment + size <= of.capacity) limit = begin;
    }
  }
  if (threadIdx.x == 0) {
    out.totals[expert] = rows_of_groups[local];
    if (owner == counts.rank) out.group_ends[local] = min(end_here, limit);
    const int over = end - of.capacity;
    if (!of.rounds && local == 0 && over > max(out.worst[owner].x, 0)) out.worst[owner] = make_int2(over, end);
  }

  int row = begin_here;  // of this rank's first one, in the memory of the expert's rank
  for (int s = 0; s < counts.rank; ++s) row += counts(s, expert);
  const auto* order = reinterpret_cast<const int32_t*>(row_of_peer(addresses, counts.rank, order_at));
  const int count = counts(counts.rank, expert);
  // The last expert also has the rows beyond all counts, which have no place.
  const bool last = expert == counts.experts - 1;
  for (int j = threadIdx.x; j < (last ? slots - first : min(count, slots - first)); j += kLayoutThreads) {
    const int slot = order[first + j];
    if (static_cast<unsigned>(slot) >= static_cast<unsigned>(slots)) break;  // -1 behind the rows of this rank
    const bool placed = j < count && (of.rounds || row + j < limit);
    out.sources[slot] = placed ? slot : missing;
  }
}

// ---- the token of each row

constexpr int kHomeThreads = 256, kHomeRows = 4;  // rows of a thread

__global__ void __launch_bounds__(kHomeThreads)
    homes(Counts counts, const int32_t* group_ends, int capacity, const int64_t* addresses, int64_t order_at,
          int64_t weights_at, unsigned slots, int2* home, float* weights) {
  extern __shared__ int first_rows[];  // (ranks, groups): of this rank's groups in the order of a source
  for (int i = threadIdx.x; i < counts.ranks * counts.groups; i += kHomeThreads) {
    const int source = i / counts.groups, last = counts.rank * counts.groups + i % counts.groups;
    int sum = 0;
    for (int e = 0; e < last; ++e) sum += counts(source, e);
    first_rows[i] = sum;
  }
  __syncthreads();
  const int end = min(max(group_ends[counts.groups - 1], 0), capacity);
  for (int i = 0; i < kHomeRows; ++i) {
    const int row = (blockIdx.x * kHomeRows + i) * kHomeThreads + threadIdx.x;
    if (row >= end) return;
    int group = 0, begin = 0;
    for (; group < counts.groups - 1 && group_ends[group] <= row; ++group) begin = group_ends[group];
    int left = row - begin, source = 0;
    for (; source < counts.ranks; ++source) {
      const int n = counts(source, counts.rank * counts.groups + group);
      if (left < n) break;
      left -= n;
    }
    int2 found{-1, 0};
    float weight = 0;
    const unsigned number = source < counts.ranks ? first_rows[source * counts.groups + group] + left : slots;
    if (number < slots) {  // counts of a source may be of more rows than it has
      const int64_t at = 4 * int64_t{number};
      const int slot = *reinterpret_cast<const int*>(row_of_peer(addresses, source, order_at + at));
      if (static_cast<unsigned>(slot) < slots) {
        found = {source, slot};
        weight = *reinterpret_cast<const float*>(row_of_peer(addresses, source, weights_at + at));
      }
    }
    home[row] = found;
    weights[row] = weight;
  }
}

}  // namespace

void lay_out(const Call& call, cudaStream_t stream) {
  const Array &ends = call.out[0], &sources = call.out[1];
  const Counts counts = counts_of(call, call.attrs[0], ends.dim(0));
  const Groups of{static_cast<int>(call.attrs[1]), static_cast<int>(call.attrs[2]), call.attrs[3] != 0};
  const Layout out{ends.as<int32_t>(), sources.as<int32_t>(), call.out[2].as<int32_t>(), call.out[3].as<int2>()};
  launch_kernel("lay_out", layouts, static_cast<unsigned>(counts.experts), kLayoutThreads, 4 * counts.groups, stream,
                counts, of, call.in[1].as<const int64_t>(), call.attrs[4], static_cast<int>(call.attrs[5]),
                static_cast<int>(sources.dim(0)), out);
}

void find_home(const Call& call, cudaStream_t stream) {
  const Array &ends = call.in[1], &home = call.out[0];
  const auto ctas = grid_x("find_home", ceil_div(home.dim(0), kHomeThreads * kHomeRows));
  const Counts of = counts_of(call, call.attrs[0], ends.dim(0));
  launch_kernel("find_home", homes, ctas, kHomeThreads, 4 * of.ranks * of.groups, stream, of, ends.as<const int32_t>(),
                static_cast<int>(home.dim(0)), call.in[2].as<const int64_t>(), call.attrs[1], call.attrs[2],
                static_cast<unsigned>(call.attrs[3]), home.as<int2>(), call.out[1].as<float>());
}

}  // namespace mxep::cuda
