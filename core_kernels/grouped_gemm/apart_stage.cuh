// A stage with blocks apart becomes one in FP8, of the other blocks, and one in bf16 for each of its four blocks of 32
// that is apart in some row or column. A warpgroup that has no part in the products writes these operands, in the
// places of the ring.
//
//   loads  --loaded--> a stage in FP8 --zeros in place of the blocks apart--------> 128 terms in FP8
//                                     '--codes--.
//   places --free----> a place for a block -----'--codes x 2^power----------------> 32 or 64 terms in bf16
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
#include <cuda_fp8.h>

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
    const int64_t group = tile.b_row - column;  // the first row of the group
    common_ = {p.col_scale + tile.b_row, p.steps.col + group * (p.depth / kBlock) + step * p.cols + column, tile.cols};
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

// Places of the ring that are ready to be written; every place that was ever ready is waited for.
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

// Follows the tiles of the queue; write(tile, k, blocks, stages of the ring since the start) writes the stages of 128
// terms from k on with `blocks` apart.
template <typename Write>
__device__ void for_apart(const Problem& p, FoldedShared& s, const Write& write) {
  TileQueue tiles(s.tiles);
  NoteQueue notes(s.apart.notes);
  const uint32_t stages = (p.depth + kStage - 1) / kStage;
  uint32_t before = 0;
  for (Tile tile; tiles.next(&tile); before += stages) {
#pragma unroll 1
    for (StageApart next = next_apart(notes); next.blocks() != 0; next = next_apart(notes)) {
      write(tile, next.at(), next.blocks(), before + next.at() / kStage);
      before += __popc(next.blocks());
    }
  }
}

// Four E4M3 codes x factor -> bf16, the first in the low half.
__device__ __forceinline__ uint2 scaled(uint32_t codes, __nv_bfloat162 factor) {
  __half2 halves[2];
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(reinterpret_cast<uint32_t&>(halves[0])), "=r"(reinterpret_cast<uint32_t&>(halves[1]))
      : "r"(codes));
  uint2 out;
  reinterpret_cast<__nv_bfloat162&>(out.x) = __hmul2(__float22bfloat162_rn(__half22float2(halves[0])), factor);
  reinterpret_cast<__nv_bfloat162&>(out.y) = __hmul2(__float22bfloat162_rn(__half22float2(halves[1])), factor);
  return out;
}

// Called by a warpgroup. A thread writes the same lines of every stage.
__device__ inline void write_apart(const Problem& p, FoldedShared& s) {
  constexpr int kOfThread = kLines / kBlockThreads;
  static_assert(kLines % kBlockThreads == 0 && kTileM % kBlockThreads == 0);
  const int thread = threadIdx.x % kBlockThreads;
  const auto line_of = [&](int i) { return thread + i * kBlockThreads; };
  // 16 bytes of a line in the 128-byte swizzle.
  const auto chunk = [&](int place, int line, int i) -> uint4& {
    uint8_t* bytes = BlockOfLines::is_own(line) ? s.a[place] + line * kTileK : s.b[place] + (line - kTileM) * kTileK;
    return *reinterpret_cast<uint4*>(bytes + (i ^ line % 8) * 16);
  };
  const auto every = [](bool vote) {
    __syncwarp();
    return threads_all<kBlockThreads>(kBlockBarrier, vote);
  };
  const auto pass_on = [&](int place) {
    shared_to_async_fence();
    __syncwarp();
    threads_sync<kBlockThreads>(kBlockBarrier);
    if (thread == 0) barrier_arrive(&s.full[place], cluster_rank());
  };
  ReadyPlaces loaded(s.apart.loaded), free(s.apart.free);
  for_apart(p, s, [&](const Tile& tile, int k, uint32_t blocks, uint32_t at) {
    const int in_fp8 = at % kStages;
#pragma unroll 1
    for (uint32_t left = blocks; left != 0; left &= left - 1) {
      const int block = __ffs(left) - 1;
      uint32_t powers = 0;  // bytes 127 + power
      bool own_apart = false, own_not = false, common_apart = false;
      {
        const BlockOfLines lines(p, tile, k + block * kBlock);
        int power[kOfThread] = {};  // their loads are in flight together
#pragma unroll
        for (int i = 0; i < kOfThread; ++i)
          if (lines.has(line_of(i))) power[i] = lines.power(line_of(i));
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
          powers |= (kOne + power[i]) << i * 8;
          if (BlockOfLines::is_own(line_of(i))) {
            own_apart |= power[i] != 0;
            own_not |= power[i] == 0 && lines.has(line_of(i));
          } else {
            common_apart |= power[i] != 0;
          }
        }
      }
      const bool every_own = every(!own_not), no_own = every(!own_apart), no_common = every(!common_apart);
      const bool second = !every_own && !no_common, first = !second || !no_own, both = first && second;

      if (left == blocks) loaded.wait_for(in_fp8);
#pragma unroll 1
      for (int i = 0; i < kOfThread; ++i) {
        const int line = line_of(i);
        // If every own line is apart, no pair is left in FP8: zeros in the fewer, common lines are enough.
        const bool zero = every_own ? !BlockOfLines::is_own(line) : (powers >> i * 8 & 0xFF) != kOne;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4& codes = chunk(in_fp8, line, block * 2 + half);
          s.apart.codes[half][line] = codes;
          if (zero) codes = {};
        }
      }
      if ((left & left - 1) == 0) pass_on(in_fp8);

      const int place = ++at % kStages;
      free.wait_for(place);
      if (thread == 0) s.apart.terms[place] = both ? 64 : 32;
#pragma unroll 1
      for (int i = 0; i < kOfThread; ++i, powers >>= 8) {  // little code, which warps need not fetch again
        const int line = line_of(i), power = static_cast<int>(powers & 0xFF);
        const bool own = BlockOfLines::is_own(line), apart = power != kOne;
        const bool zero = !apart && !both && first == own;  // a NaN stays one, which the line has in FP8, too
        const auto factor = __bfloat162bfloat162(__ushort_as_bfloat16(zero ? 0 : power << 7));
        const int begin = both && own && !apart ? 4 : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 in = s.apart.codes[half][line];
          const uint2 parts[4]{scaled(in.x, factor), scaled(in.y, factor), scaled(in.z, factor), scaled(in.w, factor)};
          const uint4 low{parts[0].x, parts[0].y, parts[1].x, parts[1].y};
          const uint4 high{parts[2].x, parts[2].y, parts[3].x, parts[3].y};
          const int i = begin ^ half * 2;
          chunk(place, line, i) = low, chunk(place, line, i ^ 1) = high;
          if (!both) continue;
          const bool again = apart && !own;
          chunk(place, line, i ^ 4) = again ? low : uint4{};
          chunk(place, line, i ^ 5) = again ? high : uint4{};
        }
      }
      pass_on(place);
    }
  });
}

}  // namespace mxep::cuda::sm90
