// Bytes in the memory of a rank. addresses (ranks,): of the first byte of each rank's memory, which has one layout.
#pragma once

#include <cstdint>

namespace mxep::cuda {

__device__ inline char* row_of_peer(const int64_t* addresses, int rank, int64_t at) {
  return reinterpret_cast<char*>(__ldg(addresses + rank)) + at;
}

}  // namespace mxep::cuda
