// SwiGLU backward; dgate and dup are quantized along columns, or along rows and columns, in the kernel that computes
// them; and h again along columns, if the op has it. Rows alone are in cuda_mx_row.cu.
//
//   dh, gate, up (M, F)           a band of 4 warps loads whole lines of its 32 rows, 256 bytes each
//        |
//        | cp.async, a row of each quad 2 or 3 rows ahead
//        v
//   ring of 4 rows a quad         a warp reads 32 x 32 values, one block in both dims, 4 rows of 8 columns a lane
//        |
//        | table of sigmoids
//        v
//   dgate, dup in registers ----> sums of dprob (M,), in shared memory until the strip ends
//   h in shared memory, each value in its own thread's place, until dgate and dup are quantized
//        |
//        |--- rows: 4 lanes share a block ---------> q, from registers; scales staged until a sector is whole --> sf
//        |
//        '--- columns: 8 lanes share a block ------> codes and scales staged for a strip's height --> q_t, sf_t
//
// Quantization needs no data of other warps. Staged data belong to a band of rows or to a group of columns, each with
// its own barrier, so that some warps wait for memory while others compute or write. A CTA owns strips of rows and
// processes the tiles of a strip in order, down before across. oracle.py defines every byte but dprob's.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "swiglu/backward/bwd.cuh"
#include "swiglu/backward/bwd_columns.cuh"

namespace mxep::cuda {
namespace {

struct BackwardTile {
  static constexpr int kDown = 4, kAcross = 4;  // in warps: a band is kAcross warps, a group of columns kDown
  static constexpr int kThreads = 32 * kDown * kAcross, kBandThreads = 32 * kAcross, kGroupThreads = 32 * kDown;
  static constexpr int kRows = kBlock * kDown, kCols = kBlock * kAcross;
  static constexpr int kPairs = 4, kVectors = kCols / 8, kBlockLanes = kBlock / 8;  // the constants of SharedTile
};
static_assert(BackwardTile::kAcross == kProbSlices);

// The staged part of a strip. More rows would leave no shared memory for the ring, and so would as many rows of three
// results.
template <bool kHidden>
struct StripStage {
  static constexpr int kResults = kHidden ? 3 : 2;  // dgate, dup, h
  static constexpr int kTallest = kHidden ? 1 : 2, kRows = kTallest * BackwardTile::kRows;
  static constexpr int kChunks = kRows / 16, kBlocks = kRows / kBlock;  // of a staged column
};

struct Strips {
  int64_t rows, cols;
  uint32_t count, tiles_across, tall;  // tall: tiles of a strip on top of each other
};

template <bool kHidden>
struct HiddenStash {};
template <>
struct HiddenStash<true> {
  Vector8 hidden[kRowsAtOnce][BackwardTile::kThreads];
};

template <bool kHidden, typename By>
struct BackwardColShared : HiddenStash<kHidden> {
  using Stage = StripStage<kHidden>;
  Vector8 ring[kRowsAtOnce][3][BackwardTile::kThreads];                         // of dh, gate, up
  uint4 codes[Stage::kResults][BackwardTile::kAcross][kBlock][Stage::kChunks];  // the columns of a group are lines
  SigmoidTable<By> table;
  uint8_t row_scales[2][Stage::kRows][kSector];
  uint8_t col_scales[Stage::kResults][BackwardTile::kAcross][kBlock][Stage::kBlocks];
  alignas(16) float prob[Stage::kRows];
  float sums[BackwardTile::kAcross][Stage::kRows];
};
static_assert(sizeof(BackwardColShared<false, SwiGLU>) <= 227 * 1024);
static_assert(sizeof(BackwardColShared<true, SwiGLU>) <= 227 * 1024);

// The values that a thread processes, and those that it loads for its band.
struct BackwardThread {
  int lane = threadIdx.x % 32, group = threadIdx.x / 32 % BackwardTile::kAcross,
      band = threadIdx.x / BackwardTile::kBandThreads;
  int row = band * kBlock + lane / 4 * kRowsAtOnce, col = group * kBlock + lane % 4 * 8;
  int load_row = threadIdx.x / BackwardTile::kVectors * kRowsAtOnce,
      load_col = threadIdx.x % BackwardTile::kVectors * 8;

  // Odd quads of rows swap neighbouring 64 bytes, so that 8 lanes, 4 of each of two quads, read all banks.
  static __device__ int slot(int row, int col) {
    const int quad = row / kRowsAtOnce;
    return quad * BackwardTile::kVectors + (col / 8 ^ (quad & 1) * 4);
  }
  __device__ int to() const { return slot(load_row, load_col); }
  __device__ int from() const { return slot(row, col); }

