// Rows of other GPUs, gathered or summed. A warp copies a row, a block sums the rows of a token; both take a run of
// neighbouring rows, so that the blocks of a kernel read from all ranks at any time.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "cuda/launch.h"
#include "cuda/mx_math.cuh"
#include "peer/peers.h"

namespace mxep::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 4;  // per multiprocessor, so that a thread has registers for several loads in flight

// The addresses of each rank's rows. `of` is in shared memory.
struct Ranks {
  const char** of;
  int64_t rows;  // of a rank

  __device__ Ranks(const Peers& peers, int64_t rows_of_rank, const char** shared) : of(shared), rows(rows_of_rank) {
    const int i = threadIdx.x;
    if (i < kMostPeers) of[i] = i < peers.count ? peers.of[i].rows : nullptr;
    __syncthreads();
  }
  // The first byte of a row of `nbytes` bytes; null for -1 and for a row that does not exist.
  __device__ const char* row(int32_t at, int64_t nbytes) const {
    const uint32_t rank = static_cast<uint32_t>(at) / static_cast<uint32_t>(rows);
    if (at < 0 || rank >= kMostPeers || !of[rank]) return nullptr;
    return of[rank] + (at - rank * rows) * nbytes;
  }
};

// A range of the blocks' work: `all` in as many equal runs as there are workers.
struct Run {
  int64_t begin, end;
  __device__ Run(int64_t all, int64_t worker, int64_t workers) {
    const int64_t each = (all + workers - 1) / workers;
    begin = min(worker * each, all);
    end = min(begin + each, all);
  }
};

// The bytes [first, first + width) of rows of `stride` bytes, one output row after the other.
struct Part {
  char* out;
  int64_t stride, first, width;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gather_rows(const __grid_constant__ Peers peers, const int32_t* map, const int32_t* mapped, int64_t rows_of_rank,
                int64_t num_rows, Part part) {
  __shared__ const char* shared[kMostPeers];
  const Ranks ranks(peers, rows_of_rank, shared);
  const int lane = threadIdx.x % 32;
  const int64_t words = part.width / static_cast<int64_t>(sizeof(Word));
  // The warps share the rows that have a source, and then the zeros of the rest.
  const int64_t sources = min(int64_t{max(*mapped, 0)}, num_rows);
  const Run run(sources, (int64_t)blockIdx.x * kWarps + threadIdx.x / 32, (int64_t)gridDim.x * kWarps);
  for (int64_t row = run.begin; row < run.end; ++row) {
    const char* start = ranks.row(map[row], part.stride);
    const auto* in = reinterpret_cast<const Word*>(start + part.first);
    auto* out = reinterpret_cast<Word*>(part.out + row * part.width);
#pragma unroll 4
    for (int64_t w = lane; w < words; w += 32) out[w] = start ? in[w] : Word{};
  }
  auto* out = reinterpret_cast<Word*>(part.out);
  const int64_t thread = (int64_t)blockIdx.x * kThreads + threadIdx.x, threads = (int64_t)gridDim.x * kThreads;
  for (int64_t w = sources * words + thread; w < num_rows * words; w += threads) out[w] = Word{};
}

// Launches with the widest word that every row's first byte is a multiple of.
void gather(const char* op, const Call& call, const Peers& peers, cudaStream_t stream, Part part) {
  const Array &rows = call.in[0], &map = call.in[1];
  const int64_t word = std::gcd(std::gcd(std::gcd(part.stride, part.first), part.width), int64_t{16});
  const auto *places = map.as<const int32_t>(), *mapped = call.in[3].as<const int32_t>();
  const auto launch = [&]<typename Word>(Word) {
    const unsigned blocks =
        std::min<int64_t>(grid_x(op, ceil_div(map.dim(0), kWarps)), int64_t{multiprocessors(op)} * kBlocks);
    launch_kernel(op, gather_rows<Word>, blocks, kThreads, 0, stream, peers, places, mapped, rows.dim(0), map.dim(0),
                  part);
  };
  if (word == 16)
    launch(uint4{});
  else if (word == 8)
    launch(uint2{});
  else if (word == 4)
    launch(uint32_t{});
  else
    launch(uint8_t{});
}

__device__ inline float value(float x) { return x; }
__device__ inline float value(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

// bf16 to nearest even; any NaN becomes 0x7FC0.
template <typename Out>
__device__ Out rounded(float x) {
  if constexpr (sizeof(Out) == sizeof(float)) return x;
  const uint32_t bits = __float_as_uint(x);
  return (bits & 0x7FFFFFFF) > kInf ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// kValues neighbouring values, of at most 16 bytes: one instruction.
template <typename T, int kValues>
struct alignas(sizeof(T) * kValues) Vector {
  T at[kValues];
};

// y[t] = ((0 + row) + row) + ... over the slots of t that have a row, in fp32, rounded once.
template <typename In, typename Out, int kValues>
__global__ void __launch_bounds__(kThreads, kBlocks)
    sum_rows(const __grid_constant__ Peers peers, const int32_t* slots, int64_t rows_of_rank, int64_t tokens, int k,
             int64_t width, Out* y) {
  __shared__ const char* shared[kMostPeers];
  const Ranks ranks(peers, rows_of_rank, shared);
  const Run run(tokens, blockIdx.x, gridDim.x);
  for (int64_t t = run.begin; t < run.end; ++t) {
    for (int64_t c = threadIdx.x * kValues; c < width; c += kThreads * kValues) {
      float sum[kValues];
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v] = 0;
#pragma unroll 4
      for (int i = 0; i < k; ++i) {
        const char* row = ranks.row(slots[t * k + i], width * sizeof(In));
        if (!row) continue;
        const auto x = *reinterpret_cast<const Vector<In, kValues>*>(row + c * sizeof(In));
#pragma unroll
        for (int v = 0; v < kValues; ++v) sum[v] += value(x.at[v]);
      }
      constexpr int kStored = kValues * sizeof(Out) > 16 ? 16 / sizeof(Out) : kValues;
#pragma unroll
      for (int first = 0; first < kValues; first += kStored) {
        Vector<Out, kStored> out;
#pragma unroll
        for (int v = 0; v < kStored; ++v) out.at[v] = rounded<Out>(sum[first + v]);
        *reinterpret_cast<Vector<Out, kStored>*>(y + t * width + c + first) = out;
      }
    }
  }
}

template <typename Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::bf16)
    body(bf16{});
  else
    body(float{});
}

}  // namespace

