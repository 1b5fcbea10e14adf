// bf16 matrices quantized and folded along both dims in one launch: weights.
//
//   x (B, M, K) --> qf (B, M, K)    row_sf (B, M)   one scale per row
//                   qf_t (B, K, M)  col_sf (B, K)   one scale per column
//
// All tiles of a matrix must be read before the scale of a row or of a column is known, and a matrix is larger than the
// registers of the device. A CTA therefore reads two tiles: it measures one, and writes another whose matrix has been
// measured. Both are of the same matrix or of matrices one after the other, so that L2 still holds much of the second.
//
//   ticket      0  1  2  ...  n-1 | n ...          lag  lag+1  ...       n: tiles of a matrix, lag >= n - 1
//   measures    0  1  2  ...  n-1 | n ...          lag  lag+1  ...       tiles in the order of tickets
//   writes                                         0    1      ...
//
// A CTA waits until all tiles of the matrix that it writes are measured. Every wait ends, whatever else runs on the
// device: tickets are given to CTAs as they start, the CTA waits only for tiles of its own ticket and of smaller ones,
// and their CTAs run and measure before they wait.
#include <algorithm>

#include "cuda/ops.h"
#include "fold/folded_tile.cuh"
#include "fold/magnitudes.cuh"
#include "fold/tile_source.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {
namespace {

using Tile = FoldTile<Bf16x2>;

struct MatrixFold {
  Grid grid;  // a strip of tiles is as wide as the matrix, a group of strips is a matrix
  uint32_t tiles, per_matrix, lag;
  uint8_t *qf, *row_sf, *qf_t, *col_sf;
  uint32_t *row_maxima, *col_maxima;  // magnitudes of all rows and columns
  uint32_t *measured, *tickets;       // tiles of each matrix; CTAs that have started
};

struct MatrixShared {
  StagedCodes<Tile::kRows, Tile::kCols, Tile::kColumns> codes;
  alignas(4) uint8_t magnitudes[Tile::kDown][Tile::kCols];
  uint32_t ticket;
  TileCoord measured, written;  // the CTA's two tiles
};

// Nothing reads the codes before the launch ends. L2 evicts them before x.
struct StreamingStore {
  template <typename Chunk>
  __device__ void operator()(Chunk* to, const Chunk& chunk) const {
    __stcs(to, chunk);
  }
};

// A tile that nothing reads again. L2 evicts it first.
__device__ Tile load_last(const bf16* x, const Grid& grid, const ThreadSlice& slice) {
  const bf16* from = slice.exists ? x + slice.first : x;
  const auto pitch_nbytes = static_cast<uint32_t>(grid.cols * sizeof(bf16));
  Tile tile;
#pragma unroll
  for (int r = 0; r < kBlock; ++r) {
    const uint2 bits = __ldcs(reinterpret_cast<const uint2*>(at_row(from, pitch_nbytes, r)));
    tile.rows[r] = reinterpret_cast<const Tile::Row&>(bits);
  }
  return tile;
}

__device__ void raise(uint32_t* maximum, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(maximum), "r"(value) : "memory");
}
// Adds one. Who reads the sum sees all that this CTA has written before its last barrier.
__device__ void count(uint32_t* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
// Returns when the count is `least`.
__device__ void wait_until(const uint32_t* counter, uint32_t least) {
  while (true) {
    uint32_t now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    if (now >= least) return;
    __nanosleep(64);
  }
}

// Raises the maxima of a tile's rows and columns, and counts the tile.
__device__ void measure(const bf16* x, const MatrixFold& p, ScaleRule rule, MatrixShared& s, TileCoord at) {
  constexpr int kCount = LaneRows<Tile>::kCount;
  const auto slice = ThreadSlice::of<Tile>(p.grid, at);
  const ThreadCoord<Tile> thread;
  const Tile tile = load_tile<Tile, true>(x, p.grid, slice);

  const uint32_t columns = __vadd4(column_bytes(tile, rule), kOnes), rows = __vadd4(row_bytes(tile, rule), kOnes);
  *reinterpret_cast<uint32_t*>(&s.magnitudes[thread.row / kBlock][thread.col]) = slice.exists ? columns : 0;
  const uint32_t of_rows = max_over_blocks<Tile>(slice.exists ? rows : 0);
  const int64_t lane = threadIdx.x % 32, row = at.row + thread.row + lane, col = at.col + threadIdx.x;
  const uint32_t of_row = __shfl_sync(~0u, of_rows, lane / kCount) >> lane % kCount * 8 & 0xFF;
  if (row < p.grid.rows) raise(p.row_maxima + at.batch * p.grid.rows + row, of_row);
  __syncthreads();
  if (threadIdx.x < Tile::kCols && col < p.grid.cols) {
    uint32_t of_col = 0;
#pragma unroll
    for (int i = 0; i < Tile::kDown; ++i) of_col = max(of_col, uint32_t{s.magnitudes[i][threadIdx.x]});
    raise(p.col_maxima + at.batch * p.grid.cols + col, of_col);
  }
  __syncthreads();
  if (threadIdx.x == 0) count(p.measured + at.batch);
}

// Four magnitudes in the bytes of a word, from words of their own.
__device__ uint32_t four_magnitudes(const uint32_t* from) {
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bytes |= poll(from + i) << i * 8;
  return bytes;
}

// Writes the codes of a tile, and the scales of its rows and columns if it is the first of them.
template <bool kHeld>
__device__ void write(const bf16* x, const MatrixFold& p, ScaleRule rule, MatrixShared& s, TileCoord at) {
  static_assert(Tile::kColumns == 4);
  const auto slice = ThreadSlice::of<Tile>(p.grid, at);
  const ThreadCoord<Tile> thread;
  const Tile tile = kHeld ? load_last(x, p.grid, slice) : load_tile<Tile, true>(x, p.grid, slice);
  const uint32_t columns = column_bytes(tile, rule), rows = row_bytes(tile, rule);
  if (threadIdx.x == 0) wait_until(p.measured + at.batch, p.per_matrix);
  __syncthreads();

  const int64_t row = at.batch * p.grid.rows + at.row + thread.row + threadIdx.x % Tile::kBlockLanes * 4;
  const int64_t col = at.batch * p.grid.cols + at.col + thread.col;
  const uint32_t of_rows = slice.exists ? four_magnitudes(p.row_maxima + row) : 0;
  const uint32_t of_columns = slice.exists ? four_magnitudes(p.col_maxima + col) : 0;
  const uint32_t col_scales = __vsub4(of_columns, kOnes);
  if (slice.exists && at.col == 0 && thread.col < kBlock)
    *reinterpret_cast<uint32_t*>(p.row_sf + row) = __vsub4(of_rows, kOnes);
  if (slice.exists && at.row == 0 && thread.row == 0) *reinterpret_cast<uint32_t*>(p.col_sf + col) = col_scales;

  stage_columns(tile, columns, s.codes, [&](int c) { return col_scales >> c % 4 * 8 & 0xFF; });
  __syncthreads();
  const int64_t first = (at.batch * p.grid.cols + at.col) * p.grid.rows + at.row;
  write_lines<Tile::kThreads>(s.codes.codes, s.codes.swizzled, reinterpret_cast<uint4*>(p.qf_t + first),
                              p.grid.rows / 16, p.grid.cols - at.col, (p.grid.rows - at.row) / 16, threadIdx.x,
                              StreamingStore{});
  fold_rows(tile, rows, of_rows, p.qf + slice.first, static_cast<uint32_t>(p.grid.cols), slice.exists,
            StreamingStore{});
}

// kHeld: L2 holds a matrix until it is written (plan_matrix.py). Otherwise tiles to measure are prefetched.
template <bool kHeld>
__global__ void __launch_bounds__(Tile::kThreads, 512 / Tile::kThreads)
    fold_matrices(const bf16* x, const __grid_constant__ MatrixFold p, ScaleRule rule) {
  constexpr uint32_t kAhead = 64;  // tickets; on an H200 128 is slower than no prefetch
  __shared__ MatrixShared s;
  if (threadIdx.x == 0) {
    const uint32_t ticket = atomicAdd(p.tickets, 1);
    s.ticket = ticket;
    if (ticket < p.tiles) s.measured = TileCoord::of<Tile>(p.grid, ticket);
    if (ticket >= p.lag) s.written = TileCoord::of<Tile>(p.grid, ticket - p.lag);
  }
  __syncthreads();
  const uint32_t ticket = s.ticket;
  if (!kHeld && ticket + kAhead < p.tiles) {
    const auto at = TileCoord::of<Tile>(p.grid, ticket + kAhead);
    const ThreadCoord<Tile> thread;
    prefetch_rows<Tile>(x + at.batch * p.grid.rows * p.grid.cols, p.grid.rows, p.grid.cols, at.row + thread.row,
                        at.col);
  }
  if (ticket < p.tiles) measure(x, p, rule, s, s.measured);
  if (ticket >= p.lag) write<kHeld>(x, p, rule, s, s.written);
}

}  // namespace

