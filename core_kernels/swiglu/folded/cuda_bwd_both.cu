// SwiGLU backward with every operand of the products that follow, folded: dgate and dup with one scale per row, and
// dgate, dup and h along the tokens with one scale per column and span.
//
//   first 256 columns of dh, gate, up --measure_rows--> least scales of the rows of dgate and dup
//
//   dh, gate, up (M, F)          a CTA has 64 columns of a group and walks down its spans; a warp has 32 x 32 values
//        |
//        | cp.async, a row of each quad 2 rows ahead
//        v
//   ring of 4 rows a quad --> dgate, dup in registers, h in shared memory --> parts of dprob, in scratch memory
//        |
//        |--- rows: codes, folded to the least scales --> qf               .-- fold_rows_in_place: rows with a larger
//        |          scales of blocks --> scratch memory                    |   scale, seldom
//        '--- columns: codes and scales of blocks, in shared memory        '-> qf, row_sf, dprob
//                  |
//                  |   running maximum of each column, in registers of the threads that write it
//                  v
//             codes times 2^(block's scale - running maximum) --> qf_t, span_sf
//
// The 8 warps that share 32 columns write a span while they compute the next one: they stage it, arrive at a barrier,
// and wait for the others only when their registers have half of the next span. CTAs wait for nothing. A CTA takes
// every n-th of the chains of spans, chains of the longest group first. oracle.py defines every byte but dprob's.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "cuda/sm90.cuh"
#include "fold/folded_tile.cuh"
#include "fold/rows_in_place.cuh"
#include "swiglu/backward/bwd.cuh"
#include "swiglu/backward/bwd_columns.cuh"
#include "swiglu/folded/chains.cuh"
#include "swiglu/folded/least_scales.cuh"
#include "swiglu/folded/rows.cuh"

namespace mxep::cuda {
namespace {

struct SpanTile {
  static constexpr int kDown = kSpan / kBlock, kAcross = 2;  // in warps: a group of columns is kDown warps
  static constexpr int kThreads = 32 * kDown * kAcross, kGroupThreads = 32 * kDown;
  static constexpr int kCols = kBlock * kAcross;
};
using T = SpanTile;

constexpr int kResults = 3;  // dgate, dup, h
constexpr int kAheadRows = 2;
constexpr int kChunks = kSpan / 16;                    // of a staged column
constexpr int kLineStep = T::kGroupThreads / kChunks;  // columns that a group writes at a time
constexpr int kLinesOfThread = kBlock / kLineStep;
constexpr int kChains = 4;  // in shared memory

struct BwdFold : Chains {
  BackwardInputs in;
  int64_t cols;
  uint8_t *qf[2], *qf_t[kResults], *span_sf[kResults];
  // Scratch memory.
  uint8_t* row_scales;  // (tiles_across, 2, M, 2): of the blocks of dgate's and dup's rows
  float* sums;          // (F/32, M): parts of dprob
  uint8_t* least;       // (2, M): magnitudes of the scales that blocks of dgate's and dup's rows have at least
};

template <typename By>
struct FoldShared {
  Vector8 ring[kRowsAtOnce][3][T::kThreads];  // of dh, gate, up; each thread reads its own loads
  Vector8 hidden[kRowsAtOnce][T::kThreads];
  uint4 codes[kResults][T::kAcross][kBlock][kChunks];  // the columns of a group are lines
  SigmoidTable<By> table;
  float4 prob[T::kThreads];
  alignas(16) uint8_t scales[kResults][T::kAcross][kBlock][T::kDown];
  uint64_t staged[T::kAcross], written[T::kAcross];
  Chain chains[kChains];
  GroupOrder groups;
};
static_assert(sizeof(FoldShared<SwiGLU>) <= 227 * 1024);

struct FoldThread {
  // From one lane, so that the compiler knows that a warp agrees.
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int group = warp % T::kAcross, band = warp / T::kAcross;
  int row = band * kBlock + lane / 4 * kRowsAtOnce, col = group * kBlock + lane % 4 * 8;
};

// The 4 rows of 8 columns that a thread loads of a span.
struct LoadSlice {
  int64_t offset;
  int row;  // of the matrix
  bool exists;

