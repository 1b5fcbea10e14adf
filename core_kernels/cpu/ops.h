// The C++ kernels and the table of them, from the list in ops.def.
#pragma once

#include "op.h"

namespace mxep {

#define MXEP_OP(name, inputs, outputs, attrs) void name(const Call& call);
#include "cpu/ops.def"
#undef MXEP_OP

inline constexpr Op kCpuOps[] = {
#define MXEP_OP(name, inputs, outputs, attrs) {#name, inputs, outputs, attrs, name},
#include "cpu/ops.def"
#undef MXEP_OP
};

// Runs an op of the table. Both bindings call it.
void run_op(const Op& op, const Call& call);

}  // namespace mxep
