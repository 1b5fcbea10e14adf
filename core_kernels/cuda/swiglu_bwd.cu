// SwiGLU backward, dgate and dup quantized where they are made.
//
//   dh, gate, up (M, F), prob (M,) --> dgate, dup in registers --swiglu_tile.cuh--> q, sf | q_t, sf_t | both, of each
//
// A CTA owns strips of rows and walks along each: dprob, a sum over F, stays in its registers until the strip's end,
// and the rows' scales in shared memory until a sector of them is whole, since DRAM pays for parts of one as for many
// sectors. core_kernels/oracle_swiglu.py defines every byte but dprob's.
#include <algorithm>

#include "launch.h"
#include "ops.h"
#include "swiglu_math.cuh"
#include "swiglu_tile.cuh"

namespace mxep::cuda {
namespace {

constexpr int kSector = 32;  // bytes

struct Inputs {
  const bf16 *dh, *gate, *up;
  const float* prob;  // null: every row weighs one, and there is no dprob
};

struct Fetched {
  Piece dh[kRowsAtOnce], gate[kRowsAtOnce], up[kRowsAtOnce];
};

template <bool kVector>
__device__ Fetched fetch(const Inputs& in, const Grid& grid, const Spot& spot) {
  Fetched fetched;
  const bf16 *dh = in.dh + spot.offset, *gate = in.gate + spot.offset, *up = in.up + spot.offset;
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r, dh += grid.cols, gate += grid.cols, up += grid.cols) {
    fetched.gate[r] = load_piece<kVector>(gate, r < spot.rows, spot.columns);
    fetched.up[r] = load_piece<kVector>(up, r < spot.rows, spot.columns);
    fetched.dh[r] = load_piece<kVector>(dh, r < spot.rows, spot.columns);
  }
  return fetched;
}

// Adds to `sums` what the rows give to dprob.
__device__ void backward(const Fetched& from, const SigmoidTable& table, const float* prob, Piece (&dgate)[kRowsAtOnce],
                         Piece (&dup)[kRowsAtOnce], float (&sums)[kRowsAtOnce]) {
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    const float weight = prob[r];
    const auto one = [&](float g, float u, float d, float sigmoid, float& new_gate, float& new_up) {
      const float silu = __fmul_rn(g, sigmoid);
      const float slope = __fadd_rn(sigmoid, __fmul_rn(silu, __fsub_rn(1.0f, sigmoid)));
      sums[r] = __fmaf_rn(d, __fmul_rn(silu, u), sums[r]);
      d = __fmul_rn(d, weight);
      new_up = __fmul_rn(d, silu);
      new_gate = __fmul_rn(__fmul_rn(d, u), slope);
    };
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const Bf16x2 g = from.gate[r].at[p], u = from.up[r].at[p], d = from.dh[r].at[p];
      float low, high, gates[2], ups[2];
      table.look_up(g, low, high);
      one(g.low(), u.low(), d.low(), low, gates[0], ups[0]);
      one(g.high(), u.high(), d.high(), high, gates[1], ups[1]);
      dgate[r].at[p] = round_to_bf16(gates[0], gates[1]);
      dup[r].at[p] = round_to_bf16(ups[0], ups[1]);
    }
  }
}

template <typename T, bool kCol>
struct ColumnMemory {
  typename T::Values dgate, dup;
  typename T::Columns columns;
};
template <typename T>
struct ColumnMemory<T, false> {};

template <typename T, bool kCol>
struct Memory : ColumnMemory<T, kCol> {
  SigmoidTable table;
  uint8_t row_scales[2][T::kRows][kSector];  // of dgate, of dup
  float prob[T::kRows], sums[T::kRows];
};

// Sums of the lanes that share a row, into lanes that own one row each.
template <typename T>
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

