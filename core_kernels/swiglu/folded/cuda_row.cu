// SwiGLU forward; the rows of h are quantized and folded in the kernel that computes them.
//
//   gate, up (M, F), prob (M,) --> h of a whole row in registers --> scales of its blocks --> largest of the row
//                                                '------------------------------------> codes, folded --> qf, row_sf
//
// Rows past the last group end are neither read nor written. A team of 1 to 16 warps has a row, 8 neighbouring values a
// lane at a time; a CTA has teams for as many rows as it has warps. CTAs are persistent, so that the table of sigmoids
// is computed once per CTA, and a team loads its next row while it writes one. oracle.py defines every byte.
//
// The clock of a GPU after matrix products is low, and a kernel with many instructions then no longer waits for memory.
// These are about 20 per value.
#include <algorithm>
#include <bit>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "cuda/tokens.cuh"
#include "swiglu/folded/rows.cuh"
#include "swiglu/math.cuh"

namespace mxep::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kVectors = kRowsAtOnce;  // of a lane: a CTA holds rows of up to 16384 values
constexpr int kWarpValues = 32 * 8;    // a vector of each lane

struct RowInputs {
  const bf16 *gate, *up;
  const float* prob;      // null: every row has probability 1
  const int32_t* before;  // the end of the group before the first one, or null
  EndedRows rows;
  int64_t cols;
  int team;  // threads of a row
  // A constant, which ptxas would compute where it is used if it knew it.
  uint32_t zeros = 0x80000000u;
};

struct RowValues {
  Vector8 gate[kVectors] = {}, up[kVectors] = {};
  float prob = 1;
};

template <typename By>
struct RowShared {
  SigmoidTable<By> table;
  uint32_t magnitudes[2][kWarps];  // of a row, by warp; of this row and of the next
};

// A lane's vectors of a row, kWarpValues apart. Whole blocks exist.
struct RowSlice {
  int first;  // value of the row
  int left;   // values of the warp from `first` on
  int count;  // of the vectors of a lane of the warp

  // The warps of a row have as many vectors, or one more.
  static __device__ RowSlice of(const RowInputs& in) {
    const int warps = in.team / 32, warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) % warps;
    const int cols = static_cast<int>(in.cols), all = (cols + kWarpValues - 1) / kWarpValues, more = all % warps;
    const int count = all / warps + (warp < more), begin = (all / warps * warp + min(warp, more)) * kWarpValues;
    const int first = begin + threadIdx.x % 32 * 8;
    return {first, min(begin + count * kWarpValues, cols) - first, count};
  }
  __device__ bool has(int i) const { return i * kWarpValues < left; }
  // Whether the block exists whose scale the lane has, the block of vector lane % 4.
  __device__ bool has_scale() const {
    const int i = threadIdx.x % kVectors;
    return i * (kWarpValues - 8) < left;
  }
};

// Loads a lane's vectors from `gate` and `up` on; those that do not exist stay as they are.
__device__ void fetch(RowValues& values, const RowSlice& slice, const bf16* gate, const bf16* up, const float* prob,
                      int64_t row) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!slice.has(i)) continue;
    values.gate[i] = load_vector<true>(gate + i * kWarpValues, true, 8);
    values.up[i] = load_vector<true>(up + i * kWarpValues, true, 8);
  }
  if (prob) values.prob = __ldg(prob + row);
}

