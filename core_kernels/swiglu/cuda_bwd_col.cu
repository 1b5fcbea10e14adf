// SwiGLU backward, dgate and dup quantized along columns, or along rows and columns, where they are made. Rows alone
// are in cuda_bwd_row.cu.
//
//   dh, gate, up (M, F)           a band of 4 warps loads whole lines of its 32 rows, 256 bytes each
//        |
//        | cp.async, a row of each quad 2 or 3 rows ahead
//        v
//   ring of 4 rows a quad         a warp takes its 32 x 32 values, a block both ways, 4 rows of 8 columns a lane
//        |
//        | table of sigmoids
//        v
//   dgate, dup in registers ----> sums of dprob (M,), in shared memory until the strip ends
//        |
//        |--- rows: 4 lanes share a block ---------> q, from registers; scales staged until a sector is whole --> sf
//        |
//        '--- columns: 8 lanes share a block ------> codes and scales staged for a strip's height --> q_t, sf_t
//
// Scaling asks no other warp, and what is staged belongs to a band of rows or a group of columns, each with a barrier
// of its own: while some warps wait for memory, others compute and others write. A CTA owns strips of rows and walks
// along each, down before across. oracle.py defines every byte but dprob's.
#include <algorithm>

#include "cuda/driver.h"
#include "cuda/ops.h"
#include "swiglu/bwd.cuh"

namespace mxep::cuda {
namespace {

struct Tile {
  static constexpr int kDown = 4, kAcross = 4;  // warps: a band is kAcross of them, a group of columns kDown
  static constexpr int kThreads = 32 * kDown * kAcross, kBandThreads = 32 * kAcross, kGroupThreads = 32 * kDown;
  static constexpr int kRows = kBlock * kDown, kCols = kBlock * kAcross;
  static constexpr int kPairs = 4, kPieces = kCols / 8, kBlockLanes = kBlock / 8;  // as SharedTile has them
  static constexpr int kTallest = 2, kStripRows = kTallest * kRows;  // more staged rows leave the ring no room
  static constexpr int kChunks = kStripRows / 16, kBlocks = kStripRows / kBlock;  // of a staged column
};

struct Strips {
  int64_t rows, cols;
  uint32_t count, tiles_across, tall;  // tall: tiles of a strip on top of each other
};

struct Memory {
  Piece ring[kRowsAtOnce][3][Tile::kThreads];            // of dh, gate, up
  uint4 codes[2][Tile::kAcross][kBlock][Tile::kChunks];  // of dgate, of dup; a group's columns are lines
  SigmoidTable table;
  uint8_t row_scales[2][Tile::kStripRows][kSector];
  uint8_t col_scales[2][Tile::kAcross][kBlock][Tile::kBlocks];
  alignas(16) float prob[Tile::kStripRows];
  float sums[Tile::kAcross][Tile::kStripRows];
};
static_assert(sizeof(Memory) <= 227 * 1024);

// Which values a thread works on, and which it loads for its band.
struct Own {
  int lane = threadIdx.x % 32, group = threadIdx.x / 32 % Tile::kAcross, band = threadIdx.x / Tile::kBandThreads;
  int row = band * kBlock + lane / 4 * kRowsAtOnce, col = group * kBlock + lane % 4 * 8;
  int load_row = threadIdx.x / Tile::kPieces * kRowsAtOnce, load_col = threadIdx.x % Tile::kPieces * 8;

  // Odd quads of rows swap neighbouring 64 bytes: 8 lanes, 4 of each of two quads, read all banks.
  static __device__ int slot(int row, int col) {
    const int quad = row / kRowsAtOnce;
    return quad * Tile::kPieces + (col / 8 ^ (quad & 1) * 4);
  }
  __device__ int to() const { return slot(load_row, load_col); }
  __device__ int from() const { return slot(row, col); }

  // For the warps that share rows, and for those that share columns.
  __device__ void sync_band() const { sync<Tile::kBandThreads>(1 + band); }
  __device__ void sync_group() const { sync<Tile::kGroupThreads>(1 + Tile::kDown + group); }

 private:
  template <int kThreads>
  static __device__ void sync(int barrier) {  // 0 is __syncthreads
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }
};

// A tile on the way of a CTA.
struct Cursor {
  uint32_t strip, across, down;

  __device__ Cursor next(const Strips& strips, uint32_t height) const {
    if (down + 1 < height) return {strip, across, down + 1};
    if (across + 1 < strips.tiles_across) return {strip, across + 1, 0};
    return {strip + gridDim.x, 0, 0};
  }
};

// The 4 rows of 8 columns that a thread loads of a tile.
struct Patch {
  int64_t offset;
  int rows, columns;  // that exist

