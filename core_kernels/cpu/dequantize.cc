#include "mx_math.h"
#include "ops.h"
#include "parallel.h"

namespace mxep {
namespace {

inline void store(float* out, float x) { *out = x; }
inline void store(bf16* out, float x) { *out = bf16_from_f32(x); }

template <typename T>
void dequantize(const uint8_t* q, const uint8_t* sf, T* out, int64_t blocks) {
  const float nan = std::bit_cast<float>(0x7FC00000u);
  parallel_ranges(blocks, kBlock * sizeof(T), [=](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const float factor = scale(sf[block]);
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const bool is_nan = sf[block] == kE8m0Nan || (q[i] & 0x7F) == kE4m3Nan;
        store(out + i, is_nan ? nan : f32_from_e4m3(q[i]) * factor);
      }
    }
  });
}

}  // namespace

void dequantize(const Call& call) {
  const Array &q = call.in[0], &sf = call.in[1], &out = call.out[0];
  const int64_t blocks = sf.leading(0);
  if (out.dtype == DType::bf16)
    dequantize(q.as<const uint8_t>(), sf.as<const uint8_t>(), out.as<bf16>(), blocks);
  else
    dequantize(q.as<const uint8_t>(), sf.as<const uint8_t>(), out.as<float>(), blocks);
}

}  // namespace mxep