template <typename By>
__global__ void __launch_bounds__(kThreads, 1)
    swiglu_row_folds(const RowInputs in, ScaleRule rule, By by, uint8_t* qf, uint8_t* row_sf) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<RowShared<By>*>(bytes);
  const int warps = in.team / 32, lane = threadIdx.x % 32, team = static_cast<int>(threadIdx.x) / 32 / warps;
  const bool leads = (threadIdx.x & (in.team - 1)) == 0;
  const auto slice = RowSlice::of(in);
  const uint32_t owned = slice.has_scale() ? 0xFF : 0;
  const int64_t step = int64_t{gridDim.x} * (kWarps / warps);
  const int64_t stride = step * in.cols, rows = in.rows.count();
  const int64_t begin = in.before ? max(__ldg(in.before), 0) : 0;
  int64_t row = begin + int64_t{blockIdx.x} * (kWarps / warps) + team;
  int64_t at = row * in.cols + slice.first;
  const bf16 *gate = in.gate + at, *up = in.up + at;
  RowValues fetched;
  if (row < rows) fetch(fetched, slice, gate, up, in.prob, row);
  memory.table.fill(by);
  __syncthreads();
  Vector8 h[kVectors] = {};
  for (int turn = 0; row < rows; turn ^= 1) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      if (i < slice.count) h[i] = hidden(fetched.gate[i], fetched.up[i], memory.table, by, fetched.prob);
    uint8_t *to_scale = row_sf + row, *to_codes = qf + at;
    row += step;
    at += stride;
    gate += stride;
    up += stride;
    asm("" : "+l"(at), "+l"(gate), "+l"(up));  // or each address is computed from the row
    if (row < rows) fetch(fetched, slice, gate, up, in.prob, row);

    uint32_t words[kVectors / 2];
#pragma unroll
    for (int w = 0; w < kVectors / 2; ++w) words[w] = row_word({largest(h[2 * w]), largest(h[2 * w + 1])});
    const uint32_t byte = e8m0_from_amax(exchanged_amax(words), rule);
    uint32_t magnitude = __reduce_max_sync(~0u, (byte + 1) & owned);
    if (warps > 1) {
      uint32_t* of_warps = memory.magnitudes[turn] + team * warps;
      if (lane == 0) of_warps[threadIdx.x / 32 & (warps - 1)] = magnitude;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(in.team) : "memory");
      magnitude = __reduce_max_sync(~0u, lane < warps ? of_warps[lane] : 0);
    }
    const uint32_t row_scale = magnitude - 1;
    if (leads) *to_scale = row_scale;

    const uint32_t scale = folding_scale(byte, row_scale & 0xFF);
    const auto write = [&]<bool kInfinite>() {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (i >= slice.count) break;
        const uint2 codes = folded_codes<kInfinite>(h[i], __shfl_sync(~0u, scale, i, kVectors), in.zeros);
        if (slice.has(i)) *reinterpret_cast<uint2*>(to_codes + i * kWarpValues) = codes;
      }
    };
    __any_sync(~0u, byte == kE8m0Max) ? write.template operator()<true>() : write.template operator()<false>();
  }
}

}  // namespace

void swiglu_row_fold(const Call& call, cudaStream_t stream) {
  constexpr const char* kOp = "swiglu_row_fold";
  const Array &gate = call.in[0], &prob = call.in[2], &ends = call.in[3];
  const int64_t rows = gate.dim(0), cols = gate.dim(1);
  const auto lanes = static_cast<unsigned>(ceil_div(cols, 8 * kVectors));
  const int team = static_cast<int>(std::max(std::bit_ceil(lanes), 32u));
  const RowInputs in{
      gate.as<const bf16>(),
      call.in[1].as<const bf16>(),
      prob.dim(0) ? prob.as<const float>() : nullptr,
      call.share.first ? ends.as<const int32_t>() + call.share.first - 1 : nullptr,
      {ends.as<const int32_t>(), static_cast<int>(std::min<int64_t>(ends.dim(0), call.share.last)), rows},
      cols,
      team};
  const auto ctas = static_cast<unsigned>(
      std::min<int64_t>(ceil_div(rows, kThreads / team), multiprocessors(kOp) - call.share.reserved));
  with_swiglu(call, [&]<typename By>(const By& by) {
    constexpr auto kKernel = swiglu_row_folds<By>;
    constexpr int kBytes = sizeof(RowShared<By>);
    allow_shared_memory<kKernel>(kOp, stream, kBytes);
    launch_kernel(kOp, kKernel, ctas, kThreads, kBytes, stream, in, ScaleRule(call.attrs[0], call.attrs[1]), by,
                  call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>());
  });
}

}  // namespace mxep::cuda
