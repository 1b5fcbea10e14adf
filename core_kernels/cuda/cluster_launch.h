// Launches of persistent kernels with thread block clusters.
#pragma once

#include "cuda/driver.h"

namespace mxep::cuda {

// Number of CTAs of kKernel, in clusters of `cluster`, that are resident in the stream's context at a time. Afterwards
// the kernel is ready to launch.
template <auto kKernel>
unsigned resident_ctas(const char* op, cudaStream_t stream, unsigned cluster, unsigned threads, size_t shared_bytes) {
  static PerContext cached;
  return cached(context_of(op, stream), [&] {
    allow_shared_memory<kKernel>(op, stream, static_cast<int>(shared_bytes));
    cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension, .val = {.clusterDim = {cluster, 1, 1}}};
    const cudaLaunchConfig_t config{.gridDim = cluster,
                                    .blockDim = threads,
                                    .dynamicSmemBytes = shared_bytes,
                                    .stream = stream,
                                    .attrs = &attribute,
                                    .numAttrs = 1};
    int clusters;
    check(op, cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config));
    return clusters * static_cast<int>(cluster);
  });
}

}  // namespace mxep::cuda
