// Tensor maps: descriptions of a matrix from which the TMA unit copies boxes.
#pragma once

#include "cuda/driver.h"

namespace mxep::cuda {

// The shape of a map: sizes, the bytes from one row and one matrix to the next, the sizes of a box.
struct MapShape {
  cuuint32_t dims;
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3];
};

// The launch copies the map with its arguments. Boxes read zeros outside the array.
inline CUtensorMap tensor_map(const char* op, const void* data, CUtensorMapDataType type, const MapShape& shape,
                              CUtensorMapSwizzle swizzle) {
  static const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>(op, "cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint32_t steps[] = {1, 1, 1};
  // 256 bytes per L2 fetch: the neighbouring box is the next one to be loaded.
  const auto fill = [&] {
    return encode(&map, type, shape.dims, const_cast<void*>(data), shape.sizes, shape.strides, shape.box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = fill();
  // The driver needs a current context. A new thread, such as one of autograd's, has none before its first runtime
  // call.
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    int device;
    check(op, cudaGetDevice(&device));
    check(op, cudaSetDevice(device));
    status = fill();
  }
  if (status != CUDA_SUCCESS)
    throw std::runtime_error(std::string(op) + ": CUDA: cuTensorMapEncodeTiled refused a matrix of " +
                             std::to_string(shape.sizes[1]) + " x " + std::to_string(shape.strides[0]) +
                             " bytes (error " + std::to_string(status) + ")");
  return map;
}

// A map of a matrix of bytes for boxes of `box_rows` rows of 128 bytes, in the 128-byte swizzle that wgmma reads.
// `pitch`, the length of a row, and the address are multiples of 16. With a number of matrices the map has a third dim,
// and a box does not reach into the next matrix.
inline CUtensorMap byte_matrix(const char* op, const void* data, int64_t rows, int64_t pitch, int box_rows,
                               int64_t matrices = 0) {
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const MapShape shape{matrices ? 3u : 2u,
                       {size(pitch), size(rows), size(matrices)},
                       {size(pitch), size(rows * pitch)},
                       {128, static_cast<cuuint32_t>(box_rows), 1}};
  return tensor_map(op, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace mxep::cuda
