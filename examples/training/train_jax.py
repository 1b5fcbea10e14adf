"""Train the small MoE language model in JAX on a mesh of data x experts: GPUs, or parts of the CPU.

    python -m examples.training.train_jax --ep 2 --recipe mxfp8 --out runs/jax  # one process with all devices
    python -m examples.training.train_jax --dp 2 --ep 2 --out runs/jax  # two groups of two expert ranks
    python -m examples.training.train_jax --preset h200 --recipe mxfp8 --out runs/h200  # one process, one GPU

One process per GPU, the same command with another --process-id in each; the first process is the coordinator:

    python -m examples.training.train_jax --ep 2 --out runs/jax \\
        --coordinator localhost:1234 --num-processes 2 --process-id 0

The batch is split over all devices, the experts over the devices of a group; dense weights are whole on each. The loss
is a mean over the global batch, and JAX reduces every gradient: the step is `jax.jit` and shardings alone. `Options`
adds the usual features of JAX programs of this kind: remat, a scan over layers, accumulation, sharded checkpoints, a
profile.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import tree_utils

from . import model_jax
from .checkpoint import Arrays, Checkpoint, step_folders
from .config import Config, is_decayed, is_expert, learning_rates
from .data import Text
from .flags import parse_args, parser
from .lock import locked
from .loop import train
from .model_jax import REMAT, STACKED, Params, stacked, unstacked
from .weights import weight_shapes

PROG = "examples.training.train_jax"
BATCH = P(("data", "expert"))
SHARDED = "sharded"
"""The folder of sharded checkpoints in --out."""


@dataclass(frozen=True)
class Options:
    """dp: groups of expert ranks. remat: a key of `model_jax.REMAT`. scan_layers: one scan over stacked weights.
    accumulate: parts of a batch, one after the other, whose gradients are added. sharded: checkpoints by Orbax.
    profile: the folder of a profile of the third step."""

    dp: int = 1
    remat: str = "none"
    scan_layers: bool = False
    accumulate: int = 1
    sharded: bool = False
    profile: Path | None = None


def mesh_of(dp: int, ep: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: dp * ep]).reshape(dp, ep), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def spec(name: str) -> P:
    """Sharding of a weight, its gradient and its moments: experts along their first dim, after the dim of layers."""
    if not is_expert(name):
        return P()
    return P(None, "expert") if name.startswith(STACKED) else P("expert")


def shapes_of(config: Config, scan_layers: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, stacked or not."""
    shapes = weight_shapes(config)
    if not scan_layers:
        return shapes
    found = {}
    for name, shape in shapes.items():
        if not name.startswith("blocks."):
            found[name] = shape
        elif name.startswith("blocks.0."):
            found[name.replace("blocks.0.", STACKED)] = (config.num_layers, *shape)
    return found


