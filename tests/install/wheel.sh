#!/usr/bin/env bash
# tests/install/wheel.sh FOLDER CPU_FOLDER: installs the newest wheel of each folder into new environments, with the
# newest dependencies that pip picks: torch alone, then jax too, from FOLDER; jax alone, from CPU_FOLDER, whose wheel
# has no CUDA kernels. Runs a layer and the doctor in each.
set -euo pipefail
newest() { realpath "$(ls -t "$1"/mxep-*.whl | head -1)"; }
wheel=$(newest "$1") cpu_wheel=$(newest "$2")
for file in core_kernels/py.typed cpp_bindings/py.typed torch_frontend/py.typed jax_frontend/py.typed __init__.py doctor.py; do
  for each in "$wheel" "$cpu_wheel"; do
    grep -q "^mxep/$file " <<< "$(python3 -m zipfile -l "$each")" || { echo "$each lacks mxep/$file"; exit 1; }
  done
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"  # away from the sources

declare -A layer=(
  [torch]="import torch; from mxep.torch_frontend import MoE
y, _ = MoE(32, 64, num_experts=4, top_k=2)(torch.randn(5, 32)); y.sum().backward()"
  [jax]="import jax; from mxep.jax_frontend import MoEConfig, moe
config = MoEConfig(dim=32, hidden_dim=64, num_experts=4, top_k=2)
params, x = moe.init(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (5, 32))
y, _ = moe.apply(params, x, config)"
)

# install ENVIRONMENT WHEEL FRAMEWORK: another framework joins those that the environment has. Modules are compiled when
# they are imported, which few of them are.
install() {
  [ -d "$1" ] || python3 -m venv "$1"
  "$1/bin/pip" install --quiet --no-compile --disable-pip-version-check "mxep[$3] @ file://$2"
  "$1/bin/python" -c "${layer[$3]}; assert y.shape == (5, 32)"
}

install beside "$wheel" torch
beside/bin/python -m mxep.doctor
install beside "$wheel" jax
beside/bin/python -c "${layer[torch]}"
beside/bin/python -m mxep.doctor
install alone "$cpu_wheel" jax
alone/bin/python -c "from mxep.cpp_bindings import cuda_archs; assert not cuda_archs, cuda_archs"
if alone/bin/python -c "import triton" 2> /dev/null; then echo "mxep[jax] installs triton, which no CPU needs"; exit 1; fi
alone/bin/python -m mxep.doctor
