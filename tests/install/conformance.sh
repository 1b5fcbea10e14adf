#!/usr/bin/env bash
# tests/install/conformance.sh PYTHON FILE SDIST: installs FILE, a wheel or the sdist, into a new environment with both
# frameworks. Runs there a layer of each, the doctor, mxep.conformance, and the ops that quantize in tests/conformance: the
# tests of SDIST, unpacked, so that a file that it lacks is found.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$1 file=$(realpath "$2") sdist=$(realpath "$3")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # away from the checkout

install environment "$file" torch,jax
environment/bin/python -m mxep.doctor
environment/bin/python -m mxep.conformance mxep.core_kernels.quantize.oracle -k dequantize
environment/bin/pip install --quiet --no-compile --disable-pip-version-check pytest hypothesis
mkdir sources
tar --extract --file "$sdist" --directory sources --strip-components 1
cd sources
# OpenMP's and BLAS's threads wait without spinning.
OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 ../environment/bin/python -m pytest -q tests/conformance/quantize
