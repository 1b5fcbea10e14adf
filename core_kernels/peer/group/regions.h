// Memory of a GPU that other processes of the host map: a file descriptor stands for it.
//
//   address --region_of--> {base, nbytes, descriptor} --socket--> another process --MappedRegion--> an address there
#pragma once

#include <cstdint>
#include <vector>

namespace mxep::cuda {

struct Region {
  int64_t base, nbytes;
  int descriptor;  // the caller closes it
};

// The allocation that has the address, on the current device. Throws std::runtime_error where CUDA cannot export it.
Region region_of(int64_t address);

// Maps a region for kernels of the devices, as long as the object lives.
class MappedRegion {
 public:
  MappedRegion(int descriptor, int64_t nbytes, const std::vector<int>& devices);
  ~MappedRegion();
  MappedRegion(const MappedRegion&) = delete;
  int64_t address() const { return address_; }

 private:
  int64_t address_, nbytes_;
};

}  // namespace mxep::cuda