  static __device__ Patch of(const Strips& strips, const Cursor& at, const Own& own) {
    const int64_t row = (int64_t{at.strip} * strips.tall + at.down) * Tile::kRows + own.load_row;
    const int64_t col = int64_t{at.across} * Tile::kCols + own.load_col;
    const int64_t rows = col < strips.cols ? strips.rows - row : 0;
    return {row * strips.cols + col, static_cast<int>(min(rows, int64_t{kRowsAtOnce})),
            static_cast<int>(min(strips.cols - col, int64_t{8}))};
  }
};

// Starts to load kBytes, a multiple of which both addresses are, into shared memory; zeros where nothing exists.
template <int kBytes>
__device__ void load_async(void* to, const void* from, bool exists) {
  const auto slot = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(slot), "l"(from), "r"(bytes) : "memory");
  else  // L1 keeps the rest of the sector for the loads beside this one
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(slot), "l"(from), "n"(kBytes), "r"(bytes)
                 : "memory");
}

// Starts the loads of row r of a patch; zeros where the matrix has nothing. Rows start at multiples of kBytes. Single
// values, 2 bytes, go through registers and have arrived when this returns.
template <int kBytes>
__device__ void fetch(const Inputs& in, const Strips& strips, const Patch& patch, int r, int to, Memory& memory) {
  const bool exists = r < patch.rows;
  const int64_t offset = exists ? patch.offset + r * strips.cols : 0;
#pragma unroll(kBytes > 2 ? 3 : 1)  // single values of one matrix at a time, or the registers do not suffice
  for (int i = 0; i < 3; ++i) {
    const bf16* from = (i == 0 ? in.dh : i == 1 ? in.gate : in.up) + offset;
    Piece& slot = memory.ring[r][i][to];
    if constexpr (kBytes > 2) {
      load_async<kBytes>(&slot, from, exists);
#pragma unroll
      for (int first = kBytes / 2; first < 8; first += kBytes / 2) {
        const bool more = exists && first < patch.columns;
        load_async<kBytes>(&slot.at[first / 2], more ? from + first : from, more);
      }
    } else {
      slot = load_piece<false>(from, exists, patch.columns);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// How many rows are fetched ahead; the ring has room for 3 beside the one that is read. On an H200 two instead of three
// cost columns alone 4%; both ways, with more to write, they gain 1.4% at F = 5120 and cost 0.7% at 2048.
template <bool kRow>
inline constexpr int kAhead = kRow ? 2 : kRowsAtOnce - 1;

// For this thread's part of the oldest of kFetched rows.
template <int kFetched>
__device__ void wait_for_row() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kFetched - 1) : "memory");
}

// Where 16 codes of a staged column lie: a warp's words of 8 such chunks, two of every eighth column, are in all banks.
__device__ int swizzled(int chunk, int line) { return chunk ^ (line / 4 & 7); }

// Scales the 32 rows that a warp has of each of its columns: 8 lanes trade maxima until each has one column's scale.
__device__ void scale_warp(const Piece (&pieces)[kRowsAtOnce], ScaleRule rule, int block,
                           uint4 (&codes)[kBlock][Tile::kChunks], uint8_t (&scales)[kBlock][Tile::kBlocks]) {
  const int lane = threadIdx.x % 32, piece = lane % 4;
  uint32_t words[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    Bf16x2 largest = pieces[0].at[p];
#pragma unroll
    for (int r = 1; r < kRowsAtOnce; ++r) largest = max_magnitude(largest, pieces[r].at[p]);
    words[p] = largest.bits;
  }
  exchange_halves<16, 2>(words, Bf16x2::max_words);
  const uint32_t word = Bf16x2::max_words(words[0], __shfl_xor_sync(~0u, words[0], 4));
  const bool second = lane & 4;  // of the pair that the exchanges left here
  const int own = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + second;
  const uint32_t byte = e8m0_from_amax(Bf16x2::word_bits(word, second), rule);
  scales[piece * 8 + own][block] = byte;
  const uint32_t factor = inverse_scale(byte), other = __shfl_xor_sync(~0u, factor, 4);
  const uint32_t factors = second ? Bf16x2::from_bits(other, factor).bits : Bf16x2::from_bits(factor, other).bits;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const Bf16x2 both{__shfl_sync(~0u, factors, p / 2 * 16 + p % 2 * 8 + piece)};
    Bf16x2 v[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) v[r] = pieces[r].at[p] * both;
    const int line = piece * 8 + 2 * p, word_at = swizzled(2 * block + lane / 16, line) * 4 + lane / 4 % 4;
    reinterpret_cast<uint32_t*>(codes[line])[word_at] = e4m3x4(v[0].low(), v[1].low(), v[2].low(), v[3].low());
    reinterpret_cast<uint32_t*>(codes[line + 1])[word_at] = e4m3x4(v[0].high(), v[1].high(), v[2].high(), v[3].high());
  }
}

