"""What XLA made of the gradient of the expert-parallel layer on four devices: which bytes cross, and what is not there.

dispatch forward, combine backward   u8 rows of K + K/32 bytes
dispatch backward, combine forward   bf16, as u16 bits
"""

import re
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from mxep.jax_frontend import moe

RANKS, TOKENS, DIM, HIDDEN = 4, 25, 64, 96
CONFIG = moe.MoEConfig(DIM, HIDDEN, num_experts=8, top_k=2)
CAPACITY = TOKENS * CONFIG.top_k
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


def compile_layer(gradient: bool) -> Program:
    spec = {"router": PartitionSpec(), "experts": PartitionSpec("ep")}

    def one_rank(params, x):
        return moe.apply(params, x, CONFIG, axis_name="ep")[0]

    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("ep",))
    layer = jax.shard_map(one_rank, mesh=mesh, in_specs=(spec, PartitionSpec("ep")), out_specs=PartitionSpec("ep"))
    program = jax.grad(lambda p, x: (layer(p, x) ** 2).sum(), argnums=(0, 1)) if gradient else layer
    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), CONFIG))
    x = jax.ShapeDtypeStruct((RANKS * TOKENS, DIM), jnp.float32)
    return Program(jax.jit(program).lower(params, x).compile().as_text())


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


def test_only_what_is_float_is_quantized(gradient: Program) -> None:
    """3 weights along both dims; the hidden rows; the two gradients of w1 and w3's products; rows out, rows back."""
    calls = Counter(i.target for i in gradient.of("custom-call"))
    quantizers = {name: calls[f"mxep.quantize_{name}"] for name in ("row", "col", "both", "row_packed")}
    assert quantizers == {"row": 3 + 1 + 2, "col": 3, "both": 0, "row_packed": 2}


def test_the_companions_are_compiled_away(gradient: Program) -> None:
    """No fp8 value exists, and no float zeros of the size of a carrier are made."""
    assert not re.findall(r"f8e\w+\[", gradient.text)
    made = {i.result for i in gradient.of("broadcast")} | {i.result for i in gradient.of("constant")}
    carriers = {f"{t}[{rows},{n}]" for t in ("bf16", "f32") for rows in (RECEIVED, PADDED) for n in (DIM, HIDDEN)}
    assert not made & carriers
