#include "exchange.h"

#include <nanobind/stl/optional.h>

#include <string>
#include <type_traits>

#include "bindings.h"

namespace mxep {
namespace {

struct Head {
  nb::dlpack::device device;
  nb::dlpack::dtype dtype;
  int32_t ndim, misaligned;
};
static_assert(std::has_unique_object_representations_v<Head>);

void append(std::string& key, const auto* values, size_t count) {
  key.append(reinterpret_cast<const char*>(values), count * sizeof(*values));
}

}  // namespace

Exchange::Exchange(nb::handle type) {
  constexpr const char* kName = "dlpack_exchange_api";
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), kName))
    table_ = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), kName));
  if (!table_ || table_->version.major != nb::dlpack::major_version || !table_->read)
    throw nb::type_error((std::string("Exchange: type: got ") + nb::repr(type).c_str() +
                          "; allowed: arrays with the C functions of DLPack 1 (torch.Tensor from torch 2.11 on)")
                             .c_str());
}

bool Exchange::read(nb::handle array, nb::dlpack::dltensor* out) const {
  if (table_->read(array.ptr(), out) == 0) return true;
  PyErr_Clear();
  return false;
}

std::optional<nb::bytes> Exchange::layouts(const nb::tuple& arrays) const {
  std::string key;
  key.reserve(512);
  for (nb::handle array : arrays) {
    nb::dlpack::dltensor found;
    if (!read(array, &found)) return std::nullopt;
    const bool on_gpu = found.device.device_type == nb::device::cuda::value;
    const auto address = reinterpret_cast<uintptr_t>(found.data) + found.byte_offset;
    const Head head{found.device, found.dtype, found.ndim, on_gpu ? static_cast<int32_t>(address % 16) : 0};
    append(key, &head, 1);
    append(key, found.shape, found.ndim);
    append(key, found.strides, found.ndim);
  }
  return nb::bytes(key.data(), key.size());
}

void* Exchange::cuda_stream(int device) const {
  void* stream = nullptr;
  if (table_->stream(nb::device::cuda::value, device, &stream)) nb::raise_python_error();
  return stream;
}

void bind_exchange(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Exchange>(m, "Exchange")
      .def(nb::init<nb::handle>(), "type"_a)
      .def("layouts", &Exchange::layouts, "arrays"_a);
}

}  // namespace mxep
