// The parts of the module, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace mxep {

void bind_cpu(nanobind::module_& m);       // cpu.cc: run, num_threads
void bind_exchange(nanobind::module_& m);  // exchange.cc: Exchange
void bind_ffi(nanobind::module_& m);       // ffi.cc: ffi_targets
void bind_cuda(
    nanobind::module_& m);  // cuda.cc: cuda_ffi_targets, peer_ffi_targets, cuda_archs, CudaLaunch, CudaProgram

}  // namespace mxep
