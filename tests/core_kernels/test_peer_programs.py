"""The programs of core_kernels/peer/programs: chunks, the memory of their arrays and the order of their steps."""

import doctest
from collections.abc import Mapping, Sequence
from itertools import chain

import pytest
from mxep.core_kernels.formats import packed_width
from mxep.core_kernels.peer import programs
from mxep.core_kernels.peer.programs.ffn import SAVED_FFN, TRANSPOSED, write_ffn_backward, write_ffn_forward
from mxep.core_kernels.peer.programs.program import ADDRESSES, ALIGNMENT, Program, list_earlier, nbytes_of
from mxep.core_kernels.peer.programs.writer import BACKWARD, FORWARD, LAID_OUT, Layout, Memory, Sizes, list_chunks
from mxep.core_kernels.policy.rounds import capacity_of

LAYERS = [
    (16384, 7168, 2048, 32, 8),
    (16384, 2048, 1408, 64, 6),
    (16384, 5120, 1536, 48, 6),
    (8192, 2048, 768, 128, 8),
    (16384, 4096, 14336, 8, 2),
]
"""Tokens per GPU, dim, hidden, experts, top_k."""
CAPACITY_FACTOR, GROUP_ALIGNMENT = 1.25, 128


def write_programs(layer: tuple[int, ...], ranks: int) -> dict[str, Program]:
    tokens, dim, hidden, experts, top_k = layer
    groups = experts // ranks
    rows = capacity_of(int(CAPACITY_FACTOR * tokens * top_k), groups, GROUP_ALIGNMENT)
    sizes = Sizes(0, ranks, groups, rows, dim, hidden, top_k, "bfloat16", 0, (1.0, 0.0, 0.0))
    memory = Memory.of(0, tokens * top_k, top_k, packed_width(dim), 2 * dim)
    layout = Layout(GROUP_ALIGNMENT)
    return {
        "forward": write_ffn_forward(sizes, memory, True, (*LAID_OUT, *SAVED_FFN, *TRANSPOSED), layout),
        "forward without gradients": write_ffn_forward(sizes, memory, True, LAID_OUT, layout),
        "forward, cached weights": write_ffn_forward(sizes, memory, False, (*LAID_OUT, *SAVED_FFN), layout),
        "backward": write_ffn_backward(sizes, memory, True),
        "backward, cached weights": write_ffn_backward(sizes, memory, False),
    }


def list_conflicts(program: Program) -> dict[str, set[str]]:
    """For each array of the buffer the arrays that may live at the same moment, in any order that the streams allow."""
    names, steps, earlier = list(program.arrays), program.steps, list_earlier(program.steps)
    users = {name: [0] if name in ADDRESSES else [] for name in program.places}
    for i, step in enumerate(steps):
        for name in {names[number] for number in (*step.inputs, *step.outputs)} & users.keys():
            users[name].append(i)

    def ends_before(x: str, y: str) -> bool:
        return all(j < earlier[i][steps[j].stream] for i in users[y] for j in users[x])

    return {x: {y for y in users if y != x and not ends_before(x, y) and not ends_before(y, x)} for x in users}


def least_bytes(nbytes: Mapping[str, int], conflicts: Mapping[str, set[str]]) -> int:
    """The largest sum of arrays that conflict pairwise: no buffer is smaller."""
    most = 0

    def add(total: int, left: list[str]) -> None:
        nonlocal most
        most = max(most, total)
        while left and total + sum(nbytes[name] for name in left) > most:
            name, *left = left
            add(total + nbytes[name], [other for other in left if other in conflicts[name]])

    add(0, sorted(nbytes, key=lambda name: -nbytes[name]))
    return most


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_smaller_buffer_is_possible(layer: tuple[int, ...], ranks: int) -> None:
    """Up to the alignment of each array; arrays that may live at the same moment share no byte."""
    for which, program in write_programs(layer, ranks).items():
        nbytes, conflicts = {x: nbytes_of(program.arrays[x]) for x in program.places}, list_conflicts(program)
        least = least_bytes(nbytes, conflicts)
        assert least <= program.nbytes <= least + ALIGNMENT * len(nbytes), which
        for x, begin in program.places.items():
            for y in conflicts[x]:
                other = program.places[y]
                assert begin + nbytes[x] <= other or other + nbytes[y] <= begin, (which, x, y)


def test_weight_gradients_are_overlapped_with_the_push() -> None:
    """The operand of x, as large as x, is written after dx and after dw2, whose operand is as large."""
    ops = [step.op for step in write_programs(LAYERS[0], 2)["backward"].steps]
    of_y, of_x = (i for i, op in enumerate(ops) if op == "requantize_col_fold")
    dw2, dw1 = ops.index("grouped_wgrad_fold"), ops.index("grouped_wgrad_fold_pair")
    assert of_y < ops.index("push_rows") < dw2 < of_x < dw1


@pytest.mark.parametrize("parts", [FORWARD, BACKWARD, (1,), (1, 9)])
def test_chunks_of_any_number_of_experts(parts: Sequence[int]) -> None:
    for groups in range(1, 200):
        chunks = list_chunks(groups, parts)
        assert list(chain(*(range(*chunk) for chunk in chunks))) == list(range(groups))
        assert len(chunks) == min(groups, len(parts))
        sizes = [last - first for first, last in chunks]
        assert min(sizes) > 0
        assert all(abs(n - groups * part / sum(parts)) <= 1 for n, part in zip(sizes, parts, strict=False)), sizes


def test_examples() -> None:
    for module in (programs.program, programs.writer):
        assert doctest.testmod(module).failed == 0


def test_a_backward_quantizes_weights_along_n_alone() -> None:
    written = write_programs(LAYERS[0], 2)
    of = {name: [step.op for step in program.steps if "matrix_fold" in step.op] for name, program in written.items()}
    assert of == {
        "forward": 3 * ["quantize_matrix_fold"],
        "forward without gradients": 3 * ["quantize_matrix_fold"],
        "forward, cached weights": [],
        "backward": 3 * ["quantize_matrix_fold_t"],
        "backward, cached weights": [],
    }