  static __device__ LoadSlice of(const BwdFold& p, const Chain& chain, int span, const FoldThread& thread) {
    const int64_t col = int64_t{chain.tile} * T::kCols + thread.col;
    const int row = chain.begin + span * kSpan + thread.row;
    return {row * p.cols + col, row, row < chain.end && col < p.cols};
  }
};

// Starts the loads of row r of a slice.
__device__ void fetch(const BwdFold& p, const LoadSlice& load, int r, auto& memory) {
  if (load.exists) {
    const int64_t offset = load.offset + r * p.cols;
    load_async<16>(&memory.ring[r][0][threadIdx.x], p.in.dh + offset, true);
    load_async<16>(&memory.ring[r][1][threadIdx.x], p.in.gate + offset, true);
    load_async<16>(&memory.ring[r][2][threadIdx.x], p.in.up + offset, true);
    if (r == 0 && p.in.prob) load_async<16>(&memory.prob[threadIdx.x], p.in.prob + load.row, true);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ void arrive(uint64_t* barrier) {  // a warp
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm90::shared_address(barrier)) : "memory");
}

// Writes zeros to the slots from `slot` on, which have no tokens.
__device__ void clear_slots(const BwdFold& p, int64_t slot) {
  const int64_t end = p.slots * p.cols / 4;
  for (int64_t i = slot * p.cols / 4 + blockIdx.x * T::kThreads + threadIdx.x; i < end; i += gridDim.x * T::kThreads)
#pragma unroll
    for (int which = 0; which < kResults; ++which) reinterpret_cast<uint32_t*>(p.span_sf[which])[i] = 0;
}

template <typename By>
__global__ void __launch_bounds__(T::kThreads, 1)
    backward_fold(const __grid_constant__ BwdFold p, ScaleRule rule, By by) {
  extern __shared__ uint4 bytes[];
  auto& s = *reinterpret_cast<FoldShared<By>*>(bytes);
  const FoldThread thread;
  const int lane = thread.lane, group = thread.group;
  // Of the columns that a thread writes: a chunk of 16 tokens of each.
  const int chunk = lane % kChunks, first_line = (thread.band * 32 + lane) / kChunks;

  p.order_groups<T::kThreads>(s.groups, reinterpret_cast<int*>(s.ring));
  s.table.fill(by);
  if (threadIdx.x == 0)
    for (int i = 0; i < T::kAcross; ++i) {
      sm90::barrier_init(&s.staged[i], T::kDown);
      sm90::barrier_init(&s.written[i], T::kDown);
    }
  __syncthreads();
  clear_slots(p, s.groups.slots[p.groups]);
  const bool takes = thread.warp == T::kThreads / 32 - 1;
  uint32_t at = blockIdx.x;
  const auto take = [&](int k) {
    const Chain chain = p.take(s.groups, at, [&](const Chain& of, int slot) {
      for (int i = lane; i < kResults * T::kCols / 4; i += 32) {
        const int64_t col = int64_t{of.tile} * T::kCols + i % (T::kCols / 4) * 4;
        if (col < p.cols) *reinterpret_cast<uint32_t*>(p.span_sf[i / (T::kCols / 4)] + slot * p.cols + col) = of.broken;
      }
    });
    if (lane == 0) s.chains[k % kChains] = chain;
  };
  if (takes) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) take(i);
  }
  __syncthreads();
  LoadSlice load = LoadSlice::of(p, s.chains[0], 0, thread);
#pragma unroll
  for (int r = 0; r < kAheadRows; ++r) fetch(p, load, r, s);

  uint32_t phase = 0;  // of the barriers: the parity of the number of spans

  // Of the columns that half a warp writes, a lane has the scales of one, of one result.
  const int its_line = first_line + min(lane % kChunks / kResults, kLinesOfThread - 1) * kLineStep,
            its_result = lane % kChunks % kResults;
  const bool has_scales = lane % kChunks < kLinesOfThread * kResults;
  uint32_t running = 0;  // the running maximum of its scales, plus 1

