// Rows between the GPUs of one host, by a few CTAs while products run on the others: bulk copies through shared memory,
// which keep enough bytes under way for NVLink with 16 CTAs.
//
//   a warp    peer's row --bulk load--> stage of its ring --.-- bulk store --> q, sf           (as it came)
//                                                           '-- folded in registers --> qf, row_sf
//   a warp    peer's row --bulk load--> stage of its ring --bulk store--> values, scales
//   a thread  own row --bulk load--> stage of its ring --bulk store--> peer's slot
//
// An order of rows that jumps through all groups spreads the loads of every moment over all ranks.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/mx_math.cuh"
#include "cuda/sm90.cuh"
#include "fold/folded_tile.cuh"
#include "peer/exchange_ops.h"
#include "peer/row_of_peer.cuh"

namespace mxep::cuda {
namespace {

constexpr int kMostStages = 4, kCluster = 2, kSpread = 64;
constexpr int kRingBytes = 200 * 1024, kAlign = 128;
constexpr int kLongestOfFour = 24 * 1024;  // bytes of a row of which the rings of four warps have two stages

// ---- bulk copies

__device__ inline void load(void* to, const void* from, uint32_t nbytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   sm90::shared_address(to)),
               "l"(from), "r"(nbytes), "r"(sm90::shared_address(barrier))
               : "memory");
}
__device__ inline void store(void* to, const void* from, uint32_t nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(sm90::shared_address(from)),
               "r"(nbytes)
               : "memory");
}
__device__ inline void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the stores of all groups but the last one have read shared memory.
__device__ inline void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- rows

struct Rows {
  const int2* home;
  const int32_t* ends;
  int first, last, capacity;  // groups, and rows of an operand
};

// The rows of the groups in an order that jumps: numbers from 0 to `count` - 1.
struct Jumping {
  int begin, rows, step, count;

  __device__ explicit Jumping(const Rows& of) {
    const auto end = [&](int group) { return min(max(__ldg(of.ends + group), 0), of.capacity); };
    begin = of.first ? end(of.first - 1) : 0;
    rows = max(end(of.last - 1) - begin, 0);
    step = (rows + kSpread - 1) / kSpread;
    count = step * kSpread;
  }
  // -1 for no row.
  __device__ int row(int number) const {
    const int at = number % kSpread * step + number / kSpread;
    return at < rows ? begin + at : -1;
  }
};

// A warp's stages in shared memory.
struct Stages {
  char* bytes;
  uint64_t* full;
  int count, room;
  int stage = 0, ahead;
  uint32_t parity = 0;

  __device__ Stages(char* ring, uint64_t (&barriers)[kMostStages], int warp, int count, int room)
      : bytes(ring + warp * count * room), full(barriers), count(count), room(room), ahead(count - 1) {}
  __device__ char* of(int i) const { return bytes + i * room; }
  __device__ void advance() {
    if (++ahead == count) ahead = 0;
    if (++stage == count) stage = 0, parity ^= 1;
  }
};

// ---- pull

