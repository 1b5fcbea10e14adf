// The op tables as one Python module.
#include <nanobind/nanobind.h>

#include "bindings.h"

namespace nb = nanobind;

NB_MODULE(_ops, m) {
  // The frontends cache prepared launches, and Python does not empty these caches when it exits.
  nb::set_leak_warnings(false);
  mxep::bind_cpu(m);
  mxep::bind_exchange(m);
  mxep::bind_ffi(m);
#ifdef MXEP_CUDA
  mxep::bind_cuda(m);
#else
  m.attr("cuda_archs") = nb::make_tuple();
  m.attr("cuda_op_archs") = nb::dict();
  m.attr("CudaLaunch") = nb::none();
  m.attr("CudaProgram") = nb::none();
  m.attr("MappedRegion") = nb::none();
  m.attr("PeerGroup") = nb::none();
  m.attr("peer_region") = nb::none();
  m.attr("SIGNAL_PAD_BYTES") = m.attr("MOST_PEERS") = 0;
  m.def("cuda_ffi_targets", [] { return nb::dict(); });
  m.def("peer_ffi_targets", [] { return nb::dict(); });
#endif
}
