#include "permute/cpu.h"

#include <algorithm>

#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

// Copies row `source` of the input, or writes zeros for padding. Rows without bytes may have no address: memcpy and
// memset take none.
void gather(uint8_t* out, const uint8_t* in, int64_t stride, int64_t nbytes, int64_t source) {
  if (source < 0)
    std::fill_n(out, nbytes, 0);
  else
    std::copy_n(in + source * stride, nbytes, out);
}

}  // namespace

void permute_rows(const Call& call) {
  const Array& x = call.in[0];
  const auto map = checked_map("permute_rows", call.in[1], x.dim(0));
  const int64_t width = x.dim(1) * itemsize(x.dtype);
  const uint8_t* in = x.as<const uint8_t>();
  uint8_t* out = call.out[0].as<uint8_t>();
  parallel_ranges(map.size(), width, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) gather(out + i * width, in, width, width, map[i]);
  });
}

void permute_mx(const Call& call) {
  const Array& packed = call.in[0];
  const auto map = checked_map("permute_mx", call.in[1], packed.dim(0));
  const int64_t width = packed.dim(1), k = call.out[0].dim(1), scales = call.out[1].dim(1);
  const uint8_t* in = packed.as<const uint8_t>();
  uint8_t *q = call.out[0].as<uint8_t>(), *sf = call.out[1].as<uint8_t>();
  parallel_ranges(map.size(), width, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      gather(q + i * k, in, width, k, map[i]);
      gather(sf + i * scales, in + k, width, scales, map[i]);
    }
  });
}

}  // namespace mxep
