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
  for (int64_t b = 0; b < blocks; ++b) {
    const bool valid = sf[b] != kE8m0Nan;
    const float factor = valid ? scale(sf[b]) : nan;
    for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      const float value = f32_from_e4m3(q[i]) * factor;
      store(out + i, valid && (q[i] & 0x7Fu) != kE4m3Nan ? value : nan);
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
