#include <stdexcept>
#include <string>

#include "cuda/driver.h"
#include "peer/group/regions.h"

namespace mxep::cuda {
namespace {

constexpr const char* kOp = "PeerMemory";

void require(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string(kOp) + ": CUDA cannot " + what + " (error " + std::to_string(status) +
                             "); allowed: one process with all GPUs, or transport=None");
}

}  // namespace

Region region_of(int64_t address) {
  static const auto range = driver_function<decltype(cuMemGetAddressRange)>(kOp, "cuMemGetAddressRange");
  static const auto retain = driver_function<decltype(cuMemRetainAllocationHandle)>(kOp, "cuMemRetainAllocationHandle");
  static const auto release = driver_function<decltype(cuMemRelease)>(kOp, "cuMemRelease");
  static const auto share =
      driver_function<decltype(cuMemExportToShareableHandle)>(kOp, "cuMemExportToShareableHandle");
  const auto at = static_cast<CUdeviceptr>(address);
  CUdeviceptr base;
  size_t nbytes;
  require(range(&base, &nbytes, at), "find the allocation of an array");
  CUmemGenericAllocationHandle handle;
  require(retain(&handle, reinterpret_cast<void*>(base)), "share memory that XLA allocated");
  int descriptor = -1;
  const CUresult status = share(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  release(handle);
  require(status, "share memory that XLA allocated");
  return {static_cast<int64_t>(base), static_cast<int64_t>(nbytes), descriptor};
}

MappedRegion::MappedRegion(int descriptor, int64_t nbytes, const std::vector<int>& devices) : nbytes_(nbytes) {
  static const auto open =
      driver_function<decltype(cuMemImportFromShareableHandle)>(kOp, "cuMemImportFromShareableHandle");
  static const auto reserve = driver_function<decltype(cuMemAddressReserve)>(kOp, "cuMemAddressReserve");
  static const auto free = driver_function<decltype(cuMemAddressFree)>(kOp, "cuMemAddressFree");
  static const auto map = driver_function<decltype(cuMemMap)>(kOp, "cuMemMap");
  static const auto unmap = driver_function<decltype(cuMemUnmap)>(kOp, "cuMemUnmap");
  static const auto release = driver_function<decltype(cuMemRelease)>(kOp, "cuMemRelease");
  static const auto set_access = driver_function<decltype(cuMemSetAccess)>(kOp, "cuMemSetAccess");
  const auto size = static_cast<size_t>(nbytes);
  CUmemGenericAllocationHandle handle;
  require(open(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "open memory of another process");
  CUdeviceptr at = 0;
  CUresult status = reserve(&at, size, 0, 0, 0);
  if (status == CUDA_SUCCESS && (status = map(at, size, 0, handle, 0)) != CUDA_SUCCESS) free(at, size);
  release(handle);  // the map keeps the memory
  require(status, "map memory of another process");
  std::vector<CUmemAccessDesc> access;
  for (const int device : devices)
    access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  status = set_access(at, size, access.data(), access.size());
  if (status != CUDA_SUCCESS) unmap(at, size), free(at, size);
  require(status, "read memory of the GPU of another process");
  address_ = static_cast<int64_t>(at);
}

MappedRegion::~MappedRegion() {
  static const auto free = driver_function<decltype(cuMemAddressFree)>(kOp, "cuMemAddressFree");
  static const auto unmap = driver_function<decltype(cuMemUnmap)>(kOp, "cuMemUnmap");
  unmap(static_cast<CUdeviceptr>(address_), static_cast<size_t>(nbytes_));
  free(static_cast<CUdeviceptr>(address_), static_cast<size_t>(nbytes_));
}

}  // namespace mxep::cuda
