// Access to a framework's arrays through its C functions, without a Python call.
//
//   type.__dlpack_c_exchange_api__ --> Exchange --.-- read: address, device, dtype, shape, strides of one array
//   (a table of C functions, DLPack 1.3)          |-- layouts: of several arrays, as bytes that serve as a dict key
//                                                 '-- stream: the framework's current stream
//
// Exchange neither owns nor copies nor waits: a result is valid while the caller holds the arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

namespace mxep {

namespace nb = nanobind;

// The first members of DLPackExchangeAPI (dlpack.h). Members that a newer minor version appends are not used.
struct ExchangeTable {
  struct {
    uint32_t major, minor;
  } version;
  void* older;
  void *allocate, *own, *wrap;
  int (*read)(void* array, nb::dlpack::dltensor* out);  // may be null
  int (*stream)(int device_type, int32_t device, void** out);
};

class Exchange {
 public:
  // For a type of arrays, for example torch.Tensor. Throws TypeError if the type has no such table.
  explicit Exchange(nb::handle type);

  // Returns false, without a Python error, if DLPack cannot describe the array: a sparse tensor, an unsupported dtype.
  bool read(nb::handle array, nb::dlpack::dltensor* out) const;
  // Equal keys mean equal dtypes, devices, shapes and strides, and on a GPU equal addresses modulo 16. None if one of
  // the arrays cannot be read.
  std::optional<nb::bytes> layouts(const nb::tuple& arrays) const;
  void* cuda_stream(int device) const;

 private:
  const ExchangeTable* table_ = nullptr;
};

}  // namespace mxep
