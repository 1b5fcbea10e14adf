"""Train a small MoE language model in one file: `jax.jit` on a mesh of data x expert, AdamW by optax.

    python examples/training/jax_mesh.py --expert 4                      # all GPUs; one process
    python examples/training/jax_mesh.py --expert 2 --cpu-devices 4      # parts of the CPU

The batch is sharded over both axes of the mesh. The experts' weights are sharded over `expert`, and their dim D over
`data`; all other weights are replicated. The loss is a mean over the global batch, and JAX reduces every gradient. The
text is --data, a file; without it the Python files of the standard library. One token is one byte. Checkpoints:
examples/training/train_jax.py writes them, by Orbax or by safetensors.
"""

import argparse
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.jax_frontend import MoEConfig, RouterConfig, moe, save_mx_rows

VOCABULARY = 256
AUX_LOSS_WEIGHT = 0.01
TOKENS = P(("data", "expert"))
"""The sharding of (B, S) and (B, S, D): sequences over all devices."""
SIZES = {  # on a CPU, on GPUs
    "layers": (2, 4),
    "dim": (64, 2048),
    "hidden_dim": (96, 768),
    "heads": (4, 16),
    "experts": (8, 32),
    "top_k": (2, 8),
    "length": (64, 2048),
    "batch": (16, 32),
}
Params = dict[str, Any]


def layer_of(sizes: argparse.Namespace) -> MoEConfig:
    router = RouterConfig(sizes.top_k)
    return MoEConfig(sizes.dim, sizes.hidden_dim, sizes.experts, router, recipe=sizes.recipe, deduplicate="both")


def init(key: Array, sizes: argparse.Namespace) -> Params:
    """fp32 weights. The layers are stacked along dim 0, for a scan."""
    dim = sizes.dim

    def block(key: Array) -> Params:
        qkv, out, experts = jax.random.split(key, 3)
        return {
            "attention_norm": jnp.ones(dim),
            "qkv": jax.random.normal(qkv, (dim, 3 * dim)) * dim**-0.5,
            "out": jax.random.normal(out, (dim, dim)) * dim**-0.5,
            "moe_norm": jnp.ones(dim),
            "moe": moe.init(experts, layer_of(sizes)),
        }

    tokens, positions, head, *blocks = jax.random.split(key, 3 + sizes.layers)
    return {
        "tokens": jax.random.normal(tokens, (VOCABULARY, dim)),
        "positions": jax.random.normal(positions, (sizes.length, dim)) * 0.1,
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(block, blocks)),
        "norm": jnp.ones(dim),
        "head": jax.random.normal(head, (dim, VOCABULARY)) * dim**-0.5,
    }


def specs(shapes: Params, sizes: argparse.Namespace) -> Params:
    """A PartitionSpec per weight: experts by `moe.specs`, after the dim of layers; all others whole on each device."""
    found = jax.tree.map(lambda _: P(), shapes)
    of_layer = moe.specs(layer_of(sizes), fsdp_axis="data")
    found["blocks"]["moe"] = jax.tree.map(lambda spec: P(None, *spec), of_layer)
    return found


def rms_norm(x: Array, scale: Array) -> Array:
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale).astype(jnp.bfloat16)


def loss_of(params: Params, batch: Array, sizes: argparse.Namespace, mesh: Mesh) -> tuple[Array, Array]:
    """The objective, and the cross-entropy alone, of windows (B, S + 1)."""
    tokens, targets = batch[:, :-1], batch[:, 1:]

    def block(x: Array, weights: Params) -> tuple[Array, Array]:
        normed = rms_norm(x, weights["attention_norm"])
        qkv = (normed @ weights["qkv"].astype(x.dtype)).reshape(*x.shape[:2], 3, sizes.heads, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
        x = x + attended.reshape(x.shape) @ weights["out"].astype(x.dtype)
        normed = rms_norm(x, weights["moe_norm"])
        y, stats = moe.sharded_apply(
            weights["moe"], normed, layer_of(sizes), tokens=P(*TOKENS, None), fsdp_axis="data", mesh=mesh
        )
        return x + y.astype(x.dtype), stats.aux_loss

    x = (params["tokens"][tokens] + params["positions"][: tokens.shape[1]]).astype(jnp.bfloat16)
    # The backward of a block computes it again, but not the exchange of its tokens: their MXFP8 rows are saved.
    x, aux_losses = jax.lax.scan(jax.checkpoint(block, policy=save_mx_rows), x, params["blocks"])
    logits = (rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype)).astype(jnp.float32)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return cross_entropy + AUX_LOSS_WEIGHT * aux_losses.sum(), cross_entropy