// L2 keeps what it is told to longer than all that the kernel streams through it. A CTA has a quarter of a sector of
// sf_t at most, its neighbours have the rest some microseconds before or after: their parts meet in L2, and DRAM gets
// a whole sector instead of four parts, each of which would cost as much. Sectors of sf are whole, but
// those beside them follow tiles later: to keep them as well gained 1% at F = 5120 on an H200.
struct StoreToKeep {
  __device__ void operator()(uint8_t* to, uint8_t byte) const {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(to), "r"(uint32_t{byte}), "l"(policy) : "memory");
  }
};

// What a group has staged of its 32 columns goes out: `rows` of the strip and `cols` of the columns exist, whose first
// value is at `first`.
__device__ void write_columns(const Memory& memory, int which, const Own& own, uint8_t* q_t, uint8_t* sf_t,
                              int64_t first, int64_t pitch, int64_t rows, int64_t cols) {
  const uint32_t thread = own.band * 32 + own.lane;
  write_lines<Tile::kGroupThreads>(memory.codes[which][own.group], swizzled, reinterpret_cast<uint4*>(q_t + first),
                                   pitch / 16, cols, rows / 16, thread);
  write_lines<Tile::kGroupThreads>(
      memory.col_scales[which][own.group], [](int block, int) { return block; }, sf_t + first / kBlock, pitch / kBlock,
      cols, rows / kBlock, thread, StoreToKeep{});
}

template <bool kRow, int kBytes>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_tiles(Inputs in, Strips strips, ScaleRule rule, Outputs dgate_out, Outputs dup_out, float* dprob) {
  extern __shared__ uint4 bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  constexpr int kTileScales = Tile::kCols / kBlock, kTilesPerSector = kSector / kTileScales;
  const Own own;
  const int to = own.to(), from = own.from();
  const uint32_t strip_rows = strips.tall * Tile::kRows;

  uint32_t strip = blockIdx.x;
  Patch patch = Patch::of(strips, {strip, 0, 0}, own);
#pragma unroll
  for (int r = 0; r < kAhead<kRow>; ++r) fetch<kBytes>(in, strips, patch, r, to, memory);
  memory.table.fill();

  while (strip < strips.count) {
    const int64_t strip_row = int64_t{strip} * strip_rows;
    const int rows_here = static_cast<int>(min(strips.rows - strip_row, int64_t{strip_rows}));
    const uint32_t height = (rows_here + Tile::kRows - 1) / Tile::kRows;
    for (int row = threadIdx.x; row < Tile::kStripRows; row += Tile::kThreads)
      memory.prob[row] = row < rows_here && in.prob ? in.prob[strip_row + row] : 1.0f;
    __syncthreads();
    for (uint32_t across = 0; across < strips.tiles_across; ++across) {
      const int64_t tile_col = int64_t{across} * Tile::kCols;
#pragma unroll 1
      for (uint32_t down = 0; down < height; ++down) {
        const Cursor next = Cursor{strip, across, down}.next(strips, height);
        const int row = down * Tile::kRows + own.row;  // of the strip

        Piece dgate[kRowsAtOnce], dup[kRowsAtOnce];
        float sums[kRowsAtOnce] = {};
        const float4 four = *reinterpret_cast<const float4*>(memory.prob + row);
        const float prob[kRowsAtOnce] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          // Row r of the whole band has come, and the slots that the rows before it were read from are free.
          wait_for_row<kAhead<kRow>>();
          own.sync_band();
          if (r == kRowsAtOnce - kAhead<kRow>) patch = Patch::of(strips, next, own);
          fetch<kBytes>(in, strips, patch, (r + kAhead<kRow>) % kRowsAtOnce, to, memory);
          const auto& [dh, gate, up] = memory.ring[r];
          backward(dh[from], gate[from], up[from], memory.table, prob[r], dgate[r], dup[r], sums[r]);
        }
        exchange_halves<2, 2>(sums, [](float a, float b) { return a + b; });
        float& sum = memory.sums[own.group][down * Tile::kRows + own.band * kBlock + own.lane];
        sum = across ? sum + sums[0] : sums[0];

        const int block = down * Tile::kDown + own.band, scale = across % kTilesPerSector * kTileScales + own.group;
        const int rows_own = tile_col + own.col < strips.cols ? min(rows_here - row, kRowsAtOnce) : 0;
        const int64_t offset = (strip_row + row) * strips.cols + tile_col + own.col;
        if (down == 0) own.sync_group();  // the columns before have been read
        const auto quantize = [&](const Piece(&pieces)[kRowsAtOnce], uint8_t* q, int which) {
          if constexpr (kRow)
            scale_rows<Tile>(pieces, rule, rows_own, q + offset, strips.cols, &memory.row_scales[which][row][scale],
                             kSector);
          scale_warp(pieces, rule, block, memory.codes[which][own.group], memory.col_scales[which][own.group]);
        };
        quantize(dgate, dgate_out.q, 0);
        quantize(dup, dup_out.q, 1);
        if (down + 1 == height) {
          own.sync_group();
          const int64_t col = tile_col + own.group * kBlock, first = col * strips.rows + strip_row;
#pragma unroll 1  // twice the addresses do not fit the registers
          for (int which = 0; which < 2; ++which)
            write_columns(memory, which, own, which ? dup_out.q_t : dgate_out.q_t,
                          which ? dup_out.sf_t : dgate_out.sf_t, first, strips.rows, rows_here, strips.cols - col);
        }
        strip = next.strip;  // another after the last tile alone
      }
      if (kRow && (across + 1 == strips.tiles_across || across % kTilesPerSector == kTilesPerSector - 1)) {
        __syncthreads();
        const int64_t first_col = across / kTilesPerSector * kTilesPerSector * Tile::kCols;
        const int64_t first = (strip_row * strips.cols + first_col) / kBlock, pitch = strips.cols / kBlock;
        const int64_t scales = min(pitch - first_col / kBlock, int64_t{kSector});
        const auto as_is = [](int i, int) { return i; };
#pragma unroll
        for (int which = 0; which < 2; ++which)
          write_lines<Tile::kThreads>(memory.row_scales[which], as_is, (which ? dup_out.sf : dgate_out.sf) + first,
                                      pitch, rows_here, scales, threadIdx.x, StoreToKeep{});
        __syncthreads();
      }
    }
    __syncthreads();
    if (in.prob)
      for (int row = threadIdx.x; row < rows_here; row += Tile::kThreads) {
        float sum = 0;
#pragma unroll
        for (int group = 0; group < Tile::kAcross; ++group) sum += memory.sums[group][row];
        dprob[strip_row + row] = sum;
      }
  }
}

