// Kernels of clusters that stay as long as there is work.
#pragma once

#include "launch.h"

namespace mxep::cuda {

// CTAs of kKernel that the current device holds at a time, in clusters of `cluster`. Asked once per kernel and device;
// then the kernel is ready to launch.
template <auto kKernel>
int resident_ctas(const char* op, unsigned cluster, unsigned threads, size_t shared_bytes) {
  static std::array<std::atomic<int>, 64> known{};
  int device;
  check(op, cudaGetDevice(&device));
  std::atomic<int>& ctas = known[device % known.size()];
  if (ctas == 0) {
    allow_shared_memory<kKernel>(op, static_cast<int>(shared_bytes));
    cudaLaunchConfig_t config{.gridDim = cluster, .blockDim = threads, .dynamicSmemBytes = shared_bytes};
    cudaLaunchAttribute attribute{.id = cudaLaunchAttributeClusterDimension, .val = {.clusterDim = {cluster, 1, 1}}};
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters;
    check(op, cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config));
    ctas = clusters * static_cast<int>(cluster);
  }
  return ctas;
}

}  // namespace mxep::cuda
