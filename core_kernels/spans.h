// Spans of the tokens of a group, as core_kernels/formats.py has them: what has one scale per row of an operand whose
// tokens are summed.
#pragma once

namespace mxep {

inline constexpr int kSpan = 256;
// Octaves that a group's first span has to spare, so that few later ones raise the scale.
inline constexpr int kHeadroom = 2;

}  // namespace mxep
