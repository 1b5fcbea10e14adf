// A stage with blocks apart becomes one in FP8, of the other blocks, and one in bf16 for each of its four blocks of 32
// that is apart in some row or column. A warpgroup that has no part in the products writes these operands, in the
// places of the ring.
//
//   loads  --loaded--> a stage --codes of the blocks apart out, zeros in--> 128 terms in FP8
//                                     |
//                                     v   in shared memory, then times 2^power
//   places --free----> a place --codes in---------------------------------> 32 or 64 terms in bf16
//
// Either is passed on through `full`. A power is the scale of a block minus that of its line.
//
// A line is a row of the output or a column; x and w are a block of a line of either operand.
//
//   terms in bf16        0 to 31                  32 to 63
//   own lines            x if apart, else 0       0 if apart, else x         (256 of a tile)
//   common lines         w                        w if apart, else 0         (128)
//
// So a sum has x w once: in FP8, or in bf16 if the block is apart in its row or in its column. Zeros change no sum,
// which depends on its row and column alone. Halves that no line needs are neither written nor multiplied. An E4M3 code
// times a power of two is exact in bf16.
//
// Beside the tensor cores an instruction of these warps takes about five cycles. A stage is loaded two stages before it
// is multiplied, and its blocks are multiplied after it: there is time for 600 instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/mx_math.cuh"
#include "cuda/sm90.cuh"
#include "grouped_gemm/blocks_apart.cuh"
#include "grouped_gemm/folded_shared.cuh"
#include "grouped_gemm/tile_queue.cuh"

namespace mxep::cuda::sm90 {

// E4M3 codes times 2^kMostApart are finite in bf16.
constexpr int kMostApart = 119;

// A block of each line of a tile. Lines are numbered as the ring has them: own lines, then common ones.
class BlockOfLines {
 public:
  __device__ BlockOfLines(const Problem& p, const Tile& tile, int at) {
    const int64_t step = at / kBlock;
    own_ = {p.row_scale + tile.a_row, p.steps.row + step * p.rows + tile.a_row, tile.rows};
    const int column = column_of(p, tile);
    const int64_t before = tile.b_row - column;  // columns of the groups before
    common_ = {p.col_scale + tile.b_row, p.steps.col + before * (p.depth / kBlock) + step * p.cols + column, tile.cols};
    if (tile.flat) {
      const Side rows = own_;
      own_ = common_, common_ = rows;
    }
  }

  static __device__ bool is_own(int line) { return line < kTileM; }
  // Whether the line is of the output.
  __device__ bool has(int line) const { return in_side(line) < side(line).count; }
  // Scale of the block - scale of the line.
  __device__ int power(int line) const {
    return min(max(side(line).of_block[in_side(line)] - side(line).of_line[in_side(line)], -kMostApart), kMostApart);
  }

 private:
  struct Side {
    const uint8_t *of_line, *of_block;
    int count;
  };

  static __device__ int in_side(int line) { return is_own(line) ? line : line - kTileM; }
  __device__ const Side& side(int line) const { return is_own(line) ? own_ : common_; }

  Side own_, common_;
};

// Waits for places of the ring to be ready, once for each time that one is: a parity per place tells these apart.
class ReadyPlaces {
 public:
  __device__ explicit ReadyPlaces(uint64_t (&ready)[kStages]) : ready_(ready) {}

  __device__ void wait_for(int place) {
    barrier_wait(&ready_[place], parities_ >> place & 1);
    parities_ ^= 1 << place;
  }

 private:
  uint64_t (&ready_)[kStages];
  uint32_t parities_ = 0;  // a bit per place
};

// Four E4M3 codes x factor -> bf16, the first in the low half.
__device__ __forceinline__ uint2 scaled(uint32_t codes, __nv_bfloat162 factor) {
  const uint32_t halves[]{f16x2_from_codes(codes, 0), f16x2_from_codes(codes, 1)};
  const auto values = [&](int i) {
    return __float22bfloat162_rn(__half22float2(reinterpret_cast<const __half2&>(halves[i])));
  };
  uint2 out;
  reinterpret_cast<__nv_bfloat162&>(out.x) = __hmul2(values(0), factor);
  reinterpret_cast<__nv_bfloat162&>(out.y) = __hmul2(values(1), factor);
  return out;
}

// A warpgroup that writes stages; a thread has the same lines of each.
class ApartWriter {
 public:
  __device__ explicit ApartWriter(FoldedShared& s) : s_(s), loaded_(s.apart.loaded), free_(s.apart.free) {}

  // Writes the stage of terms k to k + 127 without its `blocks` apart, and these in bf16. at: stages of the ring
  // before.
  __device__ void write(const Problem& p, const Tile& tile, int k, uint32_t blocks, uint32_t at) {
    const int in_fp8 = at % kStages;
#pragma unroll 1
    for (uint32_t left = blocks; left != 0; left &= left - 1) {
      const int block = __ffs(left) - 1;
      const Powers powers = find_powers(BlockOfLines(p, tile, k + block * kBlock));
      if (left == blocks) loaded_.wait_for(in_fp8);
      take_out(in_fp8, block, powers);
      if ((left & left - 1) == 0) pass_on(in_fp8);

      const int in_bf16 = ++at % kStages;
      free_.wait_for(in_bf16);
      put_in(in_bf16, powers);
      pass_on(in_bf16);
    }
  }