// Each warp pulls rows of `nbytes` bytes, and all its lanes take(row, real, bytes, lane): its bytes in shared memory,
// or zeros if it is not real. row: -1 for no row.
template <int kWarps, typename Take>
__device__ inline void pull(const Rows& rows, const int64_t* addresses, int64_t rows_at, int top_k, int nbytes,
                            int num_stages, const Take& take) {
  extern __shared__ __align__(kAlign) char ring[];
  __shared__ uint64_t full[kWarps][kMostStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Stages stages(ring, full[warp], warp, num_stages, (nbytes + kAlign - 1) / kAlign * kAlign);
  if (lane < num_stages) sm90::barrier_init(&stages.full[lane], 1);
  sm90::barrier_init_fence();
  __syncwarp();
  const Jumping order(rows);
  const int workers = gridDim.x * kWarps;
  const auto request = [&](int number, int stage) {  // by one lane
    if (number >= order.count) return;
    const int row = order.row(number);
    const int2 home = row < 0 ? make_int2(-1, 0) : rows.home[row];
    sm90::barrier_expect(&stages.full[stage], home.x < 0 ? 0 : nbytes);
    if (home.x < 0) return;
    load(stages.of(stage), row_of_peer(addresses, home.x, rows_at + int64_t{home.y / top_k} * nbytes), nbytes,
         &stages.full[stage]);
  };
  const int first = warp * gridDim.x + blockIdx.x;
  if (lane == 0)
    for (int i = 0; i < num_stages - 1; ++i) request(first + i * workers, i);
  for (int number = first; number < order.count; number += workers) {
    const int row = order.row(number);
    const bool real = row >= 0 && rows.home[row].x >= 0;
    sm90::barrier_wait(&stages.full[stages.stage], stages.parity);
    take(row, real, stages.of(stages.stage), lane);
    __syncwarp();
    if (lane == 0) {
      commit();
      wait_for_reads();  // the stage of the row before is free
      request(number + (num_stages - 1) * workers, stages.ahead);
    }
    stages.advance();
  }
  if (lane == 0) wait_for_stores();
}

__device__ inline void clear(uint8_t* to, int nbytes) {
  for (int i = threadIdx.x % 32 * 16; i < nbytes; i += 32 * 16) *reinterpret_cast<uint4*>(to + i) = {};
}

struct PullOut {
  uint8_t *q, *sf, *qf, *row_sf;
};

template <int kWarps>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kWarps * 32, 1)
    pull_folds(const Rows rows, const int64_t* addresses, int64_t rows_at, int top_k, int k, const PullOut out,
               int num_stages) {
  const int blocks = k / 32;
  const auto take = [&](int row, bool real, const char* bytes, int lane) {
    if (real) {
      const auto* sf = reinterpret_cast<const uint8_t*>(bytes + k);
      uint32_t magnitude = 0;
      for (int b = lane; b < blocks; b += 32) magnitude = max(magnitude, (sf[b] + 1u) & 0xFF);
      magnitude = __reduce_max_sync(~0u, magnitude);
      const uint32_t scale = magnitude - 1;
      if (lane == 0) {
        out.row_sf[row] = scale;
        store(out.q + int64_t{row} * k, bytes, k);
        store(out.sf + int64_t{row} * blocks, sf, blocks);
      }
      uint8_t* qf = out.qf + int64_t{row} * k;
#pragma unroll 4
      for (int i = lane; i < k / 16; i += 32)
        *reinterpret_cast<uint4*>(qf + i * 16) =
            folded(*reinterpret_cast<const uint4*>(bytes + i * 16), fold_power(sf[i / 2], scale));
    } else if (row >= 0) {
      clear(out.q + int64_t{row} * k, k);
      clear(out.sf + int64_t{row} * blocks, blocks);
      clear(out.qf + int64_t{row} * k, k);
      if (lane == 0) out.row_sf[row] = 0;
    }
  };
  pull<kWarps>(rows, addresses, rows_at, top_k, k + blocks, num_stages, take);
}

// A row of the memory of a peer: `values` bytes, then `scales` bytes, then bytes that nobody reads.
struct PlainOut {
  uint8_t *values, *scales;
  int values_bytes, scales_bytes;
};

template <int kWarps>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kWarps * 32, 1)
    pulls(const Rows rows, const int64_t* addresses, int64_t rows_at, int top_k, int nbytes, const PlainOut out,
          int num_stages) {
  const auto take = [&](int row, bool real, const char* bytes, int lane) {
    uint8_t* values = out.values + int64_t{row} * out.values_bytes;
    uint8_t* scales = out.scales + int64_t{row} * out.scales_bytes;
    if (real && lane == 0) store(values, bytes, out.values_bytes);
    if (row >= 0 && !real) clear(values, out.values_bytes);
    // One at a time: a row of few scales is no whole vector of 16 bytes.
    if (row >= 0)
      for (int i = lane; i < out.scales_bytes; i += 32) scales[i] = real ? bytes[out.values_bytes + i] : 0;
  };
  pull<kWarps>(rows, addresses, rows_at, top_k, nbytes, num_stages, take);
}

// ---- push

template <int kWarps>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kWarps * 32, 1)
    pushes(const Rows rows, const int64_t* addresses, const int64_t* of_numbers, int64_t slots_at, int64_t numbers_at,
           int nbytes, const char* from, const float* numbers, int num_stages) {
  extern __shared__ __align__(kAlign) char ring[];
  __shared__ uint64_t full[kWarps][kMostStages];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32) return;
  Stages stages(ring, full[warp], warp, num_stages, (nbytes + kAlign - 1) / kAlign * kAlign);
  for (int i = 0; i < num_stages; ++i) sm90::barrier_init(&stages.full[i], 1);
  sm90::barrier_init_fence();
  const Jumping order(rows);
  const int workers = gridDim.x * kWarps;
  const auto request = [&](int number, int stage) {
    if (number >= order.count) return;
    const int row = order.row(number);
    sm90::barrier_expect(&stages.full[stage], row < 0 ? 0 : nbytes);
    if (row >= 0) load(stages.of(stage), from + int64_t{row} * nbytes, nbytes, &stages.full[stage]);
  };
  const int first = warp * gridDim.x + blockIdx.x;
  for (int i = 0; i < num_stages - 1; ++i) request(first + i * workers, i);
  for (int number = first; number < order.count; number += workers) {
    const int row = order.row(number);
    const int2 home = row < 0 ? make_int2(-1, 0) : rows.home[row];
    sm90::barrier_wait(&stages.full[stages.stage], stages.parity);
    if (home.x >= 0) {
      store(row_of_peer(addresses, home.x, slots_at + int64_t{home.y} * nbytes), stages.of(stages.stage), nbytes);
      if (numbers)
        *reinterpret_cast<float*>(row_of_peer(of_numbers, home.x, numbers_at + 4 * int64_t{home.y})) = numbers[row];
    }
    commit();
    wait_for_reads();  // the stage of the row before is free
    request(number + (num_stages - 1) * workers, stages.ahead);
    stages.advance();
  }
  wait_for_stores();
}

