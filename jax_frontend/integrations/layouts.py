"""Expert weights as other libraries store them: gate and up in one array, contraction dims last or first.

unpack_expert_weights    gate_up, down [, biases]  -->  w1, w3, w2 [, b1, b3, b2]
pack_expert_weights      w1, w3, w2 [, b1, b3, b2] -->  gate_up, down [, biases]

                                  gate_up        gate and up         options
Mixtral, Qwen-MoE, DeepSeek-V3    (E, 2F, D)     halves              none
Llama 4                           (E, D, 2F)     halves              transposed
GPT-OSS                           (E, D, 2F)     every other column  transposed, interleaved
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ...core_kernels.launch import fail
from ..ops.checks import check_type
from ..ops.shapes import Float

NAMES = ("w1", "w3", "w2", "b1", "b3", "b2")


def unpack_expert_weights(
    gate_up: Float[jax.Array, "E 2F D"],
    down: Float[jax.Array, "E D F"],
    gate_up_bias: Float[jax.Array, "E 2F"] | None = None,
    down_bias: Float[jax.Array, "E D"] | None = None,
    *,
    interleaved: bool = False,
    transposed: bool = False,
) -> dict[str, jax.Array]:
    """Copy packed expert weights into w1, w3 (E, F, D) and w2 (E, D, F), the experts' parameters of `moe`.

    Args:
        gate_up: (E, 2F, D), or (E, D, 2F) if transposed.
        down: (E, D, F), or (E, F, D) if transposed.
        gate_up_bias: (E, 2F), becomes b1 and b3; or None.
        down_bias: (E, D), becomes b2; or None. Both biases or neither.
        interleaved: gate is at even indices of 2F, up at odd ones. Otherwise gate is first, then up.
        transposed: the dims of each matrix are (input, output), as in a product x w.

    Returns:
        The arrays by name.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> gate_up, down = jnp.arange(4.0).reshape(1, 1, 4), jnp.zeros((1, 2, 1))  # E 1, D 1, F 2
        >>> parts = unpack_expert_weights(gate_up, down, interleaved=True, transposed=True)
        >>> parts["w1"].ravel().tolist(), parts["w3"].ravel().tolist()
        ([0.0, 2.0], [1.0, 3.0])

    Source:
        The experts of transformers 5, `is_concatenated` and `is_transposed` of its `use_experts_implementation`.
    """
    op = "unpack_expert_weights"
    _check_options(op, interleaved, transposed)
    for name, w in (("gate_up", gate_up), ("down", down)):
        _check_floating(op, name, w)
        if w.ndim != 3:
            fail(ValueError, op, name, f"shape {w.shape}", "allowed: 3 dims, experts first")
    gate_up, down = (jnp.swapaxes(w, 1, 2) if transposed else w for w in (gate_up, down))
    e, d, f = down.shape
    if gate_up.shape != (e, 2 * f, d):
        got = f"shapes {gate_up.shape} and {down.shape} as (E, N, K)"
        fail(ValueError, op, "gate_up, down", got, "allowed: (E, 2F, D) and (E, D, F); or pass transposed")
    if (gate_up_bias is None) != (down_bias is None):
        fail(ValueError, op, "gate_up_bias, down_bias", "one of them", "allowed: both or neither")
    w1, w3 = _halves(gate_up, interleaved)
    parts = {"w1": w1, "w3": w3, "w2": down}
    if gate_up_bias is not None and down_bias is not None:
        for name, b, n in (("gate_up_bias", gate_up_bias, 2 * f), ("down_bias", down_bias, d)):
            _check_floating(op, name, b)
            if b.shape != (e, n):
                fail(ValueError, op, name, f"shape {b.shape}", f"allowed: ({e}, {n})")
        b1, b3 = _halves(gate_up_bias, interleaved)
        parts |= {"b1": b1, "b3": b3, "b2": down_bias}
    return {name: jnp.asarray(part) for name, part in parts.items()}


def pack_expert_weights(
    parts: Mapping[str, jax.Array], *, interleaved: bool = False, transposed: bool = False
) -> dict[str, jax.Array]:
    """The inverse of `unpack_expert_weights`: "gate_up", "down" and, where there are biases, "gate_up_bias" and
    "down_bias".

    Args:
        parts: w1, w3 (E, F, D), w2 (E, D, F), and b1, b3 (E, F), b2 (E, D) or none of the three, by name; other names
            are left out.
        interleaved: as in `unpack_expert_weights`.
        transposed: as in `unpack_expert_weights`.

    Returns:
        The arrays by name, as `unpack_expert_weights` takes them.

    Raises:
        ValueError: a missing name or other shapes.
        TypeError: dtypes that are no floats.

    Example:
        >>> parts = {"w1": jnp.zeros((1, 2, 1)), "w3": jnp.ones((1, 2, 1)), "w2": jnp.zeros((1, 1, 2))}
        >>> pack_expert_weights(parts)["gate_up"].ravel().tolist()
        [0.0, 0.0, 1.0, 1.0]
    """
    op = "pack_expert_weights"
    _check_options(op, interleaved, transposed)
    biased = any(name in parts for name in NAMES[3:])
    for name in NAMES if biased else NAMES[:3]:
        if name not in parts:
            fail(
                ValueError,
                op,
                "parts",
                f"no {name!r}",
                "allowed: 'w1', 'w3', 'w2', and all of 'b1', 'b3', 'b2' or none",
            )
        _check_floating(op, name, parts[name])
    (e, d, f), w1 = parts["w2"].shape if parts["w2"].ndim == 3 else (0, 0, 0), parts["w1"]
    shapes = {"w1": (e, f, d), "w3": (e, f, d), "w2": (e, d, f), "b1": (e, f), "b3": (e, f), "b2": (e, d)}
    for name in NAMES if biased else NAMES[:3]:
        if parts[name].shape != shapes[name]:
            allowed = f"allowed: {shapes[name]}, by w2's {parts['w2'].shape}"
            fail(ValueError, op, name, f"shape {parts[name].shape}", allowed)
    for gate, up in (("w1", "w3"), ("b1", "b3")) if biased else (("w1", "w3"),):
        if parts[up].dtype != parts[gate].dtype:
            fail(TypeError, op, up, f"dtype {parts[up].dtype}", f"allowed: {parts[gate].dtype}, {gate}'s")
    packed = {"gate_up": _joined(w1, parts["w3"], interleaved), "down": parts["w2"]}
    if transposed:
        packed = {name: jnp.swapaxes(w, 1, 2) for name, w in packed.items()}
    if biased:
        packed |= {"gate_up_bias": _joined(parts["b1"], parts["b3"], interleaved), "down_bias": parts["b2"]}
    return {name: jnp.asarray(part) for name, part in packed.items()}


def _check_floating(op: str, name: str, w: jax.Array) -> None:
    check_type(op, name, w, jax.Array, np.ndarray)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        fail(TypeError, op, name, f"dtype {w.dtype}", "allowed: floating-point dtypes")


def _check_options(op: str, interleaved: bool, transposed: bool) -> None:
    check_type(op, "interleaved", interleaved, bool)
    check_type(op, "transposed", transposed, bool)


def _halves(x: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Gate and up along dim 1."""
    return (x[:, ::2], x[:, 1::2]) if interleaved else (x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :])


def _joined(gate: jax.Array, up: jax.Array, interleaved: bool) -> jax.Array:
    return (
        jnp.stack([gate, up], 2).reshape(gate.shape[0], -1, *gate.shape[2:])
        if interleaved
        else jnp.concatenate([gate, up], 1)
    )
