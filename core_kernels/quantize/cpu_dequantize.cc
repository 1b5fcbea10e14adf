#include <algorithm>

#include "cpu/mx_math.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

// The factors of 16 blocks are expanded to one per value first, so that one long loop runs over the values.
template <typename T>
MXEP_INLINE void dequantize_blocks(const uint8_t* q, const uint8_t* sf, T* out, int64_t blocks) {
  constexpr int kGroup = 16;
  const float nan = std::bit_cast<float>(0x7FC00000u);
  alignas(64) float factor[kGroup * kBlock];
  for (int64_t first = 0; first < blocks; first += kGroup, q += kGroup * kBlock, out += kGroup * kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kGroup, blocks - first));
    for (int b = 0; b < count; ++b)
      std::fill_n(factor + b * kBlock, kBlock, sf[first + b] == kE8m0Nan ? nan : scale(sf[first + b]));
    for (int i = 0; i < count * kBlock; ++i) {
      const uint32_t magnitude = q[i] & 0x7Fu;
      store(out + i, (magnitude == kE4m3Nan ? nan : f32_from_e4m3(q[i])) * factor[i]);
    }
  }
}

template <typename T>
void run(const Call& call) {
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  T* out = call.out[0].as<T>();
  parallel_ranges(call.in[1].leading(0), kBlock * sizeof(T), [=](int64_t begin, int64_t end) {
    vectorized([=]() MXEP_ALWAYS_INLINE {
      dequantize_blocks(q + begin * kBlock, sf + begin, out + begin * kBlock, end - begin);
    });
  });
}

}  // namespace

void dequantize(const Call& call) {
  if (call.out[0].dtype == DType::bf16)
    run<bf16>(call);
  else
    run<float>(call);
}

}  // namespace mxep
