// SwiGLU backward, the rows of dgate and dup quantized where they are made.
//
//   dh, gate, up (M, F), prob (M,) --> dgate, dup in registers --tile.cuh--> q, sf of each
//
// A CTA owns strips of rows and walks along each: dprob, a sum over F, stays in its registers until the strip's end,
// and the scales in shared memory until a sector of them is whole. Nothing waits for a column, so one pass's loads fly
// while another's values are worked on, without a ring in shared memory.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "swiglu/bwd.cuh"

namespace mxep::cuda {
namespace {

using T = SharedTile<128, 256>;

struct Fetched {
  Piece dh[kRowsAtOnce], gate[kRowsAtOnce], up[kRowsAtOnce];
};

__device__ Fetched fetch(const Inputs& in, const Grid& grid, const Spot& spot) {
  Fetched fetched;
  const bf16 *dh = in.dh + spot.offset, *gate = in.gate + spot.offset, *up = in.up + spot.offset;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, dh += grid.cols, gate += grid.cols, up += grid.cols) {
    fetched.gate[r] = load_piece<true>(gate, r < spot.rows, spot.columns);
    fetched.up[r] = load_piece<true>(up, r < spot.rows, spot.columns);
    fetched.dh[r] = load_piece<true>(dh, r < spot.rows, spot.columns);
  }
  return fetched;
}

struct Memory {
  SigmoidTable table;
  uint8_t scales[2][T::kRows][kSector];  // of dgate, of dup
  float prob[T::kRows], sums[T::kRows];
};

// Sums of the lanes that share a row, into lanes that own one row each.
__device__ void add_lanes(float (&sums)[T::kPasses][kRowsAtOnce], float (&rows)[T::kRows]) {
  constexpr int kLanes = T::kPieces, kLanesPerRow = kLanes / kRowsAtOnce;
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

__global__ void __launch_bounds__(T::kThreads, 1)
    backward_rows(Inputs in, Grid grid, ScaleRule rule, Outputs dgate_out, Outputs dup_out, float* dprob) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  constexpr int kTileScales = T::kCols / kBlock, kTilesPerSector = kSector / kTileScales;
  const auto place = [](uint32_t strip, uint32_t across) {
    return Place{0, int64_t{strip} * T::kRows, int64_t{across} * T::kCols};
  };
  Place at = place(blockIdx.x, 0);
  Fetched fetched = fetch(in, grid, Spot::of<T>(grid, at, 0));
  memory.table.fill();

  for (uint32_t strip = blockIdx.x; strip < grid.strips; strip += gridDim.x) {
    const int64_t row = at.row + threadIdx.x;
    const bool own = threadIdx.x < T::kRows && row < grid.rows;
    if (threadIdx.x < T::kRows) memory.prob[threadIdx.x] = own && in.prob ? in.prob[row] : 1.0f;
    __syncthreads();
    float sums[T::kPasses][kRowsAtOnce] = {};
    for (uint32_t across = 0; across < grid.tiles_across; ++across) {
      // Past its last tile a CTA fetches that once more.
      const bool strip_ends = across + 1 == grid.tiles_across, more = strip + gridDim.x < grid.strips;
      const Place next = !strip_ends ? place(strip, across + 1) : more ? place(strip + gridDim.x, 0) : at;
#pragma unroll
      for (int pass = 0; pass < T::kPasses; ++pass) {
        const Spot spot = Spot::of<T>(grid, at, pass);
        Piece dgate[kRowsAtOnce], dup[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r)
          backward(fetched.dh[r], fetched.gate[r], fetched.up[r], memory.table, memory.prob[spot.row + r], dgate[r],
                   dup[r], sums[pass][r]);
        // dgate is scaled before more is fetched, or the registers do not suffice.
        const int scale = across % kTilesPerSector * kTileScales + spot.col / kBlock;
        scale_rows<T>(dgate, rule, spot.rows, dgate_out.q + spot.offset, grid.cols, &memory.scales[0][spot.row][scale],
                      kSector);
        const bool done = pass + 1 == T::kPasses;
        fetched = fetch(in, grid, Spot::of<T>(grid, done ? next : at, done ? 0 : pass + 1));
        scale_rows<T>(dup, rule, spot.rows, dup_out.q + spot.offset, grid.cols, &memory.scales[1][spot.row][scale],
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
  allow_shared_memory<backward_rows>(kOp, stream, sizeof(Memory));
  launch_kernel(kOp, backward_rows, std::min(grid.strips, multiprocessors(kOp)), T::kThreads, sizeof(Memory), stream,
                Inputs::of(call), grid, ScaleRule(call.attrs[0], call.attrs[1]),
                Outputs{out(0), out(1), nullptr, nullptr}, Outputs{out(2), out(3), nullptr, nullptr},
                call.out.back().as<float>());
}

}  // namespace mxep::cuda
