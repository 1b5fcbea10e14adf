"""Calls with one bad argument, for the fuzz tests of both frontends, and the required form of an error message.

    table of valid calls --draw(seed)--> Case(call, argument, Bad) --the frontend's values--> returns | complaint(error)

This file imports no framework. An array is an `Array`: numpy values and the name of a dtype. A frontend's test converts
it (`jnp.asarray(a.values).astype(a.dtype)`, `torch.from_numpy(a.values).to(getattr(torch, a.dtype))`). The other
arguments are plain Python values or objects of the frontend. An object of the frontend is replaced by a value of
another type.
"""

import random
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np


class Array(NamedTuple):
    """values: float64 or int64. dtype: a name that torch and JAX share, for example "bfloat16"."""

    values: np.ndarray
    dtype: str


class Bad(NamedTuple):
    """kind: the error in the value ("none", "type", "dtype", "rank", "size", "empty" or "value"). name: the same
    in detail, one per value of an argument."""

    kind: str
    value: Any
    name: str


class Case(NamedTuple):
    """One call: the valid arguments of `call`, with `argument` replaced by the bad value."""

    call: str
    argument: str
    bad: Bad

    def __str__(self) -> str:
        value = self.bad.value
        if isinstance(value, Array):
            value = f"{value.dtype}{list(value.values.shape)}"
        return f"{self.call}({self.argument}={value}), bad {self.bad.kind}: {self.bad.name}"


DTYPES = ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8", "bool", "complex64")


def bad_values(good: Any) -> list[Bad]:
    """Replacements of `good`. Some are valid, for example another dtype that the function accepts."""
    none = [] if good is None else [Bad("none", None, "None")]
    types = [*none, *map(_of_type, ("x", [1, 2], object(), {"a": 1}))]
    if isinstance(good, Array):
        return [*types, _of_type(3), _of_type(0.5), *_bad_arrays(good)]
    if isinstance(good, bool):
        return types
    if isinstance(good, int):
        huge = (2**31 - 1, 2**31, 2**63, -(2**63))
        numbers = (-1, 0, 1, 7, 1.5, float("nan"), float("inf"), *huge)
        return [*types, *(Bad("value", number, str(number)) for number in numbers if number != good)]
    if isinstance(good, str):
        return [*types, _of_type(7), *(Bad("value", name, repr(name)) for name in ("", "int32", "complex64"))]
    numbers = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0) if isinstance(good, float) else ()
    return [
        *types, _of_type(7), _of_type(0.5), Bad("type", Array(np.zeros(3), "float32"), "an array"),
        *(Bad("value", number, str(number)) for number in numbers),
    ]  # fmt: skip


def _of_type(value: Any) -> Bad:
    return Bad("type", value, f"type {type(value).__name__}")


def _bad_arrays(good: Array) -> Iterator[Bad]:
    values, dtype = good
    for other in DTYPES:
        if other != dtype:
            yield Bad("dtype", Array(values, other), other)
    yield Bad("rank", Array(values[None], dtype), "a dim more")
    if values.ndim:
        yield Bad("rank", Array(np.zeros(()), dtype), "no dims")
    if values.ndim > 1:
        yield Bad("rank", Array(values[0], dtype), "a dim less")
        if values.shape[0] != values.shape[-1]:
            yield Bad("size", Array(values.swapaxes(0, -1).copy(), dtype), "dims swapped")
    for axis in range(values.ndim):
        size = values.shape[axis]
        sizes = {"+ 1": size + 1, "- 1": size - 1, "* 2": 2 * size, "* 2 + 32": 2 * size + 32, "= 1": 1}
        for change, wanted in sizes.items():
            if size and wanted not in (0, size):
                yield Bad("size", Array(values.take(np.arange(wanted) % size, axis), dtype), f"dim {axis} {change}")
        yield Bad("empty", Array(values.take([], axis), dtype), f"dim {axis} = 0")
    yield Bad("empty", Array(np.zeros((0,) * values.ndim), dtype), "all dims = 0")
    if dtype.startswith("int"):
        fills = (-1, -(2**31), 2**30, 2**31 - 1, 1, 0)
    else:
        fills = () if dtype == "uint8" else (np.nan, np.inf, -np.inf, 3e38)
    for fill in fills:
        whole, some = np.full_like(values, fill), values.copy()
        some.flat[some.size // 2 : some.size // 2 + 1] = fill
        for name, changed in ((f"all {fill}", whole), (f"one {fill}", some))[: min(values.size, 2)]:
            if not np.array_equal(changed, values):
                yield Bad("value", Array(changed, dtype), name)


def draw(calls: Mapping[str, Mapping[str, Any]], number: int, seed: int) -> list[Case]:
    """`number` different cases from the table {name of a call: {argument: valid value}}; a seed fixes them.

    Calls take turns, so that each call gets an equal share, however many arguments it has.
    """
    rng = random.Random(seed)
    stacks = []
    for call, arguments in calls.items():
        cases = [Case(call, name, bad) for name, good in arguments.items() for bad in bad_values(good)]
        rng.shuffle(cases)
        stacks.append(cases)
    drawn = []
    while len(drawn) < number and any(stacks):
        drawn += [stack.pop() for stack in stacks if stack]
    return drawn[:number]


GRAMMAR = re.compile(r"(?P<op>[\w.]+): (?P<argument>[^:]+): got (?P<got>.+?); (?P<remedy>.+)", re.DOTALL)
REMEDY = re.compile(r"\b(allowed|pass|call|use|make)\b")


def complaint(error: BaseException, ops: Collection[str], arguments: Collection[str]) -> str:
    """Why an error is not a user error of this package; "" if it is one.

    ops: names of functions and ops with which the message may begin. arguments: names; the second part of the message
    contains one of them.
    """
    if type(error) not in (ValueError, TypeError, NotImplementedError):
        return f"{type(error).__name__} is not a ValueError, TypeError or NotImplementedError: {error}"
    match = GRAMMAR.fullmatch(str(error))
    if match is None:
        return f'not "op: argument: got ...; allowed: ...": {error}'
    if match["op"] not in ops:
        return f"{match['op']!r} is not a function or op: {error}"
    if not set(re.findall(r"\w+", match["argument"])) & set(arguments):
        return f"{match['argument']!r} is not an argument: {error}"
    return "" if REMEDY.search(match["remedy"]) else f"does not say what is allowed: {error}"
