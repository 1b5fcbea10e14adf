// One scale per row and span of a group's tokens: the operand of a weight gradient, from rows quantized along them.
//
//   q (R, M), sf (R, M/32), group_ends (G,) --> qf (R, M), span_sf (S, R)
//
//   a CTA's part:   slot 0    1    2   3       15       16 rows of 16 slots, about 4096 tokens, wherever groups begin
//                  .----.----.-.----.-- ... --.
//            row 0 |    |    | |    |         |         sf --> largest of each span --> running maximum --> span_sf
//            row 1 |    |    | |    |         |                                            |
//              ... |    |    | |    |         |         factors of the blocks <------------'
//                  '----'----'-'----'-- ... --'         q --> times the factors --> qf
//
// While scales are chosen half a warp has a row, and a lane a slot. Then half a warp has a slot of all rows, and a lane
// 16 codes: the CTA reads and writes 4 KiB of a row at a time, and loads several rows ahead.
//
// The running maximum at the CTA's first slot is read off the scales of the group's earlier tokens, a 32nd of their
// bytes, which are in L2 since other CTAs read them at about the same time. No CTA waits for another, and a group of
// most tokens has as many CTAs as its tokens take.
#include "cuda/launch.h"
#include "cuda/ops.h"
#include "fold/folded_tile.cuh"
#include "fold/magnitudes.cuh"
#include "fold/spans.cuh"

namespace mxep::cuda {
namespace {

constexpr int kLanes = 16;  // half a warp: 16 slots, or the 16-byte pieces of a span
constexpr int kThreads = 256, kWarps = kThreads / 32, kSlots = kThreads / kLanes;
constexpr int kRows = 16, kAhead = 4;  // rows of a CTA, and how many of them it loads before it needs them
constexpr int kCtas = 5;               // that a multiprocessor runs at a time
constexpr int kSpanBlocks = kSpan / kBlock;
constexpr uint32_t kF16Nan = 0x7FFF;
static_assert(kLanes * sizeof(uint4) == kSpan && kSlots == kLanes);

struct GroupsFold : TokenGroups {
  const uint8_t *q, *sf;
  int64_t rows, slots;
  uint32_t across;  // CTAs for the slots of a row
  uint8_t *qf, *span_sf;
};

// The span of a slot.
struct alignas(16) Slot {
  int32_t block, blocks;  // its first block in a row, and how many it has; none in a slot without a group's span
  int32_t before;         // blocks of its group before it
  uint8_t least_scale;    // 255 in a group whose ends break the contract

  static __device__ Slot of(const GroupsFold& p, int64_t slot) {
    const SpanTokens span = SpanTokens::of(p, slot);
    const int64_t tokens = span.group < p.groups ? max(span.end - span.begin, int64_t{0}) : 0;
    const auto blocks = static_cast<int32_t>(tokens / kBlock);
    return {static_cast<int32_t>(span.begin / kBlock), blocks,
            blocks ? static_cast<int32_t>(slot - span.first) * kSpanBlocks : 0,
            static_cast<uint8_t>(p.unless_broken(span.group, 0))};
  }
};

struct Shared {
  Slot slots[kSlots];
  alignas(16) uint16_t factors[kRows][kSlots][kSpanBlocks];  // of the blocks, in f16
  uint8_t scales[kSlots][kRows];
};

// The largest value of half a warp.
__device__ uint32_t max_of_lanes(uint32_t value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// The magnitude of a block (magnitudes.cuh).
__device__ uint32_t magnitude_at(const uint8_t* sf) { return (__ldg(sf) + 1) & 0xFF; }

__device__ uint32_t with_headroom(uint32_t magnitude) { return magnitude ? min(magnitude + kHeadroom, kE8m0Nan) : 0; }

// The running maximum after blocks `first` to `end` of sf, the first of a group and all before a slot. Of half a warp.
__device__ uint32_t running_maximum(const uint8_t* sf, int64_t first, int64_t end, int lane) {
  uint32_t largest = lane < kSpanBlocks ? with_headroom(magnitude_at(sf + first + lane)) : 0;
  const int64_t vectors = (first + 15) / 16, end_vectors = end / 16;  // whole vectors; single bytes around them
  if (first + lane < min(vectors * 16, end)) largest = max(largest, magnitude_at(sf + first + lane));
  const int64_t rest = max(end_vectors * 16, first) + lane;
  if (rest < end) largest = max(largest, magnitude_at(sf + rest));
  uint32_t bytes = 0;
#pragma unroll 2
  for (int64_t i = vectors + lane; i < end_vectors; i += kLanes) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(sf) + i);
    bytes = __vmaxu4(bytes, __vmaxu4(__vmaxu4(__vadd4(four.x, kOnes), __vadd4(four.y, kOnes)),
                                     __vmaxu4(__vadd4(four.z, kOnes), __vadd4(four.w, kOnes))));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) largest = max(largest, bytes >> i * 8 & 0xFF);
  return max_of_lanes(largest);
}

// Chooses the scales of a row's slots, and the factors of their blocks. Half a warp has the row, a lane a slot.
__device__ void choose_scales(const GroupsFold& p, Shared& s, int64_t row, int in_cta, int lane) {
  const Slot slot = s.slots[lane];
  const uint8_t* sf = p.sf + row * (p.tokens / kBlock);
  uint32_t running = 0;
  if (const Slot& left = s.slots[0]; left.before) {
    const int64_t end = row * (p.tokens / kBlock) + left.block;
    running = running_maximum(p.sf, end - left.before, end, lane);
  }
  // Four magnitudes per word.
  uint32_t words[kSpanBlocks / 4] = {}, largest = 0;
#pragma unroll
  for (int b = 0; b < kSpanBlocks; ++b) {
    const uint32_t magnitude = b < slot.blocks ? magnitude_at(sf + slot.block + b) : 0;
    largest = max(largest, magnitude);
    words[b / 4] |= magnitude << b % 4 * 8;
  }
  const int before = slot.before / kSpanBlocks;  // slots of its group before it
  if (before == 0) largest = with_headroom(largest);
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, largest, step, kLanes);
    if (min(before, lane) >= step) largest = max(largest, other);
  }
  if (before > lane) largest = max(largest, running);
  largest = max(largest, 1);  // without a scale as with the smallest
  s.scales[lane][in_cta] = max(slot.blocks ? largest - 1 : 0, uint32_t{slot.least_scale});
  uint32_t factors[kSpanBlocks];