// ---- launches

Rows rows_of(const Call& call, size_t home) {
  const Array& ends = call.in[home + 1];
  const int last = static_cast<int>(std::min<int64_t>(ends.dim(0), call.share.last));
  return {call.in[home].as<const int2>(), ends.as<const int32_t>(), call.share.first, last,
          static_cast<int>(call.in[home].dim(0))};
}

template <auto kKernel, typename... Args>
void launch_rings(const char* op, int64_t ctas, int warps, int row_bytes, cudaStream_t stream, const Rows& rows,
                  Args... args) {
  if (rows.first >= rows.last) return;
  const int room = (row_bytes + kAlign - 1) / kAlign * kAlign;
  const int stages = std::min(kRingBytes / (warps * room), kMostStages);
  // The limit is of all row sizes: it is set once per context.
  allow_shared_memory<kKernel>(op, stream, kRingBytes);
  launch_kernel(op, kKernel, static_cast<unsigned>(ctas), warps * 32, warps * stages * room, stream, rows, args...,
                stages);
}

}  // namespace

void pull_fold(const Call& call, cudaStream_t stream) {
  const auto k = static_cast<int>(call.out[0].dim(1));
  const PullOut out{call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>(), call.out[2].as<uint8_t>(),
                    call.out[3].as<uint8_t>()};
  const auto launch = [&]<int kWarps>() {
    constexpr auto kKernel = pull_folds<kWarps>;
    const auto run = [&](auto... args) {
      launch_rings<kKernel>("pull_fold", call.attrs[2], kWarps, k + k / 32, stream, rows_of(call, 0), args...);
    };
    run(call.in[2].as<const int64_t>(), call.attrs[0], static_cast<int>(call.attrs[1]), k, out);
  };
  k <= 3072 ? launch.template operator()<16>() : launch.template operator()<8>();
}

void pull_rows(const Call& call, cudaStream_t stream) {
  const Array &values = call.out[0], &scales = call.out[1];
  const PlainOut out{values.as<uint8_t>(), scales.as<uint8_t>(), static_cast<int>(values.dim(1)),
                     static_cast<int>(scales.dim(1))};
  const auto nbytes = static_cast<int>(call.attrs[2]);
  const auto launch = [&]<int kWarps>() {
    constexpr auto kKernel = pulls<kWarps>;
    const auto run = [&](auto... args) {
      launch_rings<kKernel>("pull_rows", call.attrs[3], kWarps, nbytes, stream, rows_of(call, 0), args...);
    };
    run(call.in[2].as<const int64_t>(), call.attrs[0], static_cast<int>(call.attrs[1]), nbytes, out);
  };
  if (nbytes <= 3200) {
    launch.template operator()<16>();
  } else if (nbytes <= 6400) {
    launch.template operator()<8>();
  } else if (nbytes <= kLongestOfFour) {
    launch.template operator()<4>();
  } else {
    launch.template operator()<2>();
  }
}

void push_rows(const Call& call, cudaStream_t stream) {
  const Array &rows = call.in[0], &numbers = call.in[1];
  const auto nbytes = static_cast<int>(2 * rows.dim(1));
  const auto launch = [&]<int kWarps>() {
    constexpr auto kKernel = pushes<kWarps>;
    const auto run = [&](auto... args) {
      launch_rings<kKernel>("push_rows", call.attrs[2], kWarps, nbytes, stream, rows_of(call, 2), args...);
    };
    run(call.in[4].as<const int64_t>(), call.in[5].as<const int64_t>(), call.attrs[0], call.attrs[1], nbytes,
        rows.as<const char>(), numbers.dim(0) ? numbers.as<const float>() : nullptr);
  };
  if (nbytes <= 6144) {
    launch.template operator()<8>();
  } else if (nbytes <= kLongestOfFour) {
    launch.template operator()<4>();
  } else {
    launch.template operator()<2>();
  }
}

}  // namespace mxep::cuda