// attrs: rounding, satfinite, lag, held.
void quantize_matrix_fold(const Call& call, cudaStream_t stream) {
  const char* op = "quantize_matrix_fold";
  const Array &x = call.in[0], &scratch = call.out[4];
  const int64_t batch = x.leading(2), rows = x.dim(-2), cols = x.dim(-1);
  if (batch == 0) return;
  MatrixFold p{};
  p.grid = Grid::of<Tile>(batch, rows, cols, static_cast<uint32_t>(ceil_div(rows, Tile::kRows)));
  p.per_matrix = p.grid.strips * p.grid.tiles_across;
  const int64_t tiles = p.grid.tiles(), lag = std::min(p.per_matrix - 1 + call.attrs[2], tiles);
  const unsigned ctas = grid_x(op, tiles + lag);
  p.tiles = static_cast<uint32_t>(tiles);
  p.lag = static_cast<uint32_t>(lag);
  p.qf = call.out[0].as<uint8_t>();
  p.row_sf = call.out[1].as<uint8_t>();
  p.qf_t = call.out[2].as<uint8_t>();
  p.col_sf = call.out[3].as<uint8_t>();
  p.row_maxima = scratch.as<uint32_t>();
  p.col_maxima = p.row_maxima + batch * rows;
  p.measured = p.col_maxima + batch * cols;
  p.tickets = p.measured + batch;
  check(op, cudaMemsetAsync(scratch.data, 0, scratch.nbytes(), stream));
  launch_kernel(op, call.attrs[3] ? fold_matrices<true> : fold_matrices<false>, ctas, Tile::kThreads, 0, stream,
                x.as<const bf16>(), p, ScaleRule(call.attrs[0], call.attrs[1]));
}

}  // namespace mxep::cuda
