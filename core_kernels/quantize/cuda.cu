// Quantize columns, or rows and columns in one read. Rows alone reach a copy's speed in Triton.
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

enum class Form { kCol, kBoth };

template <typename T>
using Stage = Columns<T::kRows, T::kCols, T::kColumns>;

// A tile's columns.
template <typename T, bool kVector, typename Value>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    quantize_tiles(const Value* x, Grid grid, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& columns = *reinterpret_cast<Stage<T>*>(bytes);
  const Place at = Place::of<T>(grid, blockIdx.x);
  const T tile = load_tile<T, kVector>(x, grid, Part::of<T>(grid, at));
  for_column_pairs(tile, [&](const auto* values, int block, int col) { columns.scale(values, rule, block, col); });
  __syncthreads();
  columns.template write<T::kThreads>(out, grid, at);
}

template <typename Value, Form kForm, bool kVector>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // An SM has 128 KiB of x in flight, as much as its registers hold: in two CTAs, or with rows in one, because
  // 256 bytes of q, 256 of q_t and 8 scales of each at a time cost the memory less than smaller pieces.
  constexpr int kColumns = kVector ? 8 / sizeof(Value) : 2;
  using T = RegisterTile<decltype(pair_of(Value{}, Value{})), kColumns, 8, kForm == Form::kBoth ? 2 : 1>;
  const Array& x = call.in[0];
  const ScaleRule rule(call.attrs[0], call.attrs[1]);
  // Columns alone: CTAs that run together write whole rows of q_t.
  const Grid grid = Grid::of<T>(x.leading(2), x.dim(-2), x.dim(-1), kForm == Form::kBoth ? Walks<T>::kDown : ~0u);
  if constexpr (kForm == Form::kBoth) {
    const auto walks = Walks<T>::of(grid, multiprocessors(op));
    constexpr auto kKernel = quantize_walks<T, Value>;
    constexpr int kBytes = sizeof(Walked<T>);
    allow_shared_memory<kKernel>(op, stream, kBytes);
    launch_kernel(op, kKernel, grid_x(op, walks.ctas(grid)), T::kThreads, kBytes, stream, x.as<const Value>(), grid,
                  walks, rule, out);
  } else {
    constexpr auto kKernel = quantize_tiles<T, kVector, Value>;
    constexpr int kBytes = sizeof(Stage<T>);
    allow_shared_memory<kKernel>(op, stream, kBytes);
    launch_kernel(op, kKernel, grid_x(op, grid.tiles()), T::kThreads, kBytes, stream, x.as<const Value>(), grid, rule,
                  out);
  }
}

template <typename Value, Form kForm>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // Rows are scaled in whole blocks, so theirs are always aligned.
  if (kForm == Form::kBoth || call.in[0].dim(-1) * sizeof(Value) % 8 == 0)
    quantize<Value, kForm, true>(op, call, out, stream);
  else
    quantize<Value, kForm, kForm == Form::kBoth>(op, call, out, stream);
}

template <Form kForm>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  if (call.in[0].dtype == DType::bf16)
    quantize<bf16, kForm>(op, call, out, stream);
  else
    quantize<float, kForm>(op, call, out, stream);
}

}  // namespace

void quantize_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<Form::kCol>("quantize_col", call, {nullptr, nullptr, out(0), out(1)}, stream);
}

void quantize_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<Form::kBoth>("quantize_both", call, {out(0), out(1), out(2), out(3)}, stream);
}

}  // namespace mxep::cuda
