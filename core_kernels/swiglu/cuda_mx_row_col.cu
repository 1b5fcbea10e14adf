// SwiGLU forward; h is quantized in the kernel that computes it.
//
//   gate, up (M, F), prob (M,) --> h in registers, rounded to bf16 --tile.cuh--> q, sf  or  q_t, sf_t
//
// CTAs are persistent, so that the table of sigmoids is computed once per CTA. oracle.py defines every byte.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "swiglu/math.cuh"
#include "swiglu/tile.cuh"

namespace mxep::cuda {
namespace {

struct ForwardInputs {
  const bf16 *gate, *up;
  const float* prob;  // null: every row has probability 1
};

struct ForwardValues {
  Vector8 gate[kRowsAtOnce], up[kRowsAtOnce];
  float prob[kRowsAtOnce];
};

template <bool kVector>
__device__ ForwardValues fetch(const ForwardInputs& in, const Grid& grid, const TileCoord& at, const PassSlice& slice) {
  ForwardValues fetched;
  const bf16 *gate = in.gate + slice.offset, *up = in.up + slice.offset;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, gate += grid.cols, up += grid.cols) {
    fetched.gate[r] = load_vector<kVector>(gate, r < slice.rows, slice.columns);
    fetched.up[r] = load_vector<kVector>(up, r < slice.rows, slice.columns);
    fetched.prob[r] = in.prob && r < slice.rows ? __ldg(in.prob + at.row + slice.row + r) : 1.0f;
  }
  return fetched;
}

template <typename By>
__device__ void forward(const ForwardValues& from, const SigmoidTable<By>& table, const By& by,
                        Vector8 (&h)[kRowsAtOnce]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) h[r] = hidden(from.gate[r], from.up[r], table, by, from.prob[r]);
}

template <typename T, bool kCol, typename By>
struct ForwardShared {
  SigmoidTable<By> table;
};
template <typename T, typename By>
struct ForwardShared<T, true, By> {
  typename T::Values h;
  typename T::Columns columns;
  SigmoidTable<By> table;
};

template <typename T, bool kCol, bool kVector, typename By>
__global__ void __launch_bounds__(T::kThreads, 1)
    swiglu_tiles(ForwardInputs in, Grid grid, ScaleRule rule, By by, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<ForwardShared<T, kCol, By>*>(bytes);
  const uint32_t tiles = grid.all_strips * grid.tiles_across;
  TileCoord at = TileCoord::of<T>(grid, blockIdx.x);
  ForwardValues fetched = fetch<kVector>(in, grid, at, PassSlice::of<T>(grid, at, 0));
  memory.table.fill(by);
  __syncthreads();
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // After its last tile a CTA loads that tile once more.
    const TileCoord next = TileCoord::of<T>(grid, tile + gridDim.x < tiles ? tile + gridDim.x : tile);
#pragma unroll
    for (int pass = 0; pass < T::kPasses; ++pass) {
      const PassSlice slice = PassSlice::of<T>(grid, at, pass);
      Vector8 h[kRowsAtOnce];
      forward(fetched, memory.table, by, h);
      const bool done = pass + 1 == T::kPasses;
      const TileCoord& then = done ? next : at;
      fetched = fetch<kVector>(in, grid, then, PassSlice::of<T>(grid, then, done ? 0 : pass + 1));
      if constexpr (!kCol)
        scale_rows<T>(h, rule, slice.rows, out.q + slice.offset, grid.cols, out.sf + slice.offset / kBlock,
                      grid.cols / kBlock);
      if constexpr (kCol) stage<T>(h, slice, memory.h);
    }
    if constexpr (kCol) {
      __syncthreads();
      scale_columns<T>(memory.h, rule, memory.columns);
      __syncthreads();
      memory.columns.template write<T::kThreads>(out, grid, at);
    }
    at = next;
  }
}

template <bool kCol, bool kVector, typename By>
void launch(const char* op, const Call& call, const By& by, Outputs out, cudaStream_t stream) {
  // Loads of single values need more registers than 512 threads have.
  using T = SharedTile<kVector ? 256 : 128, 128>;
  const Array &gate = call.in[0], &up = call.in[1], &prob = call.in[2];
  const Grid grid = Grid::of<T>(1, gate.dim(0), gate.dim(1), kCol ? ~0u : 4);
  const ForwardInputs in{gate.as<const bf16>(), up.as<const bf16>(), prob.dim(0) ? prob.as<const float>() : nullptr};
  constexpr auto kKernel = swiglu_tiles<T, kCol, kVector, By>;
  constexpr int kBytes = sizeof(ForwardShared<T, kCol, By>);
  allow_shared_memory<kKernel>(op, stream, kBytes);
  launch_kernel(op, kKernel, std::min(grid_x(op, grid.tiles()), multiprocessors(op)), T::kThreads, kBytes, stream, in,
                grid, ScaleRule(call.attrs[0], call.attrs[1]), by, out);
}

}  // namespace

void swiglu_row(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  with_swiglu(call, [&]<typename By>(const By& by) {
    launch<false, true, By>("swiglu_row", call, by, {out(0), out(1), nullptr, nullptr}, stream);
  });
}

void swiglu_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const bool vector = call.in[0].dim(1) % 8 == 0;  // rows start at multiples of 16 bytes
  with_swiglu(call, [&]<typename By>(const By& by) {
    const auto launch_widest = vector ? launch<true, true, By> : launch<true, false, By>;
    launch_widest("swiglu_col", call, by, {nullptr, nullptr, out(0), out(1)}, stream);
  });
}

}  // namespace mxep::cuda
