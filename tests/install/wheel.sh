#!/usr/bin/env bash
# tests/install/wheel.sh PYTHON FOLDER CPU_FOLDER: installs the newest wheel of each folder into new environments: torch
# alone, then jax too, from FOLDER; jax alone, from CPU_FOLDER, whose wheel has no CUDA kernels. Runs a layer and the
# doctor in each.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$1 wheel=$(newest "$2"/mxep-*.whl) cpu_wheel=$(newest "$3"/mxep-*.whl)
for file in core_kernels/py.typed cpp_bindings/py.typed torch_frontend/py.typed jax_frontend/py.typed __init__.py doctor.py conformance.py; do
  for each in "$wheel" "$cpu_wheel"; do
    grep -q "^mxep/$file " <<< "$("$python" -m zipfile -l "$each")" || { echo "$each lacks mxep/$file"; exit 1; }
  done
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # away from the sources

install both "$wheel" torch
both/bin/python -m mxep.doctor
install both "$wheel" jax
run_layer both torch
both/bin/python -m mxep.doctor
install alone "$cpu_wheel" jax
alone/bin/python -c "from mxep.cpp_bindings import cuda_archs; assert not cuda_archs, cuda_archs"
if alone/bin/python -c "import triton" 2> /dev/null; then echo "mxep[jax] installs triton, which no CPU needs"; exit 1; fi
alone/bin/python -m mxep.doctor