template <bool kRow, int kBytes>
void launch(const char* op, const Call& call, Outputs dgate, Outputs dup, cudaStream_t stream) {
  if (finished_if_empty(op, call, stream)) return;
  const int64_t rows = call.in[1].dim(0), cols = call.in[1].dim(1), ctas = multiprocessors(op);
  // As tall as the CTAs' work stays even: tall strips fill more of a sector of sf_t.
  const auto rounds = [&](int64_t tall) { return ceil_div(ceil_div(rows, tall * Tile::kRows), ctas) * tall; };
  const int64_t tall = rounds(Tile::kTallest) > rounds(1) ? 1 : Tile::kTallest;
  const Strips strips{rows, cols, static_cast<uint32_t>(ceil_div(rows, tall * Tile::kRows)),
                      static_cast<uint32_t>(ceil_div(cols, Tile::kCols)), static_cast<uint32_t>(tall)};
  constexpr auto kKernel = backward_tiles<kRow, kBytes>;
  allow_shared_memory<kKernel>(op, stream, sizeof(Memory));
  launch_kernel(op, kKernel, std::min<int64_t>(strips.count, ctas), Tile::kThreads, sizeof(Memory), stream,
                Inputs::of(call), strips, ScaleRule(call.attrs[0], call.attrs[1]), dgate, dup,
                call.out.back().as<float>());
}

}  // namespace

void swiglu_bwd_col(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  const int64_t cols = call.in[0].dim(1);
  const auto launch_widest = cols % 8 == 0   ? launch<false, 16>
                             : cols % 4 == 0 ? launch<false, 8>
                             : cols % 2 == 0 ? launch<false, 4>
                                             : launch<false, 2>;
  launch_widest("swiglu_bwd_col", call, {nullptr, nullptr, out(0), out(1)}, {nullptr, nullptr, out(2), out(3)}, stream);
}

void swiglu_bwd_both(const Call& call, cudaStream_t stream) {
  const auto out = [&](int i) { return call.out[i].as<uint8_t>(); };
  launch<true, 16>("swiglu_bwd_both", call, {out(0), out(1), out(2), out(3)}, {out(4), out(5), out(6), out(7)}, stream);
}

}  // namespace mxep::cuda
