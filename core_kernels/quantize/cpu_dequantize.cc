#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "quantize/cpu.h"

namespace mxep {
namespace {

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
