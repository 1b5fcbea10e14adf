#include "mx_math.h"
#include "ops.h"
#include "parallel.h"

namespace mxep {
namespace {

MXEP_INLINE void store(float* out, float x) { *out = x; }
MXEP_INLINE void store(bf16* out, float x) { *out = bf16_from_f32(x); }

template <typename T>
MXEP_INLINE void blocks_of(const uint8_t* q, const uint8_t* sf, T* out, int64_t blocks) {
  const float nan = std::bit_cast<float>(0x7FC00000u);
  for (int64_t b = 0; b < blocks; ++b, q += kBlock, out += kBlock) {
    const float factor = sf[b] == kE8m0Nan ? nan : scale(sf[b]);
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t magnitude = q[i] & 0x7Fu;
      store(out + i, (magnitude == kE4m3Nan ? nan : f32_from_e4m3(q[i])) * factor);
    }
  }
}

// target_clones takes no template.
MXEP_CLONES void dequantize_blocks(const uint8_t* q, const uint8_t* sf, bf16* out, int64_t blocks) {
  blocks_of(q, sf, out, blocks);
}
MXEP_CLONES void dequantize_blocks(const uint8_t* q, const uint8_t* sf, float* out, int64_t blocks) {
  blocks_of(q, sf, out, blocks);
}

template <typename T>
void run(const Call& call) {
  const uint8_t *q = call.in[0].as<const uint8_t>(), *sf = call.in[1].as<const uint8_t>();
  T* out = call.out[0].as<T>();
  parallel_ranges(call.in[1].leading(0), kBlock * sizeof(T), [=](int64_t begin, int64_t end) {
    dequantize_blocks(q + begin * kBlock, sf + begin, out + begin * kBlock, end - begin);
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