#pragma unroll
  for (int b = 0; b < kSpanBlocks; ++b) {
    const uint32_t magnitude = words[b / 4] >> b % 4 * 8 & 0xFF;
    factors[b] = magnitude ? fold_power(magnitude, largest) : kF16Nan;
  }
  *reinterpret_cast<uint4*>(s.factors[in_cta][lane]) =
      make_uint4(__byte_perm(factors[0], factors[1], 0x5410), __byte_perm(factors[2], factors[3], 0x5410),
                 __byte_perm(factors[4], factors[5], 0x5410), __byte_perm(factors[6], factors[7], 0x5410));
}

__global__ void __launch_bounds__(kThreads, kCtas) fold_spans(const __grid_constant__ GroupsFold p) {
  __shared__ Shared s;
  const int lane = threadIdx.x % kLanes, half = threadIdx.x / kLanes;
  const int64_t first_slot = int64_t{blockIdx.x % p.across} * kSlots,
                first_row = int64_t{blockIdx.x / p.across} * kRows;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kRows}));
  for (int i = threadIdx.x / 32; i < kSlots; i += kWarps) {
    const Slot slot = Slot::of(p, first_slot + i);
    if (threadIdx.x % 32 == 0) s.slots[i] = slot;
  }
  __syncthreads();

  const Slot slot = s.slots[half];
  const int block = lane * 16 / kBlock;
  const bool writes = block < slot.blocks;
  int64_t at = first_row * p.tokens + int64_t{slot.block} * kBlock + lane * 16;
  const auto load = [&](int r, int ahead) {
    return writes && r < rows ? __ldg(reinterpret_cast<const uint4*>(p.q + ahead * p.tokens + at)) : uint4{};
  };
  // Rows past the last one count as the last, and are not written.
#pragma unroll
  for (int r = half; r < kRows; r += kSlots) choose_scales(p, s, min(first_row + r, p.rows - 1), r, lane);
  uint4 codes[kAhead];
#pragma unroll
  for (int r = 0; r < kAhead; ++r) codes[r] = load(r, r);
  __syncthreads();

#pragma unroll 1
  for (int r0 = 0; r0 < rows; r0 += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i, at += p.tokens) {
      const uint32_t factor = s.factors[r0 + i][half][block];
      const uint4 result = folded(codes[i], factor | factor << 16);
      if (writes && r0 + i < rows) *reinterpret_cast<uint4*>(p.qf + at) = result;
      codes[i] = load(r0 + i + kAhead, kAhead);
    }
  }
  for (int i = threadIdx.x; i < kSlots * kRows; i += kThreads) {
    const int64_t of_slot = first_slot + i / kRows;
    if (of_slot < p.slots && i % kRows < rows)
      p.span_sf[of_slot * p.rows + first_row + i % kRows] = s.scales[i / kRows][i % kRows];
  }
}

}  // namespace

void fold_groups(const Call& call, cudaStream_t stream) {
  const char* op = "fold_groups";
  GroupsFold p{};
  p.q = call.in[0].as<const uint8_t>();
  p.sf = call.in[1].as<const uint8_t>();
  p.ends = call.in[2].as<const int32_t>();
  p.groups = static_cast<int>(call.in[2].dim(0));
  p.rows = call.in[0].dim(0);
  p.tokens = call.in[0].dim(1);
  p.slots = p.tokens / kSpan + p.groups;
  p.qf = call.out[0].as<uint8_t>();
  p.span_sf = call.out[1].as<uint8_t>();
  if (p.slots == 0) return;
  p.across = grid_x(op, ceil_div(p.slots, kSlots));
  launch_kernel(op, fold_spans, grid_x(op, ceil_div(p.rows, kRows) * p.across), kThreads, 0, stream, p);
}

}  // namespace mxep::cuda
