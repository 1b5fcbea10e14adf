"""A training step of a model in JAX, as training.py has it in torch: the same tokens, sizes and kinds of weights.

    ids (S, L + 1) --layers--> hidden --scan, one sequence at a time: head, loss, their gradients--> gradient of hidden
        --backward of the layers--> gradients, added to the donated ones
    gradients --clipping--> AdamW of optax, its moments in bf16 as the weights, its arithmetic in fp32

Two programs: of a micro-batch, one for each candidate, and of the update, which all candidates share with the weights,
the gradients and the moments. They are compiled from shapes, before the arrays are there: XLA's autotuning takes
memory. Kernels are launched one by one: in a CUDA graph the profiler gives no names. They take long enough to be
launched ahead.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .model_jax import Params, Products, Sizes, draw, hidden, named, named_shapes, shapes, sizes_of
from .sizes import Model
from .text import text_of_library, token_ids
from .training import MAX_NORM, Batches

WEIGHT_DECAY = 0.01  # torch's default
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
BYTES_OF_MOMENTS = 4  # of a weight


class Stepped(NamedTuple):
    """The results of a step. losses: of the micro-batches, fp32; norm: of the gradients, computed last."""

    losses: tuple[Array, ...]
    norm: Array


def head_and_loss(rows: Array, head: Array, labels: Array, scale: float) -> Array:
    """rows (L, D), head (D, V), labels (L,) -> the sum of the losses times `scale`, in fp32."""
    logits = jnp.dot(rows, head).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum() * scale


def micro_batch(
    params: Params, grads: Params, ids: Array, sizes: Sizes, products: Products, tokens: int, attention: str
) -> tuple[Params, Array]:
    """ids (S, L + 1) -> the gradients with this micro-batch's, and its part of the mean loss of `tokens` tokens."""
    inputs, labels = ids[:, :-1], ids[:, 1:]
    head = params["head"]
    layers = {name: of for name, of in params.items() if name != "head"}
    rows, backward = jax.vjp(lambda p: hidden(p, inputs, sizes, products, attention), layers)

    def of_sequence(total: Array, sequence: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        loss = partial(head_and_loss, labels=sequence[1], scale=1 / tokens)
        value, (d_rows, d_head) = jax.value_and_grad(loss, (0, 1))(sequence[0], head)
        return total + d_head, (value, d_rows)

    with jax.named_scope("head and loss"):
        of_head, (losses, d_rows) = jax.lax.scan(of_sequence, grads["head"], (rows, labels))
    (found,) = backward(d_rows)
    of_layers = {name: of for name, of in grads.items() if name != "head"}
    return {**jax.tree.map(jnp.add, of_layers, found), "head": of_head}, losses.sum()


def _in_fp32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, tree)


def update(params: Params, grads: Params, moments: Any, lr: Array) -> tuple[Params, Params, Any, Array]:
    """Weights, zeros, moments and the norm of the gradients.

    Arithmetic in fp32: in bf16 the decay of the second moment, 0.999, is 1.
    """
    clip, adam = optax.clip_by_global_norm(MAX_NORM), optax.adamw(lr, weight_decay=WEIGHT_DECAY)
    with jax.named_scope("clipping"):
        wide = _in_fp32(grads)
        norm = optax.tree.norm(wide)
        clipped, _ = clip.update(wide, clip.init(params))
    with jax.named_scope("optimizer"):
        steps, new = adam.update(clipped, _in_fp32(moments), _in_fp32(params))
        stored = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), new, moments)
        updated = jax.tree.map(lambda p, step: (p.astype(jnp.float32) + step).astype(p.dtype), params, steps)
        return updated, jax.tree.map(jnp.zeros_like, grads), stored, norm


def _moments(params: Params) -> Any:
    return optax.adamw(0.0, weight_decay=WEIGHT_DECAY).init(params)


