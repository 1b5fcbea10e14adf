"""What XLA made of the gradient of the expert-parallel layer on four devices: which bytes cross, and what is not there.

dispatch forward, combine backward   u8 rows of K + K/32 bytes
dispatch backward, combine forward   bf16, as u16 bits
"""

import dataclasses
import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mxep.core_kernels.policy.recipe import Recipe
from mxep.jax_frontend import RouterConfig, moe, quantize_weights

RANKS, TOKENS, DIM, HIDDEN = 4, 25, 64, 96
CONFIG = moe.MoEConfig(
    DIM, HIDDEN, num_experts=8, router=RouterConfig(top_k=2, prob_in="combine"), recipe="mxfp8_wgrad_with_hp"
)
WEIGHTED = dataclasses.replace(CONFIG.router, prob_in="swiglu")
CAPACITY = TOKENS * CONFIG.router.top_k
RECEIVED = RANKS * CAPACITY
PADDED = 288  # RECEIVED rows, and 32 more for each of the 2 local experts, up to a multiple of 32


class Instruction(NamedTuple):
    name: str
    result: str
    opcode: str
    operands: list[str]
    target: str
    backward: bool


class Program:
    """The entry computation of an HLO module: instructions, and who uses whom."""

    def __init__(self, text: str) -> None:
        self.text = text
        entry = text[text.index("\nENTRY ") :].splitlines()[2:]
        parsed = (re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*?)\)(, |$)", line) for line in entry)
        self.instructions = {
            m[1]: Instruction(
                m[1], re.sub(r"/\*.*?\*/|\{[\d,]*\}", "", m[2]), m[3], re.findall(r"%([\w.-]+)", m[4]),
                next(iter(re.findall(r'custom_call_target="([^"]*)"', m.string)), ""), "transpose(" in m.string,
            )
            for m in parsed if m
        }  # fmt: skip

    def of(self, opcode: str) -> list[Instruction]:
        return [i for i in self.instructions.values() if i.opcode == opcode]

    def users(self, name: str) -> list[Instruction]:
        return [i for i in self.instructions.values() if name in i.operands]

    def next_kernels(self, start: Instruction) -> tuple[set[str], set[str], list[Instruction]]:
        """Custom calls first reached downstream, their names, the opcodes passed on the way."""
        calls: dict[str, Instruction] = {}
        passed: set[str] = set()
        todo = self.users(start.name)
        while todo:
            node = todo.pop()
            if node.opcode == "custom-call":
                calls[node.name] = node
            else:
                passed.add(node.opcode)
                todo += self.users(node.name)
        return {c.target for c in calls.values()}, passed, list(calls.values())

    def source_kernel(self, name: str) -> Instruction:
        """The one custom call that a value is made from, by slices and the like."""
        node = self.instructions[name]
        if node.opcode == "custom-call":
            return node
        (source,) = {self.source_kernel(operand).name for operand in node.operands}
        return self.instructions[source]


def compile_layer(gradient: bool, cached: bool = False, **changes) -> Program:
    config = dataclasses.replace(CONFIG, **changes)
    spec = {"router": PartitionSpec(), "experts": PartitionSpec("ep")}

    def one_rank(params, x):
        return moe.apply(params, x, config, axis_name="ep")[0]

    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("ep",))
    layer = jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, PartitionSpec("ep")), out_specs=PartitionSpec("ep"))
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), CONFIG))
    experts = jax.eval_shape(
        lambda p: {n: quantize_weights(w, recipe=config.recipe) for n, w in p.items()}, params["experts"]
    )
    x = jax.ShapeDtypeStruct((RANKS * TOKENS, DIM), jnp.float32)

    def loss(params, x, experts):
        weights = {name: w.with_values(params["experts"][name]) for name, w in experts.items()}
        return (layer(params | {"experts": weights} if cached else params, x) ** 2).sum()

    if gradient:
        return Program(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, experts).compile().as_text())
    return Program(jax.jit(layer).lower(params, x).compile().as_text())


@pytest.fixture(scope="module")
def gradient() -> Program:
    return compile_layer(gradient=True)


PACKED = f"u8[{CAPACITY},{DIM + DIM // 32}]"
WIDE = f"u16[{CAPACITY},{DIM}]"
COUNTS = "s32[1,2]"


def wires(program: Program) -> Counter[tuple[str, bool]]:
    """(what one rank sends another, whether in the backward) of every all-to-all."""
    for i in program.of("all-to-all"):
        assert len(set(i.result.strip("()").split(", "))) == 1
    return Counter((i.result.strip("()").split(", ")[0], i.backward) for i in program.of("all-to-all"))


def test_the_forward_sends_packed_bytes_out_and_bf16_back() -> None:
    assert wires(compile_layer(gradient=False)) == {(COUNTS, False): 1, (PACKED, False): 1, (WIDE, False): 1}


