#!/usr/bin/env bash
# Line coverage of the package, Python and C++, by both runs of `make test`: `make coverage`.
#
#   extension built to count lines --> tests --> coverage report (Python), gcovr (C++)
#
# Runs the processes of `make test`, which builds the usual extension again. tests/checks/gcov.py has each of them write its
# counts of C++ lines. Reports, data and the build are in build/coverage.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin out=$PWD/build/coverage
export PATH=$bin:$PATH OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 COVERAGE_FILE=$out/.coverage
export XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
export JAX_COMPILATION_CACHE_DIR=$out/programs JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
rm -rf "$out" .venv/.dev && mkdir -p "$out"

# Several threads count the same line, and tests run in other folders.
CXXFLAGS="--coverage -fprofile-update=atomic -fprofile-abs-path" LDFLAGS="--coverage -Wl,-u,__gcov_dump" \
  "$bin/python" -m pip install --quiet --no-build-isolation --no-deps --editable . \
  --config-settings=build-dir="$out/build" --config-settings=cmake.define.MXEP_CUDA=ON

measure() {
  "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -p tests.checks.gcov -m "${MARKED-not slow}" \
    --cov --cov-append --cov-report= --durations=0 "$@"
}
TRITON_INTERPRET=1 measure tests/conformance tests/kernels | tee "$out/interpreter.log"
measure | tee "$out/normal.log"
"$bin/python" -m coverage report --show-missing | tee "$out/python.txt"
# The bindings in cuda.cc run on a GPU, where nothing counts lines.
"$bin/python" -m gcovr --root . --filter core_kernels --filter cpp_bindings --exclude cpp_bindings/cuda.cc --merge-lines \
  --fail-under-line 97 "$out/build" | tee "$out/cpp.txt"
# Without slow tests: 99% of core_kernels, 97% of torch_frontend, 98% of jax_frontend; of C++ 98%.
for floor in core_kernels=97 torch_frontend=96 jax_frontend=98; do
  "$bin/python" -m coverage report --include "${floor%=*}/*" --fail-under "${floor#*=}" --format total
done