def optimizer(config: Config, scan_layers: bool = False) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW with a table of learning rates."""
    shapes = shapes_of(config, scan_layers)
    rates = jnp.asarray(learning_rates(config))
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            lambda count: rates[count],
            b1=config.beta1,
            b2=config.beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            mask={name: is_decayed(shape[name.startswith(STACKED) :]) for name, shape in shapes.items()},
        ),
    )


class Trainer:
    """Parameters, optimizer state, and two compiled functions: training step and held-out loss."""

    def __init__(
        self, config: Config, recipe: str, ep: int, start: Checkpoint, device: str, options: Options = Options()
    ) -> None:
        self.is_writer, self.on_gpu, self.options = jax.process_index() == 0, device == "gpu", options
        self.mesh, self.steps_done = mesh_of(options.dp, ep), 0
        self.params: Params = self.place(start.weights)
        self.optimizer = optimizer(config, options.scan_layers)
        # A leaf has the sharding that the step returns; otherwise the second call compiles again.
        # A leaf has its own buffer; otherwise it cannot be donated.
        count = self.on_mesh(np.array(start.step, np.int32), P())
        state = tree_utils.tree_set(
            self.optimizer.init(self.params), count=count, mu=self.place(start.first), nu=self.place(start.second)
        )
        self.opt_state: optax.OptState = jax.tree.map(jnp.copy, state)
        loss = partial(model_jax.loss, config=config, recipe=recipe, mesh=self.mesh, batch=BATCH, remat=options.remat)

        def objective(params: Params, tokens: Array) -> tuple[Array, dict[str, Array]]:
            cross_entropy, aux_loss = loss(params, tokens)
            return cross_entropy + config.aux_loss_weight * aux_loss, {"loss": cross_entropy, "aux_loss": aux_loss}

        gradient = partial(accumulated, jax.grad(objective, has_aux=True), options.accumulate)

        # Parameters and moments stay where they are; every process reads the values.
        everywhere = NamedSharding(self.mesh, P())
        placed = jax.tree.map(lambda leaf: leaf.sharding, (self.params, self.opt_state))

        @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placed, everywhere))
        def step(
            params: Params, opt_state: optax.OptState, tokens: Array
        ) -> tuple[optax.Params, optax.OptState, dict[str, Array]]:
            grads, values = gradient(params, tokens)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            values["grad_norm"] = optax.global_norm(grads)
            return optax.apply_updates(params, updates), opt_state, values

        self._step = step
        self._eval = jax.jit(lambda params, tokens: loss(params, tokens)[0], out_shardings=everywhere)
        self._replicate = jax.jit(lambda x: x, out_shardings=everywhere)

    @property
    def device_name(self) -> str:
        return jax.local_devices()[0].device_kind if self.on_gpu else "cpu"

    def peak_nbytes(self) -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    def on_mesh(self, array: np.ndarray, spec: P) -> Array:
        """Copy an array that every process has to the devices. Each process copies the parts of its own."""
        return jax.make_array_from_callback(array.shape, NamedSharding(self.mesh, spec), lambda part: array[part])

    def place(self, arrays: Arrays) -> Params:
        """Copy unsharded arrays to the devices, sharded by `spec`. Arrays of a sharded checkpoint are on the devices
        already. A copy owns its memory and can be donated."""
        if any(isinstance(array, Array) for array in arrays.values()):
            return {name: jnp.copy(array) for name, array in arrays.items()}
        arrays = stacked(arrays) if self.options.scan_layers else arrays
        return {name: jnp.copy(self.on_mesh(array, spec(name))) for name, array in arrays.items()}

    def tokens(self, batch: np.ndarray) -> Array:
        """A global batch, sharded by sequence."""
        return self.on_mesh(batch, BATCH)

    def step(self, step: int, batch: np.ndarray) -> Mapping[str, Array]:
        """One update. Returns loss and aux_loss over all devices, and the norm of the gradient."""
        profile = self.options.profile if self.steps_done == 2 else None  # the first steps compile and warm up
        self.steps_done += 1
        with jax.profiler.trace(profile) if profile else nullcontext():
            self.params, self.opt_state, values = self._step(self.params, self.opt_state, self.tokens(batch))
            return jax.block_until_ready(values) if profile else values

    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        total, count = 0.0, 0
        for batch in text.eval_batches():
            total += float(self._eval(self.params, self.tokens(batch))) * len(batch)
            count += len(batch)
        return total / count

    def state(self, step: int) -> Checkpoint | None:
        """Weights and moments after `step` updates: sharded as on the mesh if checkpoints are sharded, else unsharded,
        and None in processes that do not write them.

        Collective: every process calls it."""
        trees: Any = (self.params, tree_utils.tree_get(self.opt_state, "mu"), tree_utils.tree_get(self.opt_state, "nu"))
        if self.options.sharded:
            return Checkpoint(step, *trees)
        arrays: list[dict[str, np.ndarray]] = [{}, {}, {}]
        for tree, found in zip(trees, arrays, strict=True):
            for name, array in tree.items():
                whole = self._replicate(array)
                if self.is_writer:
                    found[name] = np.asarray(whole)
        return Checkpoint(step, *map(unstacked, arrays)) if self.is_writer else None


def accumulated(
    gradient: Callable[..., Any], parts: int, params: Params, tokens: Array
) -> tuple[Params, dict[str, Array]]:
    """The mean of `gradient` over parts of the batch. Every device has rows of each part."""
    if parts == 1:
        return gradient(params, tokens)
    of_parts = tokens.reshape(-1, parts, tokens.shape[1]).swapaxes(0, 1)

    def add(total: Any, part: Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradient(params, part)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, params, of_parts[0]))
    total, _ = jax.lax.scan(add, zeros, of_parts)
    return jax.tree.map(lambda x: x / parts, total)


def add_option_flags(flags: argparse.ArgumentParser) -> None:
    group = flags.add_argument_group("the JAX program")
    group.add_argument("--remat", choices=tuple(REMAT), default="none", help="activations that backward recomputes")
    group.add_argument("--scan-layers", action="store_true", help="one scan over stacked weights: compiles one layer")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="parts of a batch, one after the other")
    group.add_argument("--sharded-checkpoints", action="store_true", help="by Orbax, in --out/sharded")
    group.add_argument("--profile", type=Path, metavar="DIR", help="write a profile of the third step")


def add_process_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--dp", type=int, default=1, metavar="N", help="number of groups of --ep ranks (default: 1)")
    group = flags.add_argument_group("several processes (jax.distributed)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--num-processes", type=int, default=1, metavar="N")
    group.add_argument("--process-id", type=int, default=0, metavar="I", help="0 to N - 1")
    group.add_argument(
        "--local-devices", type=int, nargs="+", metavar="I", help="GPUs of this process (default: all it sees)"
    )


def check_groups(flags: argparse.ArgumentParser, args: argparse.Namespace, config: Config) -> None:
    """Exit unless the batches divide by the devices."""
    if args.dp < 1 or any(n % (args.dp * args.ep) for n in (config.batch_size, config.eval_sequences)):
        allowed = f"with --ep {args.ep}, divisors of {config.batch_size} training and {config.eval_sequences} held-out"
        flags.error(f"--dp: got {args.dp}; allowed: {allowed} sequences")
    if args.accumulate < 1 or config.batch_size % (args.dp * args.ep * args.accumulate):
        allowed = f"divisors of {config.batch_size // (args.dp * args.ep)} sequences per device and step"
        flags.error(f"--accumulate: got {args.accumulate}; allowed: {allowed}")


def check_kind_of_checkpoints(flags: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit if a run that is resumed has checkpoints of the other kind."""
    others = sorted((args.out / SHARDED).glob("[0-9]*"))
    if args.sharded_checkpoints:
        others = step_folders(args.out)
    if args.resume and others:
        got = "given" if args.sharded_checkpoints else "not given"
        flags.error(f"--sharded-checkpoints: {got} with --resume, and the run has {others[-1]}; allowed: as it began")