class Training:
    """A model of so many layers, its programs and its tokens; `restart` makes its arrays."""

    def __init__(self, model: Model, layers: int, batches: Batches, attention: str) -> None:
        """attention: the implementation of `jax.nn.dot_product_attention`."""
        self.config, self.batches, self.attention = model.config(layers), batches, attention
        self.sizes, self.published_layers = sizes_of(self.config), model.layers
        needed = batches.steps * batches.micro_batches * batches.sequences * (batches.length + 1)
        ids = token_ids(text_of_library(needed), self.sizes.vocabulary).astype("int32")
        parts = ids.reshape(batches.steps, batches.micro_batches, batches.sequences, batches.length + 1)
        self.ids = [[jnp.asarray(part) for part in of_step] for of_step in parts]
        self.programs: dict[str, jax.stages.Compiled] = {}
        self.params: Any = None
        self.grads: Any = None
        self.moments: Any = None
        self.steps, self.lr = 0, jnp.float32(0)

    def _arguments(self) -> tuple[Params, Params]:
        """Shapes and dtypes of the weights and of the gradients."""
        array = lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
        params = jax.tree.map(array, shapes(self.sizes), is_leaf=lambda leaf: isinstance(leaf, tuple))
        return params, params

    def trace(self, products: Products) -> jax.stages.Traced:
        """The program of a micro-batch."""
        run = partial(micro_batch, sizes=self.sizes, products=products, tokens=self.batches.tokens,
                      attention=self.attention)  # fmt: skip
        return jax.jit(run, donate_argnums=1).trace(*self._arguments(), self.ids[0][0])

    def compile(self, candidates: Mapping[str, Products]) -> None:
        """The programs of the candidates, and of the update, which is named ""."""
        for name, products in candidates.items():
            self.programs[name] = self.trace(products).lower().compile(COMPILER_OPTIONS)
        params, grads = self._arguments()
        step = jax.jit(update, donate_argnums=(0, 1, 2))
        self.programs[""] = step.lower(params, grads, jax.eval_shape(_moments, params), self.lr).compile(
            COMPILER_OPTIONS
        )

    @property
    def weights(self) -> dict[str, int]:
        """The number of each weight's elements."""
        return {name: jax.tree.reduce(lambda a, b: a * b, shape) for name, shape in named_shapes(self.sizes).items()}

    def temporaries(self, name: str) -> int:
        """Bytes that a program takes besides its arguments and results."""
        return self._memory(name).temp_size_in_bytes

    def _memory(self, name: str) -> Any:
        return self.programs[name].memory_analysis()

    def peak_nbytes(self, name: str) -> int:
        """Of a step, by XLA's plan: everything that is held, and the temporaries of its larger program."""
        found = []
        for program, moments in ((name, BYTES_OF_MOMENTS * sum(self.weights.values())), ("", 0)):
            m = self._memory(program)
            size = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
            found.append(size + moments)
        return max(found)

    def restart(self, lr: float) -> None:
        """The first weights, moments of zeros, no gradients, the first tokens."""
        self.params = self.grads = self.moments = None
        self.params = draw(self.sizes, self.published_layers)
        self.grads = jax.tree.map(jnp.zeros_like, self.params)
        self.moments = _moments(self.params)
        self.steps, self.lr = 0, jnp.float32(lr)

    def accumulate(self, name: str, micro_batches: int | None = None) -> tuple[Array, ...]:
        """The losses of the micro-batches of a step; their gradients are added up."""
        losses = []
        for ids in self.ids[self.steps % self.batches.steps][:micro_batches]:
            self.grads, loss = self.programs[name](self.params, self.grads, ids)
            losses.append(loss)
        return tuple(losses)

    def update(self) -> Array:
        """Clip the gradients, change the weights, write zeros to the gradients; their norm before."""
        self.params, self.grads, self.moments, norm = self.programs[""](self.params, self.grads, self.moments, self.lr)
        self.steps += 1
        return norm

    def step(self, name: str) -> Stepped:
        """An optimizer step of a candidate."""
        return Stepped(self.accumulate(name), self.update())

    def gradients(self, name: str) -> dict[str, Array]:
        """Of the first micro-batch, by weight; no gradients are left."""
        self.grads, self.steps = jax.tree.map(jnp.zeros_like, self.params), 0
        self.accumulate(name, 1)
        found, self.grads = self.grads, jax.tree.map(jnp.zeros_like, self.params)
        return named(found)