  // Writes the columns of a span, the last that was staged.
  const auto finish = [&](const Chain& chain, int span) {
    sm90::barrier_wait(&s.staged[group], phase ^ 1);
    const int begin = chain.begin + span * kSpan, blocks = min(chain.end - begin, kSpan) / kBlock;
    const int64_t left = int64_t{chain.tile} * T::kCols + group * kBlock;
    const uint32_t low = blocks < 4 ? (1u << blocks * 8) - 1 : ~0u,
                   high = blocks < 8 ? (1u << max(blocks - 4, 0) * 8) - 1 : ~0u;
    const uint2 bytes = *reinterpret_cast<const uint2*>(s.scales[its_result][group][its_line]);
    uint32_t four = __vmaxu4(__vadd4(bytes.x, kOnes) & low, __vadd4(bytes.y, kOnes) & high);
    four = __vmaxu4(four, four >> 16);
    const uint32_t largest = max(four & 0xFF, four >> 8 & 0xFF);
    if (span > 0)
      running = max(running, largest);
    else
      running = chain.first && largest ? min(largest + kHeadroom, kE8m0Nan) : largest;
    const uint32_t its_scale = max(running, 1) - 1;
    const int64_t slot = chain.slot + span;
    const bool inside = left < p.cols;
    if (has_scales && inside && slot < p.slots) {
      uint8_t* span_sf = its_result == 0 ? p.span_sf[0] : its_result == 1 ? p.span_sf[1] : p.span_sf[2];
      span_sf[slot * p.cols + left + its_line] = its_scale | chain.broken;
    }
    const bool writes = inside && chunk * 16 < blocks * kBlock;
    const int64_t first = (left + first_line) * p.tokens + begin + chunk * 16;
#pragma unroll
    for (int which = 0; which < kResults; ++which) {
      uint8_t* to = p.qf_t[which] + first;
#pragma unroll
      for (int i = 0; i < kLinesOfThread; ++i, to += kLineStep * p.tokens) {
        const int line = first_line + i * kLineStep;
        const uint32_t scale = __shfl_sync(~0u, its_scale, i * kResults + which, kChunks);
        const uint32_t power = fold_power(s.scales[which][group][line][chunk / 2], scale);
        const uint4 codes = folded(s.codes[which][group][line][swizzled(chunk, line)], power);
        if (writes) *reinterpret_cast<uint4*>(to) = codes;
      }
    }
    arrive(&s.written[group]);
  };

  bool any = false;  // a span is staged
  for (int k = 0;; ++k) {
    __syncthreads();
    const Chain& chain = s.chains[k % kChains];
    const int spans = __shfl_sync(~0u, chain.spans(), 0);
    if (spans == 0) {
      if (any) finish(s.chains[(k - 1) % kChains], s.chains[(k - 1) % kChains].spans() - 1);
      break;
    }
    if (takes) take(k + 2);
    const int64_t tile_col = int64_t{chain.tile} * T::kCols + thread.col;
#pragma unroll 1
    for (int span = 0; span < spans; ++span) {
      const int begin = chain.begin + span * kSpan;
      const bool exists = __shfl_sync(~0u, begin + thread.band * kBlock < chain.end && tile_col < p.cols, 0);
      const auto next_slice = [&] {
        const bool inside = span + 1 < spans;
        return LoadSlice::of(p, s.chains[(inside ? k : k + 1) % kChains], inside ? span + 1 : 0, thread);
      };
      Vector8 dgate[kRowsAtOnce], dup[kRowsAtOnce];
      float sums[kRowsAtOnce] = {};
      float prob[kRowsAtOnce] = {1.0f, 1.0f, 1.0f, 1.0f};
      const auto compute = [&](int r) {
        wait_for_row<kAheadRows>();
        if (r == 0 && p.in.prob) {
          const float4 four = s.prob[threadIdx.x];
          prob[0] = four.x, prob[1] = four.y, prob[2] = four.z, prob[3] = four.w;
        }
        if (r == kRowsAtOnce - kAheadRows) load = next_slice();
        fetch(p, load, (r + kAheadRows) % kRowsAtOnce, s);
        const auto& [dh, gate, up] = s.ring[r];
        Vector8 h;
        backward(dh[threadIdx.x], gate[threadIdx.x], up[threadIdx.x], s.table, by, prob[r], dgate[r], dup[r], sums[r],
                 &h);
        s.hidden[r][threadIdx.x] = h;
      };
      if (exists) {
        compute(0);
        compute(1);
      }
      if (any) {
        const bool inside = span > 0;
        const Chain& last = s.chains[(inside ? k : k - 1) % kChains];
        finish(last, (inside ? span : last.spans()) - 1);
      }
      if (exists) {
        compute(2);
        compute(3);
        exchange_halves<2, 2>(sums, [](float a, float b) { return a + b; });
        const int64_t row = begin + thread.row, at = row * p.cols + tile_col,
                      block = int64_t{chain.tile} * T::kAcross + group;
        if (p.in.prob) p.sums[block * p.tokens + begin + thread.band * kBlock + lane] = sums[0];
        if (any) sm90::barrier_wait(&s.written[group], phase ^ 1);
        const auto quantize_columns = [&](const Vector8(&vectors)[kRowsAtOnce], int which) {
          scale_warp(vectors, rule, thread.band, s.codes[which][group],
                     [&](int column, uint32_t byte) { s.scales[which][group][column][thread.band] = byte; });
        };
        const auto quantize = [&](const Vector8(&vectors)[kRowsAtOnce], int which) {
          const int64_t of_rows = which * p.tokens + row;
          quantize_columns(vectors, which);
          fold_rows(vectors, rule, p.least[of_rows + lane % kRowsAtOnce] - 1, p.qf[which] + at, p.cols,
                    p.row_scales + (int64_t{chain.tile} * 2 * p.tokens + of_rows) * 2 + group, 2);
        };
        quantize(dgate, 0);
        quantize(dup, 1);
        Vector8 h[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) h[r] = s.hidden[r][threadIdx.x];
        quantize_columns(h, 2);
      } else {
        load = next_slice();
#pragma unroll
        for (int r = 0; r < kAheadRows; ++r) fetch(p, load, r, s);
      }
      arrive(&s.staged[group]);
      any = true;
      phase ^= 1;
    }
  }
}