 private:
  static constexpr int kOfThread = kLines / kBlockThreads;
  static_assert(kLines % kBlockThreads == 0 && kTileM % kBlockThreads == 0);

  // Of a block.
  struct Powers {
    uint32_t of_lines;                  // bytes 127 + power, of the thread's lines
    bool every_own, no_own, no_common;  // which lines of the tile are apart
  };

  static __device__ int thread() { return threadIdx.x % kBlockThreads; }
  static __device__ int line_of(int i) { return thread() + i * kBlockThreads; }
  static __device__ bool every(bool vote) {
    __syncwarp();
    return threads_all<kBlockThreads>(kBlockBarrier, vote);
  }

  static __device__ Powers find_powers(const BlockOfLines& lines) {
    int power[kOfThread] = {};  // their loads are in flight together
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (lines.has(line_of(i))) power[i] = lines.power(line_of(i));
    Powers found{0, true, true, true};
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const bool apart = power[i] != 0;
      found.of_lines |= (kOne + power[i]) << i * 8;
      if (BlockOfLines::is_own(line_of(i))) {
        found.every_own &= apart || !lines.has(line_of(i));
        found.no_own &= !apart;
      } else {
        found.no_common &= !apart;
      }
    }
    found.every_own = every(found.every_own);
    found.no_own = every(found.no_own);
    found.no_common = every(found.no_common);
    return found;
  }

  // 16 bytes of a line in the 128-byte swizzle.
  __device__ uint4& chunk(int place, int line, int i) {
    uint8_t* bytes = BlockOfLines::is_own(line) ? s_.a[place] + line * kTileK : s_.b[place] + (line - kTileM) * kTileK;
    return *reinterpret_cast<uint4*>(bytes + (i ^ line % 8) * 16);
  }

  // Codes of a stage to s.apart.codes, and zeros in their place.
  __device__ void take_out(int place, int block, const Powers& powers) {
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i) {
      const int line = line_of(i);
      // If every own line is apart, no pair is left in FP8. Zeros in the common lines, which are fewer, are enough
      // then.
      const bool zero = powers.every_own ? !BlockOfLines::is_own(line) : (powers.of_lines >> i * 8 & 0xFF) != kOne;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4& codes = chunk(place, line, block * 2 + half);
        s_.apart.codes[half][line] = codes;
        if (zero) codes = {};
      }
    }
  }

  // The codes, times their powers, to a place of the ring.
  __device__ void put_in(int place, Powers powers) {
    const bool second = !powers.every_own && !powers.no_common, first = !second || !powers.no_own;
    const bool both = first && second;
    if (thread() == 0) s_.apart.terms[place] = both ? 64 : 32;
#pragma unroll 1
    for (int i = 0; i < kOfThread; ++i, powers.of_lines >>= 8) {  // little code, which warps need not fetch again
      const int line = line_of(i), power = static_cast<int>(powers.of_lines & 0xFF);
      const bool own = BlockOfLines::is_own(line), apart = power != kOne;
      // NaN times zero is NaN. The line's sums are NaN anyway.
      const bool zero = !apart && !both && first == own;
      const auto factor = __bfloat162bfloat162(__ushort_as_bfloat16(zero ? 0 : power << 7));
      const int begin = both && own && !apart ? 4 : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 in = s_.apart.codes[half][line];
        const uint2 parts[4]{scaled(in.x, factor), scaled(in.y, factor), scaled(in.z, factor), scaled(in.w, factor)};
        const uint4 low{parts[0].x, parts[0].y, parts[1].x, parts[1].y};
        const uint4 high{parts[2].x, parts[2].y, parts[3].x, parts[3].y};
        const int to = begin ^ half * 2;
        chunk(place, line, to) = low, chunk(place, line, to ^ 1) = high;
        if (!both) continue;
        const bool again = apart && !own;
        chunk(place, line, to ^ 4) = again ? low : uint4{};
        chunk(place, line, to ^ 5) = again ? high : uint4{};
      }
    }
  }

  __device__ void pass_on(int place) {
    shared_to_async_fence();
    __syncwarp();
    threads_sync<kBlockThreads>(kBlockBarrier);
    if (thread() == 0) barrier_arrive(&s_.full[place], cluster_rank());
  }

  FoldedShared& s_;
  ReadyPlaces loaded_, free_;
};

// Called by a warpgroup: follows the tiles of the queue.
__device__ inline void write_apart(const Problem& p, FoldedShared& s) {
  TileQueue tiles(s.tiles);
  NoteQueue notes(s.apart.notes);
  ApartWriter writer(s);
  const uint32_t stages = (p.depth + kStage - 1) / kStage;
  uint32_t before = 0;  // stages of the ring
  for (Tile tile; tiles.next(&tile); before += stages) {
#pragma unroll 1
    for (StageApart next = next_apart(notes); next.blocks() != 0; next = next_apart(notes)) {
      writer.write(p, tile, next.at(), next.blocks(), before + next.at() / kStage);
      before += __popc(next.blocks());
    }
  }
}

}  // namespace mxep::cuda::sm90
