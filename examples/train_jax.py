"""Train the small MoE language model in JAX on a mesh of data x experts: GPUs, or parts of the CPU.

    python -m examples.train_jax --ep 2 --recipe mxfp8 --out runs/jax             # one process with all devices
    python -m examples.train_jax --dp 2 --ep 2 --out runs/jax                     # two groups of two expert ranks
    python -m examples.train_jax --preset h200 --recipe mxfp8 --out runs/h200     # one process, one GPU

One process per GPU, the same command with another --process-id in each; the first process is the coordinator:

    python -m examples.train_jax --ep 2 --out runs/jax --coordinator localhost:1234 --num-processes 2 --process-id 0

The batch is split over all devices, the experts over the devices of a group; dense weights are whole on each. The loss
is a mean over the global batch, and JAX reduces every gradient: the step is `jax.jit` and shardings alone.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import tree_utils

from . import model_jax
from .checkpoint import Arrays, Checkpoint
from .config import Config, is_decayed, is_expert, learning_rates
from .data import Text
from .flags import parse_args, parser
from .loop import train
from .model_jax import Params
from .weights import weight_shapes

PROG = "examples.train_jax"
BATCH = P(("data", "expert"))


def spec(name: str) -> P:
    """Sharding of a weight, its gradient and its moments: experts along their first dim."""
    return P("expert") if is_expert(name) else P()


def optimizer(config: Config) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW with a table of learning rates."""
    rates = jnp.asarray(learning_rates(config))
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            lambda count: rates[count],
            b1=config.beta1,
            b2=config.beta2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            mask={name: is_decayed(shape) for name, shape in weight_shapes(config).items()},
        ),
    )


class Trainer:
    """Parameters, optimizer state, and two compiled functions: training step and held-out loss."""

    def __init__(self, config: Config, recipe: str, ep: int, start: Checkpoint, device: str, dp: int = 1) -> None:
        self.is_writer, self.on_gpu = jax.process_index() == 0, device == "gpu"
        devices = np.array(jax.devices()[: dp * ep]).reshape(dp, ep)
        self.mesh = Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
        self.params: Params = self.place(start.weights)
        self.optimizer = optimizer(config)
        # A leaf has the sharding that the step returns; otherwise the second call compiles again.
        # A leaf has its own buffer; otherwise it cannot be donated.
        count = self.on_mesh(np.array(start.step, np.int32), P())
        state = tree_utils.tree_set(
            self.optimizer.init(self.params), count=count, mu=self.place(start.first), nu=self.place(start.second)
        )
        self.opt_state: optax.OptState = jax.tree.map(jnp.copy, state)
        loss = partial(model_jax.loss, config=config, recipe=recipe, mesh=self.mesh, batch=BATCH)

        def objective(params: Params, tokens: Array) -> tuple[Array, dict[str, Array]]:
            cross_entropy, aux_loss = loss(params, tokens)
            return cross_entropy + config.aux_loss_weight * aux_loss, {"loss": cross_entropy, "aux_loss": aux_loss}

        # Parameters and moments stay where they are; every process reads the values.
        everywhere = NamedSharding(self.mesh, P())
        placed = jax.tree.map(lambda leaf: leaf.sharding, (self.params, self.opt_state))

        @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placed, everywhere))
        def step(
            params: Params, opt_state: optax.OptState, tokens: Array
        ) -> tuple[optax.Params, optax.OptState, dict[str, Array]]:
            grads, values = jax.grad(objective, has_aux=True)(params, tokens)
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
        """Copy unsharded arrays to the devices, sharded by `spec`. A copy owns its memory and can be donated."""
        return {name: jnp.copy(self.on_mesh(array, spec(name))) for name, array in arrays.items()}

    def tokens(self, batch: np.ndarray) -> Array:
        """A global batch, sharded by sequence."""
        return self.on_mesh(batch, BATCH)

    def step(self, step: int, batch: np.ndarray) -> Mapping[str, Array]:
        """One update. Returns loss and aux_loss over all devices, and the norm of the gradient."""
        self.params, self.opt_state, values = self._step(self.params, self.opt_state, self.tokens(batch))
        return values

    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        total, count = 0.0, 0
        for batch in text.eval_batches():
            total += float(self._eval(self.params, self.tokens(batch))) * len(batch)
            count += len(batch)
        return total / count

    def state(self, step: int) -> Checkpoint | None:
        """Unsharded weights and moments after `step` updates, None in processes that do not write them.

        Collective: every process calls it."""
        trees = (self.params, tree_utils.tree_get(self.opt_state, "mu"), tree_utils.tree_get(self.opt_state, "nu"))
        arrays: list[dict[str, np.ndarray]] = [{}, {}, {}]
        for tree, found in zip(trees, arrays, strict=True):
            for name, array in tree.items():
                whole = self._replicate(array)
                if self.is_writer:
                    found[name] = np.asarray(whole)
        return Checkpoint(step, *arrays) if self.is_writer else None


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


def start_processes(flags: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Join the processes, before JAX finds its devices. Exits on flags that do not fit each other."""
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
    # JAX reads these settings when it makes its backends, so they take effect after the import.
    if args.device:
        jax.config.update("jax_platforms", "cpu" if args.device == "cpu" else "cuda,cpu")
    jax.config.update("jax_num_cpu_devices", devices // args.num_processes)
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
        hint = f" of {processes} processes; --local-devices chooses those of a process" if processes > 1 else ""
        sys.exit(f"{PROG}: error: --ep: got {ranks} with {count} {found} device(s){hint}; allowed: one device per rank")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(PROG)
    add_process_flags(flags)
    args, config = parse_args(flags, argv)
    check_groups(flags, args, config)
    start_processes(flags, args)
    args.device = find_device(args.dp * args.ep, args.device)
    if args.device == "gpu" and config.dense_dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # a GPU's default is TF32; PyTorch's is fp32
    train("jax", args, config, partial(Trainer, dp=args.dp))


if __name__ == "__main__":
    main()
