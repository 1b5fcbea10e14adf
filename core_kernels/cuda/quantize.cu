// Quantize columns, or rows and columns in one read. Rows alone reach a copy's speed in Triton.
//
//   x (B, M, K) --8 bytes of 32 rows a lane--> quantize_tile.cuh --> q (B, M, K)    sf (B, M, K/32)
//                                                                    q_t (B, K, M)  sf_t (B, K, M/32)
//
// core_kernels/oracle.py is the definition of every byte.
#include "launch.h"
#include "ops.h"
#include "quantize_tile.cuh"

namespace mxep::cuda {
namespace {

template <typename Value, bool kRow, bool kVector>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // An SM has 128 KiB of x in flight, as much as its registers hold: in two CTAs, or with rows in one, because
  // 256 bytes of q, 256 of q_t and 8 scales of each at a time cost the memory less than smaller pieces.
  constexpr int kColumns = kVector ? 8 / sizeof(Value) : 2;
  using T = RegisterTile<decltype(pair_of(Value{}, Value{})), kColumns, 8, kRow ? 2 : 1>;
  const Array& x = call.in[0];
  // Columns alone: CTAs that run together write whole rows of q_t.
  const Grid grid = Grid::of<T>(x.leading(2), x.dim(-2), x.dim(-1), kRow ? 4 : ~0u);
  const auto kernel = quantize_tiles<T, kRow, kVector, Value>;
  constexpr int kBytes = sizeof(Stage<T, kRow>);
  allow_shared_memory(op, kernel, kBytes);
  kernel<<<grid_x(op, grid.tiles()), T::kThreads, kBytes, stream>>>(x.as<const Value>(), grid,
                                                                    ScaleRule(call.attrs[0], call.attrs[1]), out);
  check_launch(op);
}

template <typename Value, bool kRow>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // Rows are scaled in whole blocks, so theirs are always aligned.
  if (kRow || call.in[0].dim(-1) * sizeof(Value) % 8 == 0)
    quantize<Value, kRow, true>(op, call, out, stream);
  else
    quantize<Value, false, false>(op, call, out, stream);
}

template <bool kRow>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  if (call.in[0].dtype == DType::bf16)
    quantize<bf16, kRow>(op, call, out, stream);
  else
    quantize<float, kRow>(op, call, out, stream);
}

}  // namespace

void quantize_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<false>("quantize_col", call, {nullptr, nullptr, out(0), out(1)}, stream);
}

void quantize_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  quantize<true>("quantize_both", call, {out(0), out(1), out(2), out(3)}, stream);
}

}  // namespace mxep::cuda
