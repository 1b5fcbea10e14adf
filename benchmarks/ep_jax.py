"""`python -m benchmarks ep_jax`: the layer of `python -m benchmarks ep` in JAX, one process with all GPUs.

    moe.sharded_apply under jit     recipe | bf16, the same layer without quantization
    the same with a capacity        of 1.25 times the mean rows; for balanced rows, none of which it drops
    a token once to each rank       deduplicate="dispatch" and "both"
    rounds, the default             transport=PeerMemory(...)
    with and without a capacity     the same in one round

No plain layer is measured: `jax.lax.ragged_dot` writes dense operands, 30 GB for one product of the larger layer. A
process for two devices of a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=2.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.launch import fail
from mxep.jax_frontend import MoEConfig, PeerMemory, RouterConfig, moe

from .cases.chosen_experts import ROUTINGS, logits
from .cases.ep.ep_layer import H200, MIN_SQNR_DB, TINY
from .cases.moe_layer import OUTPUTS, flops
from .cases.shapes import MoELayer
from .clocks import device_timing
from .figures.results import Line

RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp")
PEER, AXIS = "bf16", "expert"
HOWS: dict[str, dict[str, Any]] = {
    "jit": {},
    "jit, capacity": {"capacity_factor": 1.25},
    "jit, deduplicate dispatch": {"deduplicate": "dispatch"},
    "jit, deduplicate both": {"deduplicate": "both"},
    "jit, peer memory, in rounds": {},
    "jit, peer memory": {"on_overflow": "nan"},
    "jit, peer memory, capacity": {"capacity_factor": 1.25, "on_overflow": "nan"},
}
"""Fields of MoEConfig; the transport is a PeerMemory where the name says it."""
WAYS = {
    "all_to_all": ("jit", "jit, capacity"),
    "deduplicate": ("jit, deduplicate dispatch", "jit, deduplicate both"),
    "peer_memory": ("jit, peer memory, in rounds", "jit, peer memory", "jit, peer memory, capacity"),
}
"""Names of `--only` and what they select."""
STEPS = {"ep_layer_fwd": "moe_layer_fwd", "ep_layer_fwd_bwd": "moe_layer_fwd_bwd"}
SIZES = {f"{shape.dim}/{shape.hidden_dim}": shape for shape in (*H200, *TINY)}
NAMES = (*RECIPES, *SIZES, *WAYS)


def lines(only: Sequence[str], routing: str = "balanced") -> Iterator[Line]:
    """only: names of recipes, sizes and ways; of a sort that is not named all. routing: of ROUTINGS, as in ep.py."""
    if routing not in ROUTINGS:
        fail(ValueError, "ep_jax", "routing", routing, f"allowed: {', '.join(ROUTINGS)}")
    hows = [how for way in WAYS if way in only or not set(only) & set(WAYS) for how in WAYS[way]]
    if routing != "balanced":  # without a capacity, which drops rows
        hows = [how for how in hows if "capacity" not in how]
    here = H200 if jax.default_backend() == "gpu" else TINY
    for name, shape in SIZES.items():
        if shape in here and (name in only or not set(only) & set(SIZES)):
            inputs = _Inputs(shape, routing)
            for recipe in (r for r in RECIPES if r in only or not set(only) & set(RECIPES)):
                for how in (how for how in HOWS if how in hows):
                    yield from inputs.lines(recipe, how)


def ranks() -> int:
    """The GPUs of this machine; two devices of a CPU."""
    devices = jax.devices()
    if len(devices) < 2:
        fail(RuntimeError, "ep_jax", "devices", len(devices), "allowed: at least 2")
    return len(devices) if jax.default_backend() == "gpu" else 2


class _Inputs:
    """x, dy (ranks T, D) bf16 and the parameters, on a mesh of all ranks; the values of cases/ep_layer.py's kind."""

    def __init__(self, shape: MoELayer, routing: str) -> None:
        self.shape, self.routing, self.ranks = shape, routing, ranks()
        t, d, _, e, k = shape
        auto = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((self.ranks,), (AXIS,), auto, devices=jax.devices()[: self.ranks])
        self.memory = PeerMemory(self.mesh, AXIS)
        of_ranks = [jnp.asarray(logits(routing, t, e, k, rank)) for rank in range(self.ranks)]
        of_tokens, config = NamedSharding(self.mesh, P(AXIS)), self.config("mxfp8")

        def draw(key: jax.Array, chosen: jax.Array) -> tuple[Any, ...]:
            x, dy = (jax.random.normal(k, (self.ranks * t, d), jnp.bfloat16) for k in jax.random.split(key))
            params = moe.init(key, config, jnp.bfloat16)
            params["router"] = jnp.eye(e, d, dtype=jnp.bfloat16)
            return x.at[:, :e].set(chosen.astype(jnp.bfloat16)), dy, params

        of_params = jax.tree.map(partial(NamedSharding, self.mesh), moe.specs(config, expert_axis=AXIS))
        made = jax.jit(draw, out_shardings=(of_tokens, of_tokens, of_params))
        self.x, self.dy, self.params = made(jax.random.key(0), jnp.concatenate(of_ranks))

    def config(self, recipe: str, how: str = "jit") -> MoEConfig:
        _, d, f, e, k = self.shape
        transport = self.memory if "peer memory" in how else None
        return MoEConfig(d, f, e, RouterConfig(k), recipe=recipe, transport=transport, **HOWS[how])

    def program(self, recipe: str, how: str, op: str) -> Callable[..., tuple[jax.Array, ...]]:
        """The compiled step: y, and with the backward the gradients of x, router, w1, w3 and w2."""
        config = self.config(recipe, how)

        def layer(x: jax.Array, params: Any) -> jax.Array:
            return moe.sharded_apply(params, x, config, tokens=P(AXIS), expert_axis=AXIS, mesh=self.mesh)[0]

        def both(x: jax.Array, params: Any, dy: jax.Array) -> tuple[jax.Array, ...]:
            y, vjp = jax.vjp(layer, x, params)
            dx, of_params = vjp(dy)
            experts = of_params["experts"]
            return y, dx, of_params["router"], experts["w1"], experts["w3"], experts["w2"]

        step = both if op == "ep_layer_fwd_bwd" else lambda x, params, dy: (layer(x, params),)
        return jax.jit(step).lower(self.x, self.params, self.dy).compile()

    def lines(self, recipe: str, how: str) -> Iterator[Line]:
        """A dropped row is an error of its token: too few dB."""
        arguments = self.x, self.params, self.dy
        for op, of_one in STEPS.items():
            programs = {recipe: self.program(recipe, how, op), PEER: self.program(PEER, how, op)}
            db = _sqnr_db(*(programs[name](*arguments) for name in (recipe, PEER)))
            least = min(db, key=lambda name: db[name])
            if not all(found >= MIN_SQNR_DB for found in db.values()):
                raise AssertionError(f"ep_jax: {recipe}: {db} dB from bf16; expected {MIN_SQNR_DB} or more")
            timed: dict[str, device_timing.Step] = {
                name: (partial(program, *arguments), device_timing.jax_end) for name, program in programs.items()
            }
            samples = device_timing.in_a_row(timed)
            ours, theirs = samples[recipe], samples[PEER]
            peaks = [_peak_nbytes(programs[name]) for name in (recipe, PEER)] if op.endswith("bwd") else [None, None]
            yield Line(
                op=op,
                frontend="jax",
                case={**self.shape._asdict(), "ranks": self.ranks, "routing": self.routing, "recipe": recipe,
                      "how": how},
                us=ours.us,
                spread=ours.spread,
                n=ours.n,
                nbytes=0,
                flops=flops(self.shape, of_one),
                of_roof=None,
                roof=None,
                peer="bf16_recipe",
                peer_us=theirs.us,
                ratio=round(theirs.us / ours.us, 3),
                peak_nbytes=peaks[0],
                error={"grade": "sqnr_db", "sqnr_db": db[least], "of": least},
                peer_peak_nbytes=peaks[1],
            )  # fmt: skip


@jax.jit
def _sums(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of squares of `want` and of the difference, row by row and then together."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.square(want).sum(-1).sum(), jnp.square(got - want).sum(-1).sum()


def _sqnr_db(got: Sequence[jax.Array], want: Sequence[jax.Array]) -> dict[str, float]:
    sums = {name: _sums(a, b) for name, a, b in zip(OUTPUTS, got, want, strict=False)}
    return {name: round(float(10 * jnp.log10(signal / noise)), 1) for name, (signal, noise) in sums.items()}


def _peak_nbytes(program: Any) -> int | None:
    """Of XLA's outputs and temporaries on a device."""
    memory = program.memory_analysis()
    return memory and memory.temp_size_in_bytes + memory.output_size_in_bytes
