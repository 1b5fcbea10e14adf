// SwiGLU forward; the rows of h are quantized and folded in the kernel that computes them.
//
//   gate, up (M, F), prob (M,) --> h of a whole row in registers --> scales of its blocks --> largest of the row
//                                                '------------------------------------> codes, folded --> qf, row_sf
//
// A team of 1 to 16 warps has a row, 8 neighbouring values a lane at a time; a CTA has teams for as many rows as it has
// warps. CTAs are persistent, so that the table of sigmoids is computed once per CTA, and a team loads its next row
// while it writes one. oracle.py defines every byte.
#include <algorithm>
#include <bit>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "fold/folded_tile.cuh"
#include "swiglu/math.cuh"
#include "swiglu/tile.cuh"

namespace mxep::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kVectors = 4;  // of a lane: a CTA holds rows of up to 16384 values

struct RowInputs {
  const bf16 *gate, *up;
  const float* prob;  // null: every row has probability 1
  int64_t rows, cols;
  int team;  // threads of a row
};

struct RowValues {
  Vector8 gate[kVectors], up[kVectors];
  float prob;
};

template <typename By>
struct RowShared {
  SigmoidTable<By> table;
  uint32_t magnitudes[2][kWarps];  // of a row, by warp; of this row and of the next
};

// Calls body(i, col) for each vector of the row that the thread has; `col`: of the first value. Whole blocks exist.
__device__ void for_vectors(const RowInputs& in, int thread, auto body) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int col = (thread + i * in.team) * 8;
    if (col < in.cols) body(i, col);
  }
}

__device__ RowValues fetch(const RowInputs& in, int64_t row, int thread) {
  RowValues fetched;
  const bool exists = row < in.rows;
  const int64_t first = exists ? row * in.cols : 0;
  fetched.prob = in.prob && exists ? __ldg(in.prob + row) : 1.0f;
  for_vectors(in, thread, [&](int i, int col) {
    fetched.gate[i] = load_vector<true>(in.gate + first + col, exists, 8);
    fetched.up[i] = load_vector<true>(in.up + first + col, exists, 8);
  });
  return fetched;
}

// The largest magnitude of four lanes, one block of a row.
__device__ uint32_t block_amax(const Vector8& values) {
  Bf16x2 largest = max_magnitude(max_magnitude(values.at[0], values.at[1]), max_magnitude(values.at[2], values.at[3]));
  largest = max_magnitude(largest, {__shfl_xor_sync(~0u, largest.bits, 1)});
  largest = max_magnitude(largest, {__shfl_xor_sync(~0u, largest.bits, 2)});
  return max(largest.magnitude().low_bits(), largest.magnitude().high_bits());  // the bits of NaN are the largest
}

template <typename By>
__global__ void __launch_bounds__(kThreads, 1)
    swiglu_row_folds(const RowInputs in, ScaleRule rule, By by, uint8_t* qf, uint8_t* row_sf) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<RowShared<By>*>(bytes);
  const int teams = kThreads / in.team, team = threadIdx.x / in.team, thread = threadIdx.x % in.team;
  const int64_t step = int64_t{gridDim.x} * teams;
  int64_t row = int64_t{blockIdx.x} * teams + team;
  RowValues fetched = fetch(in, row, thread);
  memory.table.fill(by);
  __syncthreads();
  for (int turn = 0; row < in.rows; row += step, turn ^= 1) {
    Vector8 h[kVectors];
    uint32_t scales[kVectors], magnitude = 0;
    for_vectors(in, thread,
                [&](int i, int) { h[i] = hidden(fetched.gate[i], fetched.up[i], memory.table, by, fetched.prob); });
    fetched = fetch(in, row + step, thread);
    // The lanes of a warp that have a vector are whole blocks, and the others take part in the exchanges.
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int first = (thread / 32 * 32 + i * in.team) * 8;
      if (first >= in.cols) continue;  // the same for a whole warp
      const bool exists = (thread + i * in.team) * 8 < in.cols;
      if (!exists) h[i] = {};
      scales[i] = e8m0_from_amax(block_amax(h[i]), rule);
      magnitude = max(magnitude, exists ? (scales[i] + 1) & 0xFF : 0);
    }
    magnitude = __reduce_max_sync(~0u, magnitude);
    if (in.team > 32) {
      uint32_t* of_warps = memory.magnitudes[turn] + team * (in.team / 32);
      if (thread % 32 == 0) of_warps[thread / 32] = magnitude;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(in.team) : "memory");
      const int lane = threadIdx.x % 32;
      magnitude = __reduce_max_sync(~0u, lane < in.team / 32 ? of_warps[lane] : 0);
    }
    const uint32_t row_scale = magnitude - 1;
    if (thread == 0) row_sf[row] = row_scale;
    for_vectors(in, thread, [&](int i, int col) {
      const Bf16x2 factor = Bf16x2::both(inverse_scale(scales[i]));
      const uint32_t power = fold_power(scales[i], row_scale & 0xFF);
      uint32_t codes[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Bf16x2 x = h[i].at[2 * j] * factor, y = h[i].at[2 * j + 1] * factor;
        codes[j] = folded(e4m3x4(x.low(), x.high(), y.low(), y.high()), power);
      }
      *reinterpret_cast<uint2*>(qf + row * in.cols + col) = make_uint2(codes[0], codes[1]);
    });
  }
}

}  // namespace

void swiglu_row_fold(const Call& call, cudaStream_t stream) {
  constexpr const char* kOp = "swiglu_row_fold";
  const Array &gate = call.in[0], &prob = call.in[2];
  const int64_t rows = gate.dim(0), cols = gate.dim(1);
  const auto lanes = static_cast<unsigned>(ceil_div(cols, 8 * kVectors));
  const int team = static_cast<int>(std::max(std::bit_ceil(lanes), 32u));
  const RowInputs in{gate.as<const bf16>(),
                     call.in[1].as<const bf16>(),
                     prob.dim(0) ? prob.as<const float>() : nullptr,
                     rows,
                     cols,
                     team};
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(ceil_div(rows, kThreads / team), multiprocessors(kOp)));
  with_swiglu(call, [&]<typename By>(const By& by) {
    constexpr auto kKernel = swiglu_row_folds<By>;
    constexpr int kBytes = sizeof(RowShared<By>);
    allow_shared_memory<kKernel>(kOp, stream, kBytes);
    launch_kernel(kOp, kKernel, ctas, kThreads, kBytes, stream, in, ScaleRule(call.attrs[0], call.attrs[1]), by,
                  call.out[0].as<uint8_t>(), call.out[1].as<uint8_t>());
  });
}

}  // namespace mxep::cuda
