// SwiGLU backward; the rows of dgate and dup are quantized in the kernel that computes them.
//
//   dh, gate, up (M, F), prob (M,) --> dgate, dup in registers --tile.cuh--> q, sf of each
//
// A CTA owns strips of rows and processes the tiles of a strip from left to right. dprob, a sum over F, stays in
// registers until the strip ends, the scales in shared memory until a sector is whole. No value depends on a column, so
// that the loads of one pass overlap the computation of another without a ring in shared memory.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "swiglu/backward/bwd.cuh"

namespace mxep::cuda {
namespace {

using T = SharedTile<128, 256>;

struct BackwardValues {
  Vector8 dh[kRowsAtOnce], gate[kRowsAtOnce], up[kRowsAtOnce];
};

__device__ BackwardValues fetch(const BackwardInputs& in, const Grid& grid, const PassSlice& slice) {
  BackwardValues fetched;
  const bf16 *dh = in.dh + slice.offset, *gate = in.gate + slice.offset, *up = in.up + slice.offset;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, dh += grid.cols, gate += grid.cols, up += grid.cols) {
    fetched.gate[r] = load_vector<true>(gate, r < slice.rows, slice.columns);
    fetched.up[r] = load_vector<true>(up, r < slice.rows, slice.columns);
    fetched.dh[r] = load_vector<true>(dh, r < slice.rows, slice.columns);
  }
  return fetched;
}

template <typename By>
struct BackwardRowShared {
  SigmoidTable<By> table;
  uint8_t scales[2][T::kRows][kSector];  // of dgate, of dup
  float prob[T::kRows], sums[T::kRows];
};

// Reduces the sums of the lanes that share a row, into lanes that own one row each.
__device__ void add_lanes(float (&sums)[T::kPasses][kRowsAtOnce], float (&rows)[T::kRows]) {
  constexpr int kLanes = T::kVectors, kLanesPerRow = kLanes / kRowsAtOnce;
  static_assert(kLanes <= 32);
#pragma unroll
  for (int pass = 0; pass < T::kPasses; ++pass) {
    float* own = sums[pass];
    exchange_halves<kLanes / 2, kRowsAtOnce / 2>(own, [](float a, float b) { return a + b; });
#pragma unroll
    for (int step = kLanesPerRow / 2; step; step /= 2) own[0] += __shfl_xor_sync(~0u, own[0], step);
    const int lane = threadIdx.x % kLanes, row = (pass * (T::kThreads / kLanes) + threadIdx.x / kLanes) * kRowsAtOnce;
    if (lane % kLanesPerRow == 0) rows[row + lane / kLanesPerRow] = own[0];
  }
}

template <typename By>
__global__ void __launch_bounds__(T::kThreads, 1) backward_rows(BackwardInputs in, Grid grid, ScaleRule rule, By by,
                                                                Outputs dgate_out, Outputs dup_out, float* dprob) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<BackwardRowShared<By>*>(bytes);
  constexpr int kTileScales = T::kCols / kBlock, kTilesPerSector = kSector / kTileScales;
  const auto coord = [](uint32_t strip, uint32_t across) {
    return TileCoord{0, int64_t{strip} * T::kRows, int64_t{across} * T::kCols};
  };
  TileCoord at = coord(blockIdx.x, 0);
  BackwardValues fetched = fetch(in, grid, PassSlice::of<T>(grid, at, 0));
  memory.table.fill(by);

  for (uint32_t strip = blockIdx.x; strip < grid.strips; strip += gridDim.x) {
    const int64_t row = at.row + threadIdx.x;
    const bool own = threadIdx.x < T::kRows && row < grid.rows;
    if (threadIdx.x < T::kRows) memory.prob[threadIdx.x] = own && in.prob ? in.prob[row] : 1.0f;
    __syncthreads();
    float sums[T::kPasses][kRowsAtOnce] = {};
    for (uint32_t across = 0; across < grid.tiles_across; ++across) {
      // After its last tile a CTA loads that tile once more.
      const bool strip_ends = across + 1 == grid.tiles_across, more = strip + gridDim.x < grid.strips;
      const TileCoord next = !strip_ends ? coord(strip, across + 1) : more ? coord(strip + gridDim.x, 0) : at;
#pragma unroll
      for (int pass = 0; pass < T::kPasses; ++pass) {
        const PassSlice slice = PassSlice::of<T>(grid, at, pass);
        Vector8 dgate[kRowsAtOnce], dup[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
          backward(fetched.dh[r], fetched.gate[r], fetched.up[r], memory.table, by, memory.prob[slice.row + r],
                   dgate[r], dup[r], sums[pass][r]);
        // dgate is quantized before the next loads, or the registers do not suffice.
        const int scale = across % kTilesPerSector * kTileScales + slice.col / kBlock;
        scale_rows<T>(dgate, rule, slice.rows, dgate_out.q + slice.offset, grid.cols,
                      &memory.scales[0][slice.row][scale], kSector);
        const bool done = pass + 1 == T::kPasses;
        fetched = fetch(in, grid, PassSlice::of<T>(grid, done ? next : at, done ? 0 : pass + 1));
        scale_rows<T>(dup, rule, slice.rows, dup_out.q + slice.offset, grid.cols, &memory.scales[1][slice.row][scale],
                      kSector);
      }
      if (strip_ends || across % kTilesPerSector == kTilesPerSector - 1) {
        __syncthreads();
        const int64_t first_col = across / kTilesPerSector * kTilesPerSector * T::kCols;
        const int64_t first = (at.row * grid.cols + first_col) / kBlock, pitch = grid.cols / kBlock;
        const int64_t scales = min(pitch - first_col / kBlock, int64_t{kSector});
        const auto as_is = [](int i, int) { return i; };
        write_lines<T::kThreads>(memory.scales[0], as_is, dgate_out.sf + first, pitch, grid.rows - at.row, scales);
        write_lines<T::kThreads>(memory.scales[1], as_is, dup_out.sf + first, pitch, grid.rows - at.row, scales);
        __syncthreads();
      }
      at = next;
    }
    add_lanes(sums, memory.sums);
    __syncthreads();
    if (own && in.prob) dprob[row] = memory.sums[threadIdx.x];
  }
}

}  // namespace

void swiglu_bwd_row(const Call& call, cudaStream_t stream) {
  constexpr const char* kOp = "swiglu_bwd_row";
  if (finished_if_empty(kOp, call, stream)) return;
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const Grid grid = Grid::of<T>(1, call.in[1].dim(0), call.in[1].dim(1), 1);
  with_swiglu(call, [&]<typename By>(const By& by) {
    constexpr auto kKernel = backward_rows<By>;
    constexpr int kBytes = sizeof(BackwardRowShared<By>);
    allow_shared_memory<kKernel>(kOp, stream, kBytes);
    launch_kernel(kOp, kKernel, std::min(grid.strips, multiprocessors(kOp)), T::kThreads, kBytes, stream,
                  BackwardInputs::of(call), grid, ScaleRule(call.attrs[0], call.attrs[1]), by,
                  Outputs{out(0), out(1), nullptr, nullptr}, Outputs{out(2), out(3), nullptr, nullptr},
                  call.out.back().as<float>());
  });
}

}  // namespace mxep::cuda