template <typename T, bool kRow, bool kCol, bool kVector>
__global__ void __launch_bounds__(T::kThreads, 1)
    backward_strips(Inputs in, Grid grid, ScaleRule rule, Outputs dgate_out, Outputs dup_out, float* dprob) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<Memory<T, kCol>*>(bytes);
  constexpr int kTileScales = T::kCols / kBlock, kTilesPerSector = kSector / kTileScales;
  const auto place = [](uint32_t strip, uint32_t across) {
    return Place{0, int64_t{strip} * T::kRows, int64_t{across} * T::kCols};
  };
  Place at = place(blockIdx.x, 0);
  Fetched fetched = fetch<kVector>(in, grid, Spot::of<T>(grid, at, 0));
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
        backward(fetched, memory.table, memory.prob + spot.row, dgate, dup, sums[pass]);
        // Scaled and kept before more is fetched, or the registers do not suffice.
        const int scale = across % kTilesPerSector * kTileScales + spot.col / kBlock;
        if constexpr (kRow)
          scale_rows<T>(dgate, rule, spot.rows, dgate_out.q + spot.offset, grid.cols,
                        &memory.row_scales[0][spot.row][scale], kSector);
        if constexpr (kCol) keep<T>(dgate, spot, memory.dgate);
        const bool done = pass + 1 == T::kPasses;
        fetched = fetch<kVector>(in, grid, Spot::of<T>(grid, done ? next : at, done ? 0 : pass + 1));
        if constexpr (kRow)
          scale_rows<T>(dup, rule, spot.rows, dup_out.q + spot.offset, grid.cols,
                        &memory.row_scales[1][spot.row][scale], kSector);
        if constexpr (kCol) keep<T>(dup, spot, memory.dup);
      }
      if constexpr (kCol) {
#pragma unroll 1
        for (int second = 0; second < 2; ++second) {
          __syncthreads();
          scale_columns<T>(second ? memory.dup : memory.dgate, rule, memory.columns);
          __syncthreads();
          memory.columns.template write<T::kThreads>(second ? dup_out : dgate_out, grid, at);
        }
      }
      if (kRow && (strip_ends || across % kTilesPerSector == kTilesPerSector - 1)) {
        __syncthreads();
        const int64_t first_col = across / kTilesPerSector * kTilesPerSector * T::kCols;
        const int64_t first = (at.row * grid.cols + first_col) / kBlock, pitch = grid.cols / kBlock;
        const int64_t scales = min(pitch - first_col / kBlock, int64_t{kSector});
        const auto as_is = [](int i, int) { return i; };
        write_lines<T::kThreads>(memory.row_scales[0], as_is, dgate_out.sf + first, pitch, grid.rows - at.row, scales);
        write_lines<T::kThreads>(memory.row_scales[1], as_is, dup_out.sf + first, pitch, grid.rows - at.row, scales);
        __syncthreads();
      }
      at = next;
    }
    add_lanes<T>(sums, memory.sums);
    __syncthreads();
    if (own && in.prob) dprob[row] = memory.sums[threadIdx.x];
  }
}

template <bool kRow, bool kCol, bool kVector>
void launch(const char* op, const Call& call, Outputs dgate, Outputs dup, cudaStream_t stream) {
  // Single values take more registers to load than 512 threads have.
  using T = SharedTile<128, kVector ? 256 : 128>;
  const Array &dh = call.in[0], &gate = call.in[1], &up = call.in[2], &prob = call.in[3];
  const Grid grid = Grid::of<T>(1, gate.dim(0), gate.dim(1), 1);
  if (grid.tiles() == 0)  // rows without columns: the sums of nothing
    return check(op, cudaMemsetAsync(call.out.back().data, 0, call.out.back().nbytes(), stream));
  const Inputs in{dh.as<const bf16>(), gate.as<const bf16>(), up.as<const bf16>(),
                  prob.dim(0) ? prob.as<const float>() : nullptr};
  const auto kernel = backward_strips<T, kRow, kCol, kVector>;
  constexpr int kBytes = sizeof(Memory<T, kCol>);
  allow_shared_memory(op, kernel, kBytes);
  kernel<<<std::min(grid.strips, multiprocessors(op)), T::kThreads, kBytes, stream>>>(
      in, grid, ScaleRule(call.attrs[0], call.attrs[1]), dgate, dup, call.out.back().as<float>());
  check_launch(op);
}

}  // namespace

void swiglu_bwd_row(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  launch<true, false, true>("swiglu_bwd_row", call, {out(0), out(1), nullptr, nullptr},
                            {out(2), out(3), nullptr, nullptr}, stream);
}

void swiglu_bwd_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const bool vector = call.in[0].dim(1) % 8 == 0;  // rows start at multiples of 16 bytes
  (vector ? launch<false, true, true> : launch<false, true, false>)("swiglu_bwd_col", call,
                                                                    {nullptr, nullptr, out(0), out(1)},
                                                                    {nullptr, nullptr, out(2), out(3)}, stream);
}

void swiglu_bwd_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  launch<true, true, true>("swiglu_bwd_both", call, {out(0), out(1), out(2), out(3)}, {out(4), out(5), out(6), out(7)},
                           stream);
}

}  // namespace mxep::cuda
