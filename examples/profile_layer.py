"""A trace of one Mixture-of-Experts layer, forward and backward, for https://ui.perfetto.dev or chrome://tracing.

    python -m examples.profile_layer --out runs/profile                                            # on a CPU
    python -m examples.profile_layer --out runs/profile --device gpu --tokens 16384 --dim 7168 --hidden-dim 2048 \\
        --num-experts 32 --top-k 8
    python -m examples.profile_layer --framework jax --out runs/profile

Writes DIR/torch.json or DIR/jax.json.gz; in PyTorch it prints the time of each step of the layer, and --png draws the
shortest forward and backward. The steps are mxep.route, mxep.dispatch, mxep.experts and mxep.combine, as in
docs/concepts/pipeline.md; the backward has the names of the autograd functions. In JAX they are scopes of the compiled
operations, which XLA's trace of a CPU leaves out.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mxep.core_kernels.policy.recipe import RECIPES

PROG = "examples.profile_layer"
SIZES = {"tokens": 1024, "dim": 256, "hidden_dim": 256, "num_experts": 8, "top_k": 2}
WARM_UP, STEPS = 3, 3


def profile_torch(args: argparse.Namespace) -> Path:
    """Trace the PyTorch layer."""
    import torch
    from mxep.torch_frontend import MoE, RouterConfig
    from torch.profiler import ProfilerActivity, profile, record_function

    device = torch.device("cuda" if args.device == "gpu" else "cpu")
    if args.device == "gpu" and not torch.cuda.is_available():
        sys.exit(f"{PROG}: error: --device: got gpu; allowed: cpu, PyTorch sees no GPU")
    torch.manual_seed(0)
    layer = MoE(
        args.dim, args.hidden_dim, args.num_experts, RouterConfig(args.top_k), recipe=args.recipe, device=device
    )
    x = torch.randn(args.tokens, args.dim, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        y, stats = layer(x)
        (y.float().square().mean() + 0.01 * stats.aux_loss).backward()
        layer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        step()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function("step"):
                step()
    path = args.out / "torch.json"
    profiler.export_chrome_trace(str(path))

    on = "device" if device.type == "cuda" else "cpu"
    times = {event.key: getattr(event, f"{on}_time_total") / STEPS for event in profiler.key_averages()}
    whole = times["step"]
    shown = {name: us for name, us in times.items() if is_step(name)}
    print(f"{'step':28}{on + ' us':>12}{'share':>9}")
    for name, us in ({"step": whole} | shown).items():
        print(f"{name:28}{us:12.1f}{us / whole:9.1%}")
    return path


NAMED_FROM = 0.015
"""An op or a kernel has its name in the picture from this share of a step."""


def draw(trace: Path, title: str) -> Path:
    """A picture of the shortest step of a PyTorch trace: ranges, ops of mxep, and on a GPU its kernels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    step = min((e for e in events if e["name"] == "step" and e["cat"] == "user_annotation"), key=lambda e: e["dur"])
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = [e for e in events if begin <= e["ts"] and e["ts"] + e["dur"] <= end]
    rows = {
        "steps": [e for e in inside if is_step(e["name"]) and not e["cat"].startswith("gpu")],
        "ops": [e for e in inside if e["name"].startswith("mxep::")],
        "kernels": [e for e in inside if e["cat"] == "kernel"],
    }
    rows = {name: found for name, found in rows.items() if found}
    figure, axes = pyplot.subplots(figsize=(12, 1.4 + 1.3 * len(rows)), layout="constrained")
    names = sorted({e["name"] for e in rows["steps"]}, key=lambda n: next(e["ts"] for e in inside if e["name"] == n))
    color = {name: f"C{i % 10}" for i, name in enumerate(names)}
    for y, (row, found) in enumerate(rows.items()):
        spans = [((e["ts"] - begin) / 1e3, e["dur"] / 1e3) for e in found]
        colors = [color.get(e["name"], "0.75") for e in found]
        axes.broken_barh(spans, (y - 0.45, 0.9), facecolors=colors, edgecolor="white", linewidth=0.3)
        for event, (start, width) in zip(found, spans, strict=True):
            if row != "steps" and event["dur"] > NAMED_FROM * (end - begin):
                name = event["name"].removeprefix("mxep::").split("(")[0][:24]
                axes.text(start + width / 2, y, name, rotation=90, fontsize=7, ha="center", va="center")
    for name in names:
        axes.barh(0, 0, color=color[name], label=name.lstrip("_"))  # a legend leaves out names with "_"
    axes.legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1))
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="ms", xlim=(0, (end - begin) / 1e3))
    axes.invert_yaxis()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(trace.with_suffix(".png"), dpi=100)
    pyplot.close(figure)
    return trace.with_suffix(".png")


def is_step(name: str) -> bool:
    """Whether an event is a step of the layer: a range, or an autograd function of the backward."""
    return name.startswith("mxep.") or (name.startswith("_") and name.endswith("Backward"))


def profile_jax(args: argparse.Namespace) -> Path:
    """Trace the JAX layer."""
    import jax
    import jax.numpy as jnp
    from mxep.jax_frontend import MoEConfig, RouterConfig, moe

    if args.device == "gpu" and jax.default_backend() != "gpu":
        sys.exit(f"{PROG}: error: --device: got gpu; allowed: cpu, JAX sees no GPU")
    config = MoEConfig(args.dim, args.hidden_dim, args.num_experts, RouterConfig(args.top_k), recipe=args.recipe)
    with jax.default_device(jax.devices("gpu" if args.device == "gpu" else "cpu")[0]):
        params = moe.init(jax.random.key(0), config)
        x = jax.random.normal(jax.random.key(1), (args.tokens, args.dim), jnp.bfloat16)

        @jax.jit
        @jax.grad
        def step(params, x):
            y, stats = moe.apply(params, x, config)
            return jnp.square(y.astype(jnp.float32)).mean() + 0.01 * stats.aux_loss

        for _ in range(WARM_UP):
            jax.block_until_ready(step(params, x))
        folder = args.out / "jax"
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            for _ in range(STEPS):
                jax.block_until_ready(step(params, x))
    path = args.out / "jax.json.gz"
    shutil.move(max(folder.glob("plugins/profile/*/perfetto_trace.json.gz")), path)
    shutil.rmtree(folder)
    return path


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog=PROG, description="Trace one Mixture-of-Experts layer for Perfetto.")
    flags.add_argument("--framework", choices=("torch", "jax"), default="torch")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--recipe", choices=tuple(RECIPES), default="mxfp8")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR")
    flags.add_argument("--png", action="store_true", help="also draw the shortest step, in PyTorch alone")
    for name, size in SIZES.items():
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, metavar="N", help=f"default: {size}")
    args = flags.parse_args(argv)
    if args.png and args.framework != "torch":
        flags.error("--png: got jax; allowed: --framework torch")
    for name in SIZES:
        if getattr(args, name) < 1:
            flags.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        path = {"torch": profile_torch, "jax": profile_jax}[args.framework](args)
    except ValueError as error:  # sizes that the layer refuses
        sys.exit(f"{PROG}: error: {error}")
    print(f"{path}: open it in https://ui.perfetto.dev")
    if args.png:
        sizes = ", ".join(f"{name} {getattr(args, name)}" for name in SIZES)
        print(draw(path, f"A forward and a backward of the layer on a {args.device.upper()}, {args.recipe}: {sizes}"))


if __name__ == "__main__":
    main()
