// Tensor maps: descriptions of a matrix from which the TMA unit copies boxes.
#pragma once

#include "cuda/driver.h"

namespace mxep::cuda {

// A map of a matrix of bytes for boxes of `box_rows` rows of 128 bytes, in the 128-byte swizzle that wgmma reads.
// `pitch`, the length of a row, and the address are multiples of 16. With a number of matrices the map has a third dim,
// and a box does not reach into the next matrix. The launch copies the map with its arguments.
inline CUtensorMap byte_matrix(const char* op, const void* data, int64_t rows, int64_t pitch, int box_rows,
                               int64_t matrices = 0) {
  static const auto encode = driver_function<decltype(cuTensorMapEncodeTiled)>(op, "cuTensorMapEncodeTiled");
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(pitch), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(pitch),
                                static_cast<cuuint64_t>(rows * pitch)};  // of all dims but the first
  const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows), 1}, steps[] = {1, 1, 1};
  // 256 bytes per L2 fetch: the neighbouring box is the next one to be loaded.
  const auto fill = [&] {
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, matrices ? 3 : 2, const_cast<void*>(data), sizes, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // zeros outside the matrix
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
                             std::to_string(rows) + " x " + std::to_string(pitch) + " bytes (error " +
                             std::to_string(status) + ")");
  return map;
}

}  // namespace mxep::cuda
