// Quantize columns, or rows and columns in one read, or columns folded to their groups' scales. Rows alone reach a
// copy's speed in Triton.
//
//   x (B, M, K) --8 bytes of 32 rows a lane--> quantize_tile.cuh --> q (B, M, K)    sf (B, M, K/32)
//                                                                    q_t (B, K, M)  sf_t (B, K, M/32)
//   x (M, K), group_sf (G, K), group_ends (G,) --the same----------> qf_t (K, M)
//
// core_kernels/oracle.py and oracle_folded.py define every byte.
#include "launch.h"
#include "ops.h"
#include "quantize_fold.cuh"

namespace mxep::cuda {
namespace {

enum class Form { kCol, kBoth, kColFold };

// Tiles that a CTA may scale one below the other. With rows, their blocks' scales wait until they fill a sector of each
// line of sf_t: DRAM pays for parts of sectors as for many.
template <Form kForm>
inline constexpr int kTilesDown = kForm == Form::kBoth ? 4 : 1;

// Codes of a tile's columns, scale bytes of these and of the tiles' above it.
template <typename T>
struct WalkedColumns : ColumnCodes<T::kRows, T::kCols, T::kColumns> {
  using Codes = ColumnCodes<T::kRows, T::kCols, T::kColumns>;
  static constexpr int kDown = kTilesDown<Form::kBoth>;
  uint8_t scales[T::kCols][kDown * T::kDown];

  // Lines are whole multiples of the banks: their words change places.
  static __device__ int slot(int block, int col) { return block ^ (col / T::kColumns * 4 & (kDown * T::kDown - 1)); }

  template <typename Pair>
  __device__ void scale(const Pair* values, ScaleRule rule, int block, int col, int down) {
    const auto bytes = TwoScales::of(values, rule);
    const int at = slot(down * T::kDown + block, col);
    scales[col][at] = bytes.low;
    scales[col + 1][at] = bytes.high;
    Codes::put(values, bytes.template factor<Pair>(), block, col, [](uint4 codes, int) { return codes; });
  }

