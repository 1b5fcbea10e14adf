#!/usr/bin/env bash
# The C++ ops under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.
#
#   tests/sanitize/sanitize.sh [SECONDS [SEED]]       all checks; fuzz_ops.py runs for SECONDS, 600 without
#   tests/sanitize/sanitize.sh MODULE [ARGUMENTS]     one module with the same build: a case of fuzz_ops.py again
#
# The build is in build/sanitize, without CUDA; the installed extension is not touched. It is g++'s, whose runtimes are
# shared libraries that Python can load first. Leaks are not searched: Python keeps its modules when it exits.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$PWD/.venv/bin out=$PWD/build/sanitize
export PATH=$bin:$PATH

# float-cast-overflow is not one of `undefined`. RelWithDebInfo: stack traces have lines; the kernels are still at -O3.
flags="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer"
mkdir -p build
CXX=g++ cmake -S . -B "$out" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS=$flags" \
  -DMXEP_CUDA=OFF -DPython_EXECUTABLE="$bin/python" \
  -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" > "$out.log" || { cat "$out.log"; exit 1; }
cmake --build "$out" -j 2 >> "$out.log" || { cat "$out.log"; exit 1; }

# PYTHONMALLOC: each object is an allocation of its own. libstdc++: its exceptions are intercepted from the start.
run() {
  LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc OPENBLAS_NUM_THREADS=1 \
    timeout "$limit" "$bin/python" -m tests.sanitize "$out"/_ops*.so "$@"
}

seconds=${1:-600} seed=${2:-$(date +%Y%m%d)} limit=900
if [[ ! $seconds =~ ^[0-9]+$ ]]; then
  run "$@"
  exit
fi
run tests.sanitize.seeded
run tests.sanitize.run_cases
# With torch and jax: Exchange and the handlers of XLA, whose arrays have the frameworks' allocations.
XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false" \
  run pytest -q -p no:cacheprovider tests/kernels/cpp
limit=$((seconds + 300))
run tests.sanitize.fuzz_ops --seconds "$seconds" --seed "$seed"
