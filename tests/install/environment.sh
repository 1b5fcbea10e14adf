# Sourced by wheel.sh and conformance.sh; `python` is set: the absolute path of the Python that makes environments.

declare -A layer=(
  [torch]="import torch; from mxep.torch_frontend import MoE, RouterConfig
y, _ = MoE(32, 64, 4, RouterConfig(top_k=2))(torch.randn(5, 32)); y.sum().backward()"
  [jax]="import jax; from mxep.jax_frontend import MoEConfig, RouterConfig, moe
config = MoEConfig(dim=32, hidden_dim=64, num_experts=4, router=RouterConfig(top_k=2))
params, x = moe.init(jax.random.key(0), config), jax.random.normal(jax.random.key(1), (5, 32))
y, _ = moe.apply(params, x, config)
jax.grad(lambda params: moe.apply(params, x, config)[0].sum())(params)"
)

newest() { realpath "$(ls -t "$@" | head -1)"; }

run_layer() { "$1/bin/python" -c "${layer[$2]}; assert y.shape == (5, 32)"; }

# install ENVIRONMENT FILE FRAMEWORKS: a wheel or an sdist, built without CUDA kernels, with the newest dependencies that
# pip picks; then a layer of each framework. Another framework joins those that the environment has. Modules are compiled
# when they are imported, which few of them are. --no-binary: pip would keep the wheel that it builds of an sdist, and
# install that for a later sdist of the same path and version.
install() {
  [ -d "$1" ] || "$python" -m venv "$1"
  "$1/bin/pip" install --quiet --no-compile --disable-pip-version-check --no-binary mxep \
    "mxep[$3] @ file://$2" --config-settings=cmake.define.MXEP_CUDA=OFF
  for framework in ${3/,/ }; do run_layer "$1" "$framework"; done
}