void permute_rows_of_peers(const Call& call, const Peers& peers, cudaStream_t stream) {
  const Array& rows = call.in[0];
  const int64_t nbytes = rows.dim(1) * itemsize(rows.dtype);
  gather("permute_rows", call, peers, stream, {call.out[0].as<char>(), nbytes, 0, nbytes});
}

void permute_mx_of_peers(const Call& call, const Peers& peers, cudaStream_t stream) {
  const int64_t nbytes = call.in[0].dim(1), k = call.out[0].dim(1), scales = call.out[1].dim(1);
  gather("permute_mx", call, peers, stream, {call.out[0].as<char>(), nbytes, 0, k});
  gather("permute_mx", call, peers, stream, {call.out[1].as<char>(), nbytes, k, scales});
}

void combine_of_peers(const Call& call, const Peers& peers, cudaStream_t stream) {
  constexpr const char* kOp = "combine";
  const Array &rows = call.in[0], &slots = call.in[1], &y = call.out[0];
  const int64_t tokens = slots.dim(0), width = rows.dim(1);
  const unsigned blocks = std::min<int64_t>(grid_x(kOp, tokens), int64_t{multiprocessors(kOp)} * kBlocks);
  with_type(rows.dtype, [&]<typename In>(In) {
    with_type(y.dtype, [&]<typename Out>(Out) {
      const auto launch = [&](auto kernel) {
        launch_kernel(kOp, kernel, blocks, kThreads, 0, stream, peers, slots.as<const int32_t>(), rows.dim(0), tokens,
                      static_cast<int>(slots.dim(1)), width, y.as<Out>());
      };
      constexpr int kValues = 16 / sizeof(In);
      if (width % kValues == 0)
        launch(sum_rows<In, Out, kValues>);
      else
        launch(sum_rows<In, Out, 1>);
    });
  });
}

}  // namespace mxep::cuda
