#!/usr/bin/env bash
# tests/wheel.sh FOLDER: installs the newest wheel of FOLDER into two new environments, one with torch alone and one
# with jax alone, with the newest dependencies that pip picks; runs a layer and the doctor in each.
set -euo pipefail
wheel=$(realpath "$(ls -t "$1"/mxep-*.whl | head -1)")
files=$(python3 -m zipfile -l "$wheel")
for file in core_kernels/py.typed cpp_bindings/py.typed torch_frontend/py.typed jax_frontend/py.typed __init__.py doctor.py; do
  grep -q "^mxep/$file " <<< "$files" || { echo "$wheel lacks mxep/$file"; exit 1; }
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
for framework in torch jax; do
  python3 -m venv "$framework"
  "$framework/bin/pip" install --quiet --disable-pip-version-check "mxep[$framework] @ file://$wheel"
  "$framework/bin/python" -c "${layer[$framework]}; assert y.shape == (5, 32)"
  "$framework/bin/python" -m mxep.doctor
done
