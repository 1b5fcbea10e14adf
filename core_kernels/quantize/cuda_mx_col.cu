// Quantizes columns, or rows and columns in one read. Rows alone reach a copy's speed in Triton.
//
//   x (B, M, K) --8 bytes of 32 rows a lane--> register_tile.cuh --> q (B, M, K)    sf (B, M, K/32)
//                                                                    q_t (B, K, M)  sf_t (B, K, M/32)
//
// oracle.py defines every byte.
#include "cuda/driver.h"
#include "cuda/ops.h"
#include "quantize/persistent_tiles.cuh"
#include "quantize/register_tile.cuh"

namespace mxep::cuda {
namespace {

enum class Direction { kCol, kBoth };

template <typename T>
using Staged = StagedColumns<T::kRows, T::kCols, T::kColumns>;

// Quantizes the columns of a tile.
template <typename T, bool kVector, typename Value>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    quantize_tiles(const Value* x, Grid grid, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& columns = *reinterpret_cast<Staged<T>*>(bytes);
  const TileCoord at = TileCoord::of<T>(grid, blockIdx.x);
  const T tile = load_tile<T, kVector>(x, grid, ThreadSlice::of<T>(grid, at));
  for_column_pairs(tile, [&](const auto* values, int block, int col) { columns.scale(values, rule, block, col); });
  __syncthreads();
  columns.template write<T::kThreads>(out, grid, at);
}

template <typename Value, Direction kDirection, bool kVector>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // An SM has 128 KiB of x in flight, the size of its register file: in two CTAs, or in one CTA if rows are quantized
  // too, because writes of 256 bytes of q, 256 of q_t and 8 scales of each cost less memory time than smaller writes.
  constexpr int kColumns = kVector ? 8 / sizeof(Value) : 2;
  using T = RegisterTile<decltype(pair_of(Value{}, Value{})), kColumns, 8, kDirection == Direction::kBoth ? 2 : 1>;
  const Array& x = call.in[0];
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  // Columns alone: CTAs that run at the same time write whole rows of q_t.
  const Grid grid =
      Grid::of<T>(x.leading(2), x.dim(-2), x.dim(-1), kDirection == Direction::kBoth ? PersistentTiles<T>::kDown : ~0u);
  if constexpr (kDirection == Direction::kBoth) {
    const auto schedule = PersistentTiles<T>::of(grid, multiprocessors(op));
    constexpr auto kKernel = quantize_persistent<T, Value>;
    constexpr int kBytes = sizeof(PersistentStaging<T>);
    allow_shared_memory<kKernel>(op, stream, kBytes);
    launch_kernel(op, kKernel, grid_x(op, schedule.ctas(grid)), T::kThreads, kBytes, stream, x.as<const Value>(), grid,
                  schedule, rule, out);
  } else {
    constexpr auto kKernel = quantize_tiles<T, kVector, Value>;
    constexpr int kBytes = sizeof(Staged<T>);
    allow_shared_memory<kKernel>(op, stream, kBytes);
    launch_kernel(op, kKernel, grid_x(op, grid.tiles()), T::kThreads, kBytes, stream, x.as<const Value>(), grid, rule,
                  out);
  }
}

template <typename Value, Direction kDirection>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // Rows are quantized in whole blocks, so that rows of x are always aligned.
  if (kDirection == Direction::kBoth || call.in[0].dim(-1) * sizeof(Value) % 8 == 0)
    quantize<Value, kDirection, true>(op, call, out, stream);
  else
    quantize<Value, kDirection, kDirection == Direction::kBoth>(op, call, out, stream);
}

template <Direction kDirection>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  if (call.in[0].dtype == DType::bf16)
    quantize<bf16, kDirection>(op, call, out, stream);
  else
    quantize<float, kDirection>(op, call, out, stream);
}

}  // namespace

void quantize_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<Direction::kCol>("quantize_col", call, {nullptr, nullptr, out(0), out(1)}, stream);
}

void quantize_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<Direction::kBoth>("quantize_both", call, {out(0), out(1), out(2), out(3)}, stream);
}

}  // namespace mxep::cuda