  // Barriers of the warps that share rows, and of the warps that share columns.
  __device__ void sync_band() const { sync<BackwardTile::kBandThreads>(1 + band); }
  __device__ void sync_group() const { sync<BackwardTile::kGroupThreads>(1 + BackwardTile::kDown + group); }

 private:
  template <int kThreads>
  static __device__ void sync(int barrier) {  // 0 is __syncthreads
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }
};

// The position of a CTA: the tile that it processes.
struct TilePosition {
  uint32_t strip, across, down;

  __device__ TilePosition next(const Strips& strips, uint32_t height) const {
    if (down + 1 < height) return {strip, across, down + 1};
    if (across + 1 < strips.tiles_across) return {strip, across + 1, 0};
    return {strip + gridDim.x, 0, 0};
  }
};

// The 4 rows of 8 columns of a tile that a thread loads.
struct LoadSlice {
  int64_t offset;
  int rows, columns;  // that exist

  static __device__ LoadSlice of(const Strips& strips, const TilePosition& at, const BackwardThread& thread) {
    const int64_t row = (int64_t{at.strip} * strips.tall + at.down) * BackwardTile::kRows + thread.load_row;
    const int64_t col = int64_t{at.across} * BackwardTile::kCols + thread.load_col;
    const int64_t rows = col < strips.cols ? strips.rows - row : 0;
    return {row * strips.cols + col, static_cast<int>(min(rows, int64_t{kRowsAtOnce})),
            static_cast<int>(min(strips.cols - col, int64_t{8}))};
  }
};

// Starts the loads of row r of a slice; zeros outside the matrix. Rows start at multiples of kBytes. Single values, of
// 2 bytes, go through registers and have arrived on return.
template <int kBytes>
__device__ void fetch(const BackwardInputs& in, const Strips& strips, const LoadSlice& load, int r, int to,
                      auto& memory) {
  const bool exists = r < load.rows;
  const int64_t offset = exists ? load.offset + r * strips.cols : 0;
#pragma unroll(kBytes > 2 ? 3 : 1)  // single values of one matrix at a time, or the registers do not suffice
  for (int i = 0; i < 3; ++i) {
    const bf16* from = (i == 0 ? in.dh : i == 1 ? in.gate : in.up) + offset;
    Vector8& slot = memory.ring[r][i][to];
    if constexpr (kBytes > 2) {
      load_async<kBytes>(&slot, from, exists);
#pragma unroll
      for (int first = kBytes / 2; first < 8; first += kBytes / 2) {
        const bool more = exists && first < load.columns;
        load_async<kBytes>(&slot.at[first / 2], more ? from + first : from, more);
      }
    } else {
      slot = load_vector<false>(from, exists, load.columns);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Number of rows that are loaded ahead. The ring has room for 3 besides the row that is read. On an H200, two instead
// of three cost 4% for columns alone; for both dims, with more to write, they gain 1.4% at F = 5120 and cost 0.7% at
// 2048.
template <bool kRow>
inline constexpr int kAhead = kRow ? 2 : kRowsAtOnce - 1;

// Stores with L2's evict_last policy. A CTA has at most a quarter of a sector of sf_t; its neighbours write the rest
// some microseconds before or after. The parts meet in L2, and DRAM receives a whole sector instead of four parts, each
// of which would cost as much. Sectors of sf are whole, but the neighbouring sectors follow tiles later: this policy
// gained 1% for them at F = 5120 on an H200.
struct StoreToKeep {
  __device__ void operator()(uint8_t* to, uint8_t byte) const {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(to), "r"(uint32_t{byte}), "l"(policy) : "memory");
  }
};

// Writes a group's 32 staged columns. `rows` of the strip and `cols` of the columns exist; `first` is the index of
// their first value.
__device__ void write_columns(const auto& memory, int which, const BackwardThread& thread, uint8_t* q_t, uint8_t* sf_t,
                              int64_t first, int64_t pitch, int64_t rows, int64_t cols) {
  const uint32_t index = thread.band * 32 + thread.lane;
  write_lines<BackwardTile::kGroupThreads>(memory.codes[which][thread.group], swizzled,
                                           reinterpret_cast<uint4*>(q_t + first), pitch / 16, cols, rows / 16, index);
  write_lines<BackwardTile::kGroupThreads>(
      memory.col_scales[which][thread.group], [](int block, int) { return block; }, sf_t + first / kBlock,
      pitch / kBlock, cols, rows / kBlock, index, StoreToKeep{});
}

template <bool kRow, bool kHidden, int kBytes, typename By>
__global__ void __launch_bounds__(BackwardTile::kThreads, 1)
    backward_tiles(BackwardInputs in, Strips strips, ScaleRule rule, By by, Outputs dgate_out, Outputs dup_out,
                   Outputs h_out, float* dprob) {
  using Stage = StripStage<kHidden>;
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<BackwardColShared<kHidden, By>*>(bytes);
  constexpr int kTileScales = BackwardTile::kCols / kBlock, kTilesPerSector = kSector / kTileScales;
  const BackwardThread thread;
  const int to = thread.to(), from = thread.from();
  const uint32_t strip_rows = strips.tall * BackwardTile::kRows;

  uint32_t strip = blockIdx.x;
  LoadSlice load = LoadSlice::of(strips, {strip, 0, 0}, thread);
#pragma unroll
  for (int r = 0; r < kAhead<kRow>; ++r) fetch<kBytes>(in, strips, load, r, to, memory);
  memory.table.fill(by);

  while (strip < strips.count) {
    const int64_t strip_row = int64_t{strip} * strip_rows;
    const int rows_here = static_cast<int>(min(strips.rows - strip_row, int64_t{strip_rows}));
    const uint32_t height = (rows_here + BackwardTile::kRows - 1) / BackwardTile::kRows;
    for (int row = threadIdx.x; row < Stage::kRows; row += BackwardTile::kThreads)
      memory.prob[row] = row < rows_here && in.prob ? in.prob[strip_row + row] : 1.0f;
    __syncthreads();
    for (uint32_t across = 0; across < strips.tiles_across; ++across) {
      const int64_t tile_col = int64_t{across} * BackwardTile::kCols;
#pragma unroll 1
      for (uint32_t down = 0; down < height; ++down) {
        const TilePosition next = TilePosition{strip, across, down}.next(strips, height);
        const int row = down * BackwardTile::kRows + thread.row;  // in the strip

        Vector8 dgate[kRowsAtOnce], dup[kRowsAtOnce];
        float sums[kRowsAtOnce] = {};
        const float4 four = *reinterpret_cast<const float4*>(memory.prob + row);
        const float prob[kRowsAtOnce] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          // Row r of the whole band has arrived, and the slots of the rows before it are free.
          wait_for_row<kAhead<kRow>>();
          thread.sync_band();
          if (r == kRowsAtOnce - kAhead<kRow>) load = LoadSlice::of(strips, next, thread);
          fetch<kBytes>(in, strips, load, (r + kAhead<kRow>) % kRowsAtOnce, to, memory);
          const auto& [dh, gate, up] = memory.ring[r];
          Vector8 h;
          backward(dh[from], gate[from], up[from], memory.table, by, prob[r], dgate[r], dup[r], sums[r],
                   kHidden ? &h : nullptr);
          if constexpr (kHidden) memory.hidden[r][threadIdx.x] = h;
        }
        exchange_halves<2, 2>(sums, [](float a, float b) { return a + b; });
        float& sum = memory.sums[thread.group][down * BackwardTile::kRows + thread.band * kBlock + thread.lane];
        sum = across ? sum + sums[0] : sums[0];

        const int block = down * BackwardTile::kDown + thread.band,
                  scale = across % kTilesPerSector * kTileScales + thread.group;
        const int rows_own = tile_col + thread.col < strips.cols ? min(rows_here - row, kRowsAtOnce) : 0;
        const int64_t offset = (strip_row + row) * strips.cols + tile_col + thread.col;
        if (down == 0) thread.sync_group();  // the previous columns have been written
        const auto quantize_columns = [&](const Vector8(&vectors)[kRowsAtOnce], int which) {
          scale_warp(vectors, rule, block, memory.codes[which][thread.group],
                     [&](int column, uint32_t byte) { memory.col_scales[which][thread.group][column][block] = byte; });
        };
        const auto quantize = [&](const Vector8(&vectors)[kRowsAtOnce], uint8_t* q, int which) {
          if constexpr (kRow)
            scale_rows<BackwardTile>(vectors, rule, rows_own, q + offset, strips.cols,
                                     &memory.row_scales[which][row][scale], kSector);
          quantize_columns(vectors, which);
        };
        quantize(dgate, dgate_out.q, 0);
        quantize(dup, dup_out.q, 1);
        if constexpr (kHidden) {
          Vector8 h[kRowsAtOnce];
#pragma unroll
          for (int r = 0; r < kRowsAtOnce; ++r) h[r] = memory.hidden[r][threadIdx.x];
          quantize_columns(h, 2);
        }
        if (down + 1 == height) {
          thread.sync_group();
          const int64_t col = tile_col + thread.group * kBlock, first = col * strips.rows + strip_row;
#pragma unroll 1  // the addresses of all do not fit in the registers
          for (int which = 0; which < Stage::kResults; ++which) {
            const Outputs& out = which == 0 ? dgate_out : which == 1 ? dup_out : h_out;
            write_columns(memory, which, thread, out.q_t, out.sf_t, first, strips.rows, rows_here, strips.cols - col);
          }
        }
        strip = next.strip;  // changes after the strip's last tile only
      }
      if (kRow && (across + 1 == strips.tiles_across || across % kTilesPerSector == kTilesPerSector - 1)) {
        __syncthreads();
        const int64_t first_col = across / kTilesPerSector * kTilesPerSector * BackwardTile::kCols;
        const int64_t first = (strip_row * strips.cols + first_col) / kBlock, pitch = strips.cols / kBlock;
        const int64_t scales = min(pitch - first_col / kBlock, int64_t{kSector});
        const auto as_is = [](int i, int) { return i; };
#pragma unroll
        for (int which = 0; which < 2; ++which)
          write_lines<BackwardTile::kThreads>(memory.row_scales[which], as_is,
                                              (which ? dup_out.sf : dgate_out.sf) + first, pitch, rows_here, scales,
                                              threadIdx.x, StoreToKeep{});
        __syncthreads();
      }
    }
    __syncthreads();
    if (in.prob)
      for (int row = threadIdx.x; row < rows_here; row += BackwardTile::kThreads) {
        float sum = 0;
#pragma unroll
        for (int group = 0; group < BackwardTile::kAcross; ++group) sum += memory.sums[group][row];
        dprob[strip_row + row] = sum;
      }
  }
}

template <bool kRow, bool kHidden, int kBytes, typename By>
void launch(const char* op, const Call& call, const By& by, Outputs dgate, Outputs dup, Outputs h,
            cudaStream_t stream) {
  if (finished_if_empty(op, call, stream)) return;
  const int64_t rows = call.in[1].dim(0), cols = call.in[1].dim(1), ctas = multiprocessors(op);
  // The taller the better, since tall strips fill more of a sector of sf_t, but only while the CTAs' work stays
  // balanced.
  const auto rounds = [&](int64_t tall) { return ceil_div(ceil_div(rows, tall * BackwardTile::kRows), ctas) * tall; };
  constexpr int64_t kTallest = StripStage<kHidden>::kTallest;
  const int64_t tall = rounds(kTallest) > rounds(1) ? 1 : kTallest;
  const Strips strips{rows, cols, static_cast<uint32_t>(ceil_div(rows, tall * BackwardTile::kRows)),
                      static_cast<uint32_t>(ceil_div(cols, BackwardTile::kCols)), static_cast<uint32_t>(tall)};
  constexpr auto kKernel = backward_tiles<kRow, kHidden, kBytes, By>;
  constexpr int kShared = sizeof(BackwardColShared<kHidden, By>);
  allow_shared_memory<kKernel>(op, stream, kShared);
  launch_kernel(op, kKernel, std::min<int64_t>(strips.count, ctas), BackwardTile::kThreads, kShared, stream,
                BackwardInputs::of(call), strips, ScaleRule(call.attrs[0], call.attrs[1]), by, dgate, dup, h,
                call.out.back().as<float>());
}

}  // namespace

void swiglu_bwd_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const int64_t cols = call.in[0].dim(1);
  with_swiglu(call, [&]<typename By>(const By& by) {
    // Numbers besides silu's need registers, which 4 or 8 bytes at a time leave no room for.
    const auto launch_single = launch<false, false, 2, By>;
    auto launch_widest = cols % 8 == 0 ? launch<false, false, 16, By> : launch_single;
    if constexpr (By::kPlain)
      if (cols % 8 && cols % 2 == 0)
        launch_widest = cols % 4 == 0 ? launch<false, false, 8, By> : launch<false, false, 4, By>;
    launch_widest("swiglu_bwd_col", call, by, {nullptr, nullptr, out(0), out(1)}, {nullptr, nullptr, out(2), out(3)},
                  {}, stream);
  });
}

void swiglu_bwd_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  with_swiglu(call, [&]<typename By>(const By& by) {
    launch<true, false, 16, By>("swiglu_bwd_both", call, by, {out(0), out(1), out(2), out(3)},
                                {out(4), out(5), out(6), out(7)}, {}, stream);
  });
}

void swiglu_bwd_all(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  with_swiglu(call, [&]<typename By>(const By& by) {
    launch<true, true, 16, By>("swiglu_bwd_all", call, by, {out(0), out(1), out(2), out(3)},
                               {out(4), out(5), out(6), out(7)}, {nullptr, nullptr, out(8), out(9)}, stream);
  });
}

}  // namespace mxep::cuda
