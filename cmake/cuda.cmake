# The CUDA kernels: one module has the code for the CPU, Hopper and Blackwell.
set(MXEP_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (with nvcc 13.0 or newer and an NVIDIA driver), ON (fail without nvcc) or OFF")
set_property(CACHE MXEP_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT MXEP_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MXEP_CUDA: got '${MXEP_CUDA}'; allowed: AUTO, ON, OFF")
endif()
if(MXEP_CUDA STREQUAL "OFF")
  message(STATUS "CUDA kernels: none, MXEP_CUDA is OFF")
  return()
endif()

# AUTO leaves them out where nothing could launch them: they take three times as long as the rest.
set(MXEP_TURN_ON "`pip install . --config-settings=cmake.define.MXEP_CUDA=ON` compiles them with nvcc 13.0 or newer")
find_file(MXEP_DRIVER NAMES version PATHS /proc/driver/nvidia NO_DEFAULT_PATH)
find_program(MXEP_DRIVER NAMES nvidia-smi)
find_library(MXEP_DRIVER NAMES libcuda.so.1 PATHS ENV LD_LIBRARY_PATH PATHS /usr/lib/wsl/lib)
if(MXEP_CUDA STREQUAL "AUTO" AND NOT MXEP_DRIVER)
  message(STATUS "CUDA kernels: none, this machine has no NVIDIA driver; ${MXEP_TURN_ON}")
  return()
endif()

# Search order: $CUDACXX, the PATH, the nvidia-cuda-nvcc package in jaxlib's site-packages.
cmake_path(GET JAXLIB_INCLUDE PARENT_PATH site_packages)
cmake_path(GET site_packages PARENT_PATH site_packages)
# The minimum is CUDA 13.0, the one release that tests ran with: tests/frozen has hashes of its machine code, and ptxas
# 12.9 mixed up bytes of a kernel (core_kernels/quantize/plan_blockwise.py). An older nvcc is skipped with a warning, so
# that it does not break an installation without a GPU.
function(mxep_is_cuda_13 result nvcc)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  if(NOT version MATCHES "release ([0-9.]+)" OR CMAKE_MATCH_1 VERSION_LESS 13.0)
    set(${result} FALSE PARENT_SCOPE)
    if(version MATCHES "release ([0-9.]+)")
      set_property(GLOBAL APPEND PROPERTY MXEP_SKIPPED "${nvcc} of CUDA ${CMAKE_MATCH_1}")
    endif()
  endif()
endfunction()
find_program(MXEP_NVCC NAMES "$ENV{CUDACXX}" nvcc PATHS "${site_packages}/nvidia/cu13/bin" VALIDATOR mxep_is_cuda_13)
get_property(MXEP_SKIPPED GLOBAL PROPERTY MXEP_SKIPPED)
if(MXEP_SKIPPED)
  list(JOIN MXEP_SKIPPED ", " MXEP_SKIPPED)
  message(WARNING "CUDA kernels: skipped ${MXEP_SKIPPED}: the kernels need nvcc 13.0 or newer")
endif()
if(NOT MXEP_NVCC)
  if(MXEP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MXEP_CUDA is ON, but there is no nvcc of CUDA 13.0 or newer: install the toolkit, put nvcc on "
                        "the PATH or name it in CUDACXX; or build with MXEP_CUDA=OFF")
  endif()
  message(STATUS "CUDA kernels: none, no nvcc of CUDA 13.0 or newer on the PATH or in CUDACXX; ${MXEP_TURN_ON}")
  return()
endif()

set(CMAKE_CUDA_COMPILER "${MXEP_NVCC}")
# Machine code alone, no PTX. The suffix "a" enables the instructions of one architecture; such code runs on no other.
set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # loads the driver at the first call, so that the module imports without one

file(GLOB_RECURSE MXEP_CUDA_SOURCES CONFIGURE_DEPENDS core_kernels/*.cu)
# Kernels with Hopper's instructions are in files named *_sm90.cu; core_kernels/cuda/ops.def limits their ops to 900.
set(MXEP_HOPPER_SOURCES ${MXEP_CUDA_SOURCES})
list(FILTER MXEP_HOPPER_SOURCES INCLUDE REGEX "_sm90\\.cu$")
list(FILTER MXEP_CUDA_SOURCES EXCLUDE REGEX "_sm90\\.cu$")
add_library(mxep_cuda OBJECT ${MXEP_CUDA_SOURCES})
add_library(mxep_cuda_sm90 OBJECT ${MXEP_HOPPER_SOURCES})
set_target_properties(mxep_cuda mxep_cuda_sm90 PROPERTIES POSITION_INDEPENDENT_CODE ON)
set_target_properties(mxep_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
# No contraction, nvcc's default: an fma rounds once where the contract rounds twice. No flushing of subnormals: the
# smallest scale, 2^-127, is a subnormal.
foreach(library mxep_cuda mxep_cuda_sm90)
  target_include_directories(${library} PRIVATE core_kernels)
  target_compile_options(${library} PRIVATE -O3 -fmad=false -ftz=false -Xcompiler=-Wall -Xptxas=-warn-spills)
endforeach()

target_sources(_ops PRIVATE cpp_bindings/cuda.cc)
set_target_properties(_ops PROPERTIES CUDA_ARCHITECTURES OFF) # it was made before CUDA; `make` asks, ninja does not
set_source_files_properties(cpp_bindings/module.cc PROPERTIES COMPILE_DEFINITIONS MXEP_CUDA)
target_link_libraries(_ops PRIVATE mxep_cuda mxep_cuda_sm90)
message(STATUS "CUDA kernels: with ${MXEP_NVCC}")
