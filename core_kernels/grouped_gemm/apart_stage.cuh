// A stage with blocks apart becomes one in FP8, of the other blocks, and one in bf16 for each of its four blocks of 32
// that is apart in some row or column. Warps that have no part in the products write these operands, in the places of
// the ring.
//
//   loads  --loaded--> a stage in FP8 --two warps: zeros in place of the blocks apart--> 128 terms in FP8
//   places --free----> a place for a block --a warpgroup: codes x 2^power-------------> 32 or 64 terms in bf16
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
// is multiplied, and the place of the next one is free then: there is time for 500 instructions.
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
  __device__ BlockOfLines(const Problem& p, const Tile& tile, int at) : depth_(p.depth) {
    const int step = at / kBlock;
    own_ = {p.row_scale + tile.a_row, p.steps.row + static_cast<int64_t>(step) * p.rows + tile.a_row,
            p.steps.row_codes + static_cast<int64_t>(tile.a_row) * p.depth + at, tile.rows};
    const int column = column_of(p, tile), group = tile.b_row - column;  // the first row of the group
    common_ = {
        p.col_scale + tile.b_row,
        p.steps.col + static_cast<int64_t>(group) * (p.depth / kBlock) + static_cast<int64_t>(step) * p.cols + column,
        p.steps.col_codes + static_cast<int64_t>(tile.b_row) * p.depth + at, tile.cols};
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
  __device__ const uint8_t* codes(int line) const {
    return side(line).codes + static_cast<int64_t>(in_side(line)) * depth_;
  }

 private:
  struct Side {
    const uint8_t *of_line, *of_block, *codes;
    int count;
  };

  static __device__ int in_side(int line) { return is_own(line) ? line : line - kTileM; }
  __device__ const Side& side(int line) const { return is_own(line) ? own_ : common_; }

  int depth_;
  Side own_, common_;
};

// One of kThreads threads that write stages together; it writes the same lines of each.
template <int kThreads, int kBarrier>
class StageWriter {
 public:
  static constexpr int kOfThread = kLines / kThreads;
  static_assert(kLines % kThreads == 0 && kTileM % kThreads == 0);

  __device__ StageWriter(FoldedShared& s, uint64_t (&ready)[kStages]) : s_(s), ready_(ready) {}

  static __device__ int thread() { return threadIdx.x % kThreads; }
  static __device__ int line(int i) { return thread() + i * kThreads; }

  // Waits for a place of the ring; every place that was ever ready is waited for.
  __device__ void wait_for(int stage) {
    barrier_wait(&ready_[stage], parities_ >> stage & 1);
    parities_ ^= 1 << stage;
  }
  __device__ uint8_t* of_line(int stage, int line) {
    return BlockOfLines::is_own(line) ? s_.a[stage] + line * kTileK : s_.b[stage] + (line - kTileM) * kTileK;
  }
  // 16 bytes of a line, in the 128-byte swizzle.
  static __device__ uint4& chunk(uint8_t* bytes, int line, int i) {
    return *reinterpret_cast<uint4*>(bytes + (i ^ line % 8) * 16);
  }
  __device__ void pass_on(int stage) {
    shared_to_async_fence();
    __syncwarp();
    threads_sync<kThreads>(kBarrier);
    if (thread() == 0) barrier_arrive(&s_.full[stage], cluster_rank());
  }
  // Whether it holds in every thread, or in some.
  static __device__ bool every(bool vote) {
    __syncwarp();
    return threads_all<kThreads>(kBarrier, vote);
  }
  static __device__ bool some(bool vote) { return !every(!vote); }