template <typename By>
void launch(const char* op, const Call& call, const By& by, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const int64_t rows = call.in[1].dim(0), cols = call.in[1].dim(1);
  BwdFold p{};
  p.ends = call.in[4].as<const int32_t>();
  p.groups = static_cast<int>(call.in[4].dim(0));
  p.tokens = rows;
  p.in = BackwardInputs::of(call);
  p.cols = cols;
  p.slots = rows / kSpan + p.groups;
  p.tiles_across = static_cast<uint32_t>(ceil_div(cols, T::kCols));
  p.chains = grid_x(op, int64_t{p.groups} * p.tiles_across);
  for (int i = 0; i < 2; ++i) p.qf[i] = out(4 * i);
  for (int i = 0; i < kResults; ++i) p.qf_t[i] = out(i < 2 ? 4 * i + 2 : 8), p.span_sf[i] = out(i < 2 ? 4 * i + 3 : 9);
  // plan_bwd.py: scratch_words
  p.row_scales = call.out.back().as<uint8_t>();
  p.sums = reinterpret_cast<float*>(p.row_scales + 4 * p.tiles_across * rows);
  p.least = reinterpret_cast<uint8_t*>(p.sums + cols / kBlock * rows);
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  const EndedRows ended{p.ends, p.groups, rows};
  if (rows && p.groups) {
    constexpr auto kMeasure = measure_rows<By>;
    const auto ctas = std::min<int64_t>(ceil_div(rows, kMeasuring / 32), 2 * multiprocessors(op));
    launch_kernel(op, kMeasure, static_cast<unsigned>(ctas), kMeasuring, 0, stream, p.in, ended, cols, rule, by,
                  p.least);
  }
  constexpr auto kKernel = backward_fold<By>;
  constexpr int kShared = sizeof(FoldShared<By>);
  allow_shared_memory<kKernel>(op, stream, kShared);
  const unsigned most = std::max(p.chains, 1u);  // without groups there are slots
  launch_kernel(op, kKernel, std::min(most, multiprocessors(op)), T::kThreads, kShared, stream, p, rule, by);
  if (rows == 0 || p.groups == 0) {
    check(op, cudaMemsetAsync(call.out[10].data, 0, call.out[10].nbytes(), stream));
    return;
  }
  RowsInPlace<2> folds{};
  folds.rows = ended;
  folds.cols = cols;
  folds.pairs = static_cast<int>(p.tiles_across);
  for (int i = 0; i < 2; ++i) folds.qf[i] = out(4 * i), folds.row_sf[i] = out(4 * i + 1);
  folds.scales = p.row_scales;
  folds.least = p.least;
  folds.parts = p.sums;
  folds.sum = p.in.prob ? call.out[10].as<float>() : nullptr;
  fold_in_place<kProbSlices>(op, folds, stream);
}

}  // namespace

void swiglu_bwd_fold(const Call& call, cudaStream_t stream) {
  const char* op = "swiglu_bwd_fold";
  with_swiglu(call, [&]<typename By>(const By& by) { launch(op, call, by, stream); });
}

}  // namespace mxep::cuda
