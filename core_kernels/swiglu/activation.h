// The numbers of SwiGLU: the last three attributes of its ops, as activation.py makes them. Kernels are templates over
// PlainSwiGLU and SwiGLU.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "op.h"

namespace mxep {

// (up + offset) * gate * sigmoid(alpha * gate) after both are clamped.
struct SwiGLU {
  static constexpr bool kPlain = false;
  float alpha, limit, offset;
};

// silu(gate) * up: no limit, and an offset of zero is not added, since -0 + 0 is 0.
struct PlainSwiGLU {
  static constexpr bool kPlain = true;
  static constexpr float alpha = 1;
};

// Runs body(PlainSwiGLU) or body(SwiGLU).
template <typename Body>
void with_swiglu(const Call& call, const Body& body) {
  const auto number = [&](size_t i) { return std::bit_cast<float>(static_cast<uint32_t>(call.attrs.end()[i - 3])); };
  const SwiGLU by{number(0), number(1), number(2)};
  if (by.alpha == 1 && by.limit == std::numeric_limits<float>::infinity() && by.offset == 0)
    body(PlainSwiGLU{});
  else
    body(by);
}

}  // namespace mxep