def test_the_backward_sends_packed_bytes_out_and_bf16_back(gradient: Program) -> None:
    forward = {(COUNTS, False): 1, (PACKED, False): 1, (WIDE, False): 1}
    assert wires(gradient) == forward | {(PACKED, True): 1, (WIDE, True): 1}


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_stands_between_the_packed_all_to_all_and_the_grouped_gemm(gradient: Program, backward: bool) -> None:
    """quantize -> gather -> all-to-all -> gather -> the dequantize that is the CPU's grouped GEMM, and no other kernel;
    the halves of the wire row are not cut apart and joined again."""
    (wire,) = (i for i in gradient.of("all-to-all") if i.backward == backward and i.result.startswith("(u8"))
    gather = gradient.source_kernel(wire.name)
    assert gather.target == "mxep.permute_rows"
    assert gradient.source_kernel(gather.operands[0]).target == "mxep.quantize_row_packed"

    targets, passed, calls = gradient.next_kernels(wire)
    assert targets == {"mxep.permute_mx"}
    assert len(calls) == 1
    assert passed == {"get-tuple-element", "concatenate"}, "parts of the ranks, joined once"
    (joined,) = (i for i in gradient.of("concatenate") if i.name == calls[0].operands[0])
    assert joined.result == f"u8[{RECEIVED},{DIM + DIM // 32}]"

    targets, passed, calls = gradient.next_kernels(calls[0])
    assert targets == {"mxep.dequantize"}
    assert passed == {"get-tuple-element"}
    assert {c.result for c in calls} == {f"f32[{PADDED},{DIM}]", f"bf16[{PADDED},{DIM}]"}


def calls(program: Program, *names: str) -> dict[str, int]:
    """How often the kernels run whose names begin so."""
    targets = Counter(i.target.removeprefix("mxep.") for i in program.of("custom-call"))
    return {name: count for name, count in targets.items() if name.startswith(names)}


def test_only_what_is_float_is_quantized(gradient: Program) -> None:
    """3 weights along both dims, in one read each; the two gradients of w1 and w3's products; rows out, rows back. The
    hidden rows are quantized where they are computed, and computed again for the gradient of w2."""
    assert calls(gradient, "quantize") == {"quantize_row": 2, "quantize_both": 3, "quantize_row_packed": 2}
    assert calls(gradient, "swiglu") == {"swiglu_row": 1, "swiglu": 1, "swiglu_bwd": 1}


def test_of_quantized_weights_nothing_is_quantized_again(gradient: Program) -> None:
    cached = compile_layer(gradient=True, cached=True)
    assert calls(cached, "quantize") == {"quantize_row": 2, "quantize_row_packed": 2}
    assert calls(cached, "swiglu", "combine", "permute") == calls(gradient, "swiglu", "combine", "permute")
    assert wires(cached) == wires(gradient)
    floats = {f"f32[2,{n},{k}]" for n, k in ((HIDDEN, DIM), (DIM, HIDDEN))}
    assert {i.result for i in gradient.of("parameter")} >= floats
    assert not {i.result for i in cached.of("parameter")} & floats, "the values are not read"


def test_tokens_are_summed_by_a_kernel(gradient: Program) -> None:
    """The outputs forward, and the gradients of a token's copies backward."""
    assert calls(gradient, "combine") == {"combine": 2, "combine_bwd": 1}


def test_probabilities_inside_the_experts_travel_with_the_rows_and_save_none(gradient: Program) -> None:
    weighed = compile_layer(gradient=True, router=WEIGHTED)
    probs = f"f32[{CAPACITY},1]"
    assert wires(weighed) == wires(gradient) | {(probs, False): 1, (probs, True): 1}
    assert calls(weighed, "combine") == {"combine": 2}, "the gradient of a sum without weights is a copy"
    assert calls(weighed, "quantize", "swiglu") == calls(gradient, "quantize", "swiglu")


def test_the_companions_are_compiled_away(gradient: Program) -> None:
    """No fp8 value exists, and no float zeros of the size of a carrier are made."""
    assert not re.findall(r"f8e\w+\[", gradient.text)
    made = {i.result for i in gradient.of("broadcast")} | {i.result for i in gradient.of("constant")}
    carriers = {f"{t}[{rows},{n}]" for t in ("bf16", "f32") for rows in (RECEIVED, PADDED) for n in (DIM, HIDDEN)}
    assert not made & carriers


def test_on_one_device_a_row_is_moved_once_each_way() -> None:
    """T rows are quantized, copied into the groups as bytes and summed out of them, whatever K is. Probabilities inside
    the experts: test_compile_size.py."""

    def loss(params, x):
        return (moe.apply(params, x, CONFIG)[0] ** 2).sum()

    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), CONFIG))
    x = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    program = Program(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile().as_text())
    # The gradients of both products; each group's row has its own gradient.
    assert calls(program, "quantize_row") == {"quantize_row": 2, "quantize_row_packed": 1}
    assert calls(program, "permute") == {"permute_mx": 1}
    assert calls(program, "combine") == {"combine": 2, "combine_bwd_row": 1}
    assert not program.of("all-to-all")


def test_folded_products_read_packed_rows_through_their_map() -> None:
    """No kernel stores the rows of the groups, neither for a product nor for the gradients of w1 and w3. One stores
    the rows of the outputs' gradient."""
    config = dataclasses.replace(CONFIG, router=WEIGHTED, recipe=Recipe.parse("mxfp8", compute="fold"))
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config))
    x = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    gradient = jax.grad(lambda params, x: (moe.apply(params, x, config)[0] ** 2).sum(), argnums=(0, 1))
    program = Program(jax.jit(gradient).lower(params, x).compile().as_text())
    assert calls(program, "permute_mx") == {"permute_mx_fold": 1, "permute_mx_col_fold": 1, "permute_mx": 1}
    assert calls(program, "fold_rows", "requantize") == {"fold_rows": 1, "requantize_col_fold": 1}


def test_the_scopes_of_the_layer() -> None:
    """The ranges of docs/guides/metrics.md are parts of the names of operations."""
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), CONFIG))
    x = jax.ShapeDtypeStruct((TOKENS, DIM), jnp.float32)
    text = jax.jit(lambda params, x: moe.apply(params, x, CONFIG)[0]).lower(params, x).as_text(debug_info=True)
    assert not [scope for scope in ("route", "dispatch", "experts", "combine") if f"mxep.{scope}/" not in text]
