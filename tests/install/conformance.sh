#!/usr/bin/env bash
# tests/install/conformance.sh PYTHON FILE SDIST [SBOM]: installs FILE, a wheel or the sdist, into a new environment with both
# frameworks. Runs there a layer of each, the doctor, mxep.conformance, and the ops that quantize in tests/conformance: the
# tests of SDIST, unpacked, so that a file that it lacks is found. Writes the packages of the environment to SBOM, in
# CycloneDX; PYTHON has cyclonedx-bom then.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
python=$1 file=$(realpath "$2") sdist=$(realpath "$3") sbom=${4:+$(realpath "$4")}
project=$PWD/pyproject.toml
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # away from the checkout

install environment "$file" torch,jax
environment/bin/python -m mxep.doctor
environment/bin/python -m mxep.conformance mxep.core_kernels.quantize.oracle -k dequantize
if [ -n "$sbom" ]; then
  "$python" -m cyclonedx_py environment --pyproject "$project" --mc-type library --output-reproducible -o "$sbom" environment
fi
environment/bin/pip install --quiet --no-compile --disable-pip-version-check pytest hypothesis
mkdir sources
tar --extract --file "$sdist" --directory sources --strip-components 1
cd sources
# OpenMP's and BLAS's threads wait without spinning.
OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 ../environment/bin/python -m pytest -q tests/conformance/quantize