def read_text(path: Path | None) -> np.ndarray:
    """The bytes of a file, or of the standard library."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), np.uint8)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch_of(text: np.ndarray, step: int, sizes: argparse.Namespace) -> np.ndarray:
    """The windows (B, S + 1) of a step."""
    starts = np.random.default_rng(step).integers(len(text) - sizes.length, size=(sizes.batch, 1))
    return text[starts + np.arange(sizes.length + 1)].astype(np.int32)


def train(args: argparse.Namespace) -> None:
    shape = (jax.device_count() // args.expert, args.expert)
    mesh = jax.make_mesh(shape, ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Auto))
    warmup, steps = max(1, args.steps // 10), max(2, args.steps)  # optax needs a step after the warm-up
    schedule = optax.warmup_cosine_decay_schedule(args.lr / 10, args.lr, warmup, steps, args.lr / 10)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    # Weights are initialized with their shardings: no device holds all experts. The moments are sharded as the weights.
    new = partial(init, sizes=args)
    key = jax.random.key(0)
    place = partial(NamedSharding, mesh)
    shardings = jax.tree.map(place, specs(jax.eval_shape(new, key), args))
    params = jax.jit(new, out_shardings=shardings)(key)
    of_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: place(P()),
    )
    state = jax.jit(optimizer.init, out_shardings=of_state)(params)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, of_state, None))
    def update(params: Params, state: optax.OptState, batch: Array) -> tuple[Any, optax.OptState, tuple[Array, Array]]:
        grads, loss = jax.grad(partial(loss_of, sizes=args, mesh=mesh), has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.global_norm(grads))

    text = read_text(args.data)
    for step in range(args.steps):
        began = time.perf_counter()
        batch = jax.device_put(batch_of(text, step, args), place(TOKENS))
        params, state, (loss, norm) = update(params, state, batch)
        value = float(loss)  # waits for the device
        speed = args.batch * args.length / (time.perf_counter() - began)
        print(f"step {step + 1}: loss {value:.4f}, gradient {float(norm):.3f}, {speed:,.0f} tokens/s", flush=True)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog="jax_mesh.py", description="Train a small MoE model on a mesh.")
    flags.add_argument("--cpu-devices", type=int, metavar="N", help="run on N parts of the CPU")
    flags.add_argument("--data", type=Path, metavar="FILE", help="text (default: the standard library)")
    flags.add_argument("--expert", type=int, default=1, metavar="N", help="devices that share the experts (default: 1)")
    flags.add_argument("--recipe", choices=tuple(RECIPES), default="mxfp8")
    flags.add_argument("--steps", type=int, default=100, metavar="N")
    flags.add_argument("--lr", type=float, default=1e-3)
    for name, (of_cpu, of_gpu) in SIZES.items():
        help_ = f"default: {of_cpu}, on GPUs {of_gpu}"
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_)
    args = flags.parse_args(argv)
    if args.cpu_devices:  # before JAX looks for devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    for name, (of_cpu, of_gpu) in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, of_cpu if jax.default_backend() == "cpu" else of_gpu)
    devices = jax.device_count()
    checked = ("expert", devices, args.expert), ("experts", args.experts, args.expert), ("batch", args.batch, devices)
    for name, value, divisor in checked:
        if divisor < 1 or value % divisor:
            flags.error(f"--{name}: {divisor} does not divide {value}; {devices} devices, --expert {args.expert}")
    for name in (*SIZES, "steps"):
        if getattr(args, name) < 1:
            flags.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: at least 1")
    for name, bad, allowed in (
        ("dim", args.dim % 32, "multiples of 32"),
        ("hidden_dim", args.hidden_dim % 32, "multiples of 32"),
        ("heads", args.dim % args.heads, f"divisors of --dim {args.dim}"),
        ("top_k", args.top_k > args.experts, f"1 to {args.experts} experts"),
    ):
        if bad:
            flags.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: {allowed}")
    if args.data and (not args.data.is_file() or args.data.stat().st_size <= args.length):
        flags.error(f"--data: got {args.data}; allowed: a file of more than --length {args.length} bytes")
    return args


if __name__ == "__main__":
    train(parse_args(None))
