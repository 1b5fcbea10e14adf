"""Train the small MoE language model in JAX, experts sharded over the devices of one process.

    python -m examples.train_jax --ep 2 --precision mxfp8 --out runs/jax

Every device holds E / ep experts and all dense weights, and trains on its slice of the batch:

    loss            = mean over devices of the mean over a device's tokens
    dense gradient  = mean over devices (one pmean of the whole tree)
    expert gradient = sum over the tokens of all devices, which arrive by all-to-all, divided by ep
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import tree_utils

from . import model_jax
from .checkpoint import Arrays, Checkpoint
from .config import RECIPES, Config, is_decayed, is_expert, learning_rates, parse_args
from .data import Text
from .loop import train
from .model_jax import Params
from .weights import weight_shapes

PROG = "examples.train_jax"
AXIS = "ep"


def spec(name: str) -> P:
    """Sharding of a weight, its gradient and its moments: experts along their first dim."""
    return P(AXIS) if is_expert(name) else P()


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

    is_writer = True

    def __init__(self, config: Config, precision: str, ep: int, start: Checkpoint) -> None:
        self.mesh = Mesh(np.array(jax.devices()[:ep]), (AXIS,))
        self.params = self.place(start.weights)
        self.optimizer = optimizer(config)
        # A leaf has the sharding that the step returns; otherwise the second call compiles again.
        # A leaf has its own buffer; otherwise it cannot be donated.
        count = jax.device_put(np.int32(start.step), NamedSharding(self.mesh, P()))
        state = tree_utils.tree_set(
            self.optimizer.init(self.params), count=count, mu=self.place(start.first), nu=self.place(start.second)
        )
        self.opt_state = jax.tree.map(jnp.copy, state)
        specs = {name: spec(name) for name in self.params}
        loss = partial(model_jax.loss, config=config, recipe=RECIPES[precision], axis_name=AXIS)

        def device_grads(params: Params, tokens: Array) -> tuple[dict[str, Array], Params]:
            def objective(params: Params) -> tuple[Array, dict[str, Array]]:
                cross_entropy, aux_loss = loss(params, tokens)
                return cross_entropy + config.aux_loss_weight * aux_loss, {"loss": cross_entropy, "aux_loss": aux_loss}

            grads, values = jax.grad(objective, has_aux=True)(params)
            dense = jax.lax.pmean({name: g for name, g in grads.items() if not is_expert(name)}, AXIS)
            experts = {name: g / ep for name, g in grads.items() if is_expert(name)}
            return jax.lax.pmean(values, AXIS), dense | experts

        # check_vma=False: gradients stay per device, and device_grads reduces them over the devices itself.
        sharded = partial(jax.shard_map, mesh=self.mesh, check_vma=False)
        grads_of = sharded(device_grads, in_specs=(specs, P(AXIS)), out_specs=(P(), specs))

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Params, opt_state: optax.OptState, tokens: Array):
            values, grads = grads_of(params, tokens)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            values["grad_norm"] = optax.global_norm(grads)
            return optax.apply_updates(params, updates), opt_state, values

        def device_loss(params: Params, tokens: Array) -> Array:
            return jax.lax.pmean(loss(params, tokens)[0], AXIS)

        self._step = step
        self._eval = jax.jit(sharded(device_loss, in_specs=(specs, P(AXIS)), out_specs=P()))

    def place(self, arrays: Arrays) -> Params:
        """Copy unsharded arrays to the devices, sharded by `spec`."""
        return {
            name: jax.device_put(a, NamedSharding(self.mesh, spec(name)), may_alias=False) for name, a in arrays.items()
        }

    def tokens(self, batch: np.ndarray) -> Array:
        """A global batch, sharded by sequence."""
        return jax.device_put(batch, NamedSharding(self.mesh, P(AXIS)))

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

    def state(self, step: int) -> Checkpoint:
        """Unsharded weights and moments after `step` updates."""
        trees = (self.params, tree_utils.tree_get(self.opt_state, "mu"), tree_utils.tree_get(self.opt_state, "nu"))
        return Checkpoint(step, *({name: np.asarray(a) for name, a in tree.items()} for tree in trees))


def main(argv: Sequence[str] | None = None) -> None:
    args, config = parse_args(PROG, argv)
    # JAX reads both settings when it creates the first array, so they take effect after the import.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.ep)
    train("jax", args, config, Trainer)


if __name__ == "__main__":
    main()