def check_processes(flags: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit on flags of processes that do not fit each other."""
    if not 0 <= args.process_id < args.num_processes:
        flags.error(f"--process-id: got {args.process_id}; allowed: 0 to {args.num_processes - 1}")
    devices = args.dp * args.ep
    if devices % args.num_processes:
        flags.error(f"--num-processes: got {args.num_processes}; allowed: divisors of {devices} ranks, --dp x --ep")
    if (args.coordinator is None) != (args.num_processes == 1):
        got = f"{args.coordinator} with --num-processes {args.num_processes}"
        flags.error(f"--coordinator: got {got}; allowed: HOST:PORT with several processes, nothing with one")
    if args.local_devices and args.num_processes == 1:
        flags.error(f"--local-devices: got {args.local_devices} with one process; allowed: with --num-processes")


def start_processes(args: argparse.Namespace) -> None:
    """Join the processes, before JAX finds its devices."""
    # JAX reads these settings when it makes its backends, so they take effect after the import.
    if args.device:
        jax.config.update("jax_platforms", "cpu" if args.device == "cpu" else "cuda,cpu")
    jax.config.update("jax_num_cpu_devices", args.dp * args.ep // args.num_processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.num_processes > 1:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id, args.local_devices)


def find_device(ranks: int, requested: str | None) -> str:
    """JAX's default backend, "cpu" or "gpu". Exits where the requested GPU is missing or the devices are too few."""
    try:
        found, count = jax.default_backend(), len(jax.devices())
    except RuntimeError as error:
        sys.exit(f"{PROG}: error: --device: got {requested}: {error}; allowed: cpu, or a device that JAX finds")
    # JAX goes on without a GPU if its plugin finds no driver.
    if found != (requested or found) or found not in ("cpu", "gpu"):
        sys.exit(
            f"{PROG}: error: --device: got {requested}, and JAX finds {found}; allowed: cpu, or gpu where JAX has one"
        )
    # Every process takes part in every collective, so each device of several processes is a rank.
    processes = jax.process_count()
    if count < ranks or (processes > 1 and count != ranks):
        hint = f" of {processes} processes; --local-devices sets the devices of each" if processes > 1 else ""
        sys.exit(f"{PROG}: error: --ep: got {ranks} with {count} {found} device(s){hint}; allowed: one device per rank")
    return found


def of_process_0(value: bool) -> bool:
    """The value of process 0, in every process. A collective."""
    return bool(multihost_utils.broadcast_one_to_all(np.array(value, np.int32)))


def sharded_checkpoints(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """`load` and `save` of the loop, if the flags ask for sharded checkpoints."""
    if not args.sharded_checkpoints:
        return {}
    from .sharded_checkpoint import ShardedCheckpoints  # Orbax, which other runs do not need

    mesh, shapes = mesh_of(args.dp, args.ep), shapes_of(config, args.scan_layers)
    orbax = ShardedCheckpoints(
        args.out / SHARDED, shapes, lambda name: NamedSharding(mesh, spec(name)), args.scan_layers
    )
    return {"load": orbax.load, "save": orbax.save}


def read_flags(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The command line of this program. Exits with the reason on a bad flag."""
    flags = parser(PROG)
    add_option_flags(flags)
    add_process_flags(flags)
    args, config = parse_args(flags, argv)
    check_groups(flags, args, config)
    check_kind_of_checkpoints(flags, args)
    check_processes(flags, args)
    return args, config


def main(argv: Sequence[str] | None = None) -> None:
    args, config = read_flags(argv)
    start_processes(args)
    args.device = find_device(args.dp * args.ep, args.device)
    if args.device == "gpu" and config.dense_dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # a GPU's default is TF32; PyTorch's is fp32
    options = Options(args.dp, args.remat, args.scan_layers, args.accumulate, args.sharded_checkpoints, args.profile)
    with locked(PROG, args, jax.process_index() == 0, of_process_0):
        train("jax", args, config, partial(Trainer, options=options), **sharded_checkpoints(args, config))


if __name__ == "__main__":
    main()
