// Kernels of clusters that stay as long as there is work.
#pragma once

#include "cuda/driver.h"

namespace mxep::cuda {

// CTAs of kKernel that the stream's context holds at a time, in clusters of `cluster`. Then the kernel is ready to
// launch.
template <auto kKernel>
unsigned resident_ctas(const char* op, cudaStream_t stream, unsigned cluster, unsigned threads, size_t shared_bytes) {
  static PerContext known;
  return known(context_of(op, stream), [&] {
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