  // Of `tiles` from `top` down.
  __device__ void write_scales(Outputs out, const Grid& grid, const Place& top, int tiles) const {
    const int64_t first = ((top.batch * grid.cols + top.col) * grid.rows + top.row) / kBlock;
    const int64_t blocks = min((grid.rows - top.row) / kBlock, int64_t{tiles} * T::kDown);
    write_lines<T::kThreads>(scales, slot, out.sf_t + first, grid.rows / kBlock, grid.cols - top.col, blocks);
  }
};

template <typename T, Form kForm>
struct Stage {
  Columns<T::kRows, T::kCols, T::kColumns> columns;
};
template <typename T>
struct Stage<T, Form::kBoth> {
  WalkedColumns<T> columns;
  uint8_t row_scales[2][T::kRows][T::kBlocks];  // a tile's leave while those of the next come
};
template <typename T>
struct Stage<T, Form::kColFold> {
  ColumnCodes<T::kRows, T::kCols, T::kColumns> columns;
};

// The first `walks` CTAs have kTilesDown tiles each, one below the other, the others one.
template <typename T, Form kForm, bool kVector, typename Value>
__global__ void __launch_bounds__(T::kThreads, 512 / T::kThreads)
    quantize_tiles(const Value* x, Groups groups, Grid grid, uint32_t walks, ScaleRule rule, Outputs out) {
  extern __shared__ uint4 bytes[];
  auto& stage = *reinterpret_cast<Stage<T, kForm>*>(bytes);
  constexpr int kDown = kTilesDown<kForm>;
  const int tiles = blockIdx.x < walks ? kDown : 1;
  Place at = Place::of<T>(grid, blockIdx.x + min(blockIdx.x, walks) * (kDown - 1));
  const Own<T> own;
  const int64_t cols = grid.cols - at.col - own.col;
  int64_t first = (at.batch * grid.rows + at.row + own.row) * grid.cols + at.col + own.col;
  bool exist = at.row + own.row < grid.rows && cols > 0;
  // What is not there is read from where something is, and not written.
  const auto load = [&] { return load_tile<T, kVector>(exist ? x + first : x, grid.cols, cols); };

  // Asked for before x, so that the scales are there when x is.
  const int32_t ends = kForm == Form::kColFold ? groups.first_ends() : 0;
  T tile = load();
  if constexpr (kForm == Form::kColFold) {
    const int group = groups.find(at.row + own.row, ends);
    if (group < groups.count) {
      const uint8_t* scales = groups.scales + group * grid.cols + at.col + own.col;
      fold_columns(tile, rule, load_bytes<T, kVector>(scales, cols), stage.columns);
    } else {
      stage.columns.clear(own.row / kBlock, own.col);
    }
    __syncthreads();
    stage.columns.template write<T::kThreads>(out, grid, at);
  } else if constexpr (kForm == Form::kCol) {
    for_column_pairs(tile,
                     [&](const auto* values, int block, int col) { stage.columns.scale(values, rule, block, col); });
    __syncthreads();
    stage.columns.template write<T::kThreads>(out, grid, at);
  } else {
    const Place top = at;
#pragma unroll 1
    for (int down = 0;;) {
      auto& row_scales = stage.row_scales[down % 2];
      scale_rows(tile, rule, out.q + first, grid.cols, exist, row_scales);
      __syncthreads();  // the tile above has left
      for_column_pairs(
          tile, [&](const auto* values, int block, int col) { stage.columns.scale(values, rule, block, col, down); });
      __syncthreads();

      // The next tile comes while this one leaves.
      const Place now = at;
      const bool more = ++down < tiles;
      if (more) {
        at.row += T::kRows;
        first += T::kRows * grid.cols;
        exist = at.row + own.row < grid.rows && cols > 0;
        tile = load();
      }
      stage.columns.Codes::template write<T::kThreads>(out, grid, now);
      write_lines<T::kThreads>(
          row_scales, [](int block, int) { return block; },
          out.sf + ((now.batch * grid.rows + now.row) * grid.cols + now.col) / kBlock, grid.cols / kBlock,
          grid.rows - now.row, (grid.cols - now.col) / kBlock);
      if (!more) break;
    }
    stage.columns.write_scales(out, grid, top, tiles);
  }
}

template <typename Value, Form kForm, bool kVector>
void quantize(const char* op, const Call& call, Outputs out, cudaStream_t stream) {
  // An SM has 128 KiB of x in flight, as much as its registers hold: in two CTAs, or with rows in one, because
  // 256 bytes of q, 256 of q_t and 8 scales of each at a time cost the memory less than smaller pieces.
  constexpr int kColumns = kVector ? 8 / sizeof(Value) : 2;
  using T = RegisterTile<decltype(pair_of(Value{}, Value{})), kColumns, 8, kForm == Form::kBoth ? 2 : 1>;
  const Array& x = call.in[0];
  // Columns alone: CTAs that run together write whole rows of q_t.
  constexpr int kDown = kTilesDown<kForm>;
  const Grid grid = Grid::of<T>(x.leading(2), x.dim(-2), x.dim(-1), kForm == Form::kBoth ? kDown : ~0u);
  // As many walks as all SMs have time for; what is left is shared out in single tiles.
  int64_t walks = 0;
  if (kDown > 1 && (grid.strips == grid.all_strips || grid.strips % kDown == 0)) {
    const int64_t sms = multiprocessors(op);
    walks = int64_t{grid.all_strips / kDown} * grid.tiles_across / sms * sms;
  }
  const auto kernel = quantize_tiles<T, kForm, kVector, Value>;
  constexpr int kBytes = sizeof(Stage<T, kForm>);
  allow_shared_memory(op, kernel, kBytes);
  Groups groups{};
  if constexpr (kForm == Form::kColFold)
    groups = {call.in[2].as<const int32_t>(), call.in[1].as<const uint8_t>(), static_cast<int>(call.in[2].dim(0))};
  kernel<<<grid_x(op, grid.tiles() - walks * (kDown - 1)), T::kThreads, kBytes, stream>>>(
      x.as<const Value>(), groups, grid, static_cast<uint32_t>(walks), ScaleRule(call.attrs[0], call.attrs[1]), out);
  check_launch(op);
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

void quantize_col_fold(const Call& call, cudaStream_t stream) {
  quantize<Form::kColFold>("quantize_col_fold", call, {nullptr, nullptr, call.out[0].as<uint8_t>(), nullptr}, stream);
}

}  // namespace mxep::cuda
