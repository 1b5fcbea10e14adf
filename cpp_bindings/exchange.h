// The arrays of a framework as the framework itself knows them, without a Python call.
//
//   type.__dlpack_c_exchange_api__ --> Exchange --.-- read: address, device, dtype, shape, strides of one array
//   (a table of C functions, DLPack 1.3)          |-- layouts: of several, as bytes that a dict can look up
//                                                 '-- stream: the one that the framework works on
//
// Nothing is owned, copied or waited for: what is read holds while the caller holds the arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>

namespace mxep {

namespace nb = nanobind;

// The head of DLPackExchangeAPI (dlpack.h); what comes later in a newer minor version is not asked for.
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
  // Of a type of arrays, like torch.Tensor. Throws TypeError if it has no such table.
  explicit Exchange(nb::handle type);

  // False, and no Python error, for what DLPack has no words for: a sparse tensor, another dtype.
  bool read(nb::handle array, nb::dlpack::dltensor* out) const;
  // Equal for arrays of equal dtypes, devices, shapes and strides, which on a GPU lie equally off 16 bytes. None if one
  // of them cannot be read.
  std::optional<nb::bytes> layouts(const nb::tuple& arrays) const;
  void* cuda_stream(int device) const;

 private:
  const ExchangeTable* table_ = nullptr;
};

}  // namespace mxep