 private:
  FoldedShared& s_;
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

// Called by two warps: zeros in place of the blocks apart of loaded stages.
__device__ inline void write_zeros(const Problem& p, FoldedShared& s) {
  using Writer = StageWriter<kZeroThreads, 3>;
  Writer writer(s, s.apart.loaded);
  // A block's bits of a thread's common lines, of four per line.
  constexpr uint32_t kCommon = 1 << 4 * kBlocksOfStage | 1 << 5 * kBlocksOfStage;
  static_assert(Writer::kOfThread == 6 && kTileM / kZeroThreads == 4);
  for_apart(p, s, [&](const Tile& tile, int k, uint32_t blocks, uint32_t at) {
    uint32_t zero = 0;  // four bits per line
#pragma unroll 1
    for (uint32_t left = blocks; left != 0; left &= left - 1) {
      const int block = __ffs(left) - 1;
      const BlockOfLines lines(p, tile, k + block * kBlock);
      int power[Writer::kOfThread] = {};  // their loads are in flight together
#pragma unroll
      for (int i = 0; i < Writer::kOfThread; ++i)
        if (lines.has(Writer::line(i))) power[i] = lines.power(Writer::line(i));
      uint32_t apart = 0;
      bool every_own = true, every_common = true;
#pragma unroll
      for (int i = 0; i < Writer::kOfThread; ++i) {
        const int line = Writer::line(i);
        (BlockOfLines::is_own(line) ? every_own : every_common) &= power[i] != 0 || !lines.has(line);
        apart |= (power[i] != 0) << i * kBlocksOfStage;
      }
      // Where every line of a side is apart, no pair is left: zeros in the fewer, common lines are enough.
      zero |= (Writer::every(every_own) || Writer::every(every_common) ? kCommon : apart) << block;
    }
    const int stage = at % kStages;
    writer.wait_for(stage);
#pragma unroll 1
    for (int i = 0; zero != 0; ++i, zero >>= kBlocksOfStage) {
      const int line = Writer::line(i);
      uint8_t* to = writer.of_line(stage, line);
#pragma unroll 1
      for (uint32_t left = zero & 0xF; left != 0; left &= left - 1) {
        const int first = (__ffs(left) - 1) * 2;
        Writer::chunk(to, line, first) = Writer::chunk(to, line, first + 1) = {};
      }
    }
    writer.pass_on(stage);
  });
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

// Called by a warpgroup: blocks in bf16. A block is fetched long before its place is free.
__device__ inline void write_blocks(const Problem& p, FoldedShared& s) {
  using Writer = StageWriter<kBlockThreads, 4>;
  Writer writer(s, s.apart.free);
  for_apart(p, s, [&](const Tile& tile, int k, uint32_t blocks, uint32_t at) {
#pragma unroll 1
    for (; blocks != 0; blocks &= blocks - 1) {
      const int stage = ++at % kStages;
      uint32_t powers = 0;  // bytes 127 + power
      bool own_apart = false, own_not = false, common_apart = false;
      {
        const BlockOfLines lines(p, tile, k + (__ffs(blocks) - 1) * kBlock);
        int power[Writer::kOfThread] = {};  // their loads are in flight together
#pragma unroll
        for (int i = 0; i < Writer::kOfThread; ++i) {
          const int line = Writer::line(i);
          if (!lines.has(line)) continue;
          power[i] = lines.power(line);
          copy_16(s.apart.codes[line], lines.codes(line));
          copy_16(s.apart.codes[line] + 16, lines.codes(line) + 16);
        }
#pragma unroll
        for (int i = 0; i < Writer::kOfThread; ++i) {
          const int line = Writer::line(i);
          powers |= (kOne + power[i]) << i * 8;
          if (BlockOfLines::is_own(line)) {
            own_apart |= power[i] != 0;
            own_not |= power[i] == 0 && lines.has(line);
          } else {
            common_apart |= power[i] != 0;
          }
        }
      }
      const bool second = Writer::some(own_not) && Writer::some(common_apart);
      const bool first = Writer::some(own_apart) || !second, both = first && second;
      copies_wait();
      writer.wait_for(stage);
      if (Writer::thread() == 0) s.apart.terms[stage] = both ? 64 : 32;
#pragma unroll 1
      for (int i = 0; i < Writer::kOfThread; ++i, powers >>= 8) {  // little code, which warps need not fetch again
        const int line = Writer::line(i), power = static_cast<int>(powers & 0xFF);
        const bool own = BlockOfLines::is_own(line), apart = power != kOne;
        const bool zero = !apart && !both && first == own;  // a NaN stays one, which the line has in FP8, too
        const auto factor = __bfloat162bfloat162(__ushort_as_bfloat16(zero ? 0 : power << 7));
        uint8_t* to = writer.of_line(stage, line);
        const int place = both && own && !apart ? 4 : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 in = reinterpret_cast<const uint4*>(s.apart.codes[line])[half];
          const uint2 parts[4]{scaled(in.x, factor), scaled(in.y, factor), scaled(in.z, factor), scaled(in.w, factor)};
          const uint4 low{parts[0].x, parts[0].y, parts[1].x, parts[1].y};
          const uint4 high{parts[2].x, parts[2].y, parts[3].x, parts[3].y};
          const int at = place ^ half * 2;
          Writer::chunk(to, line, at) = low, Writer::chunk(to, line, at ^ 1) = high;
          if (!both) continue;
          const bool again = apart && !own;
          Writer::chunk(to, line, at ^ 4) = again ? low : uint4{};
          Writer::chunk(to, line, at ^ 5) = again ? high : uint4{};
        }
      }
      writer.pass_on(stage);
    }
  });
}

}  // namespace mxep::cuda::sm90
