"""Hundreds of random calls of the C++ ops, of the ordinary build; `make sanitize` runs more with the sanitizers."""

import time

from .call import CPP_OPS
from .draws import DRAWS
from .fuzz_ops import draw, run_cases

CASES = 20
"""Of each op."""


def test_every_cpp_op_is_drawn() -> None:
    assert DRAWS.keys() == CPP_OPS.keys()


def test_a_case_is_the_same_when_it_runs_again() -> None:
    ops = sorted(DRAWS)
    for number in range(len(ops)):
        one, two = draw(3, number, ops), draw(3, number, ops)
        assert str(one) == str(two)
        assert [x.tobytes() for x in one.arrays] == [x.tobytes() for x in two.arrays]


def test_random_calls() -> None:
    said: list[str] = []
    try:
        ended = run_cases(0, range(CASES * len(DRAWS)), sorted(DRAWS), time.monotonic() + 600, said.append)
    except Exception as error:
        raise AssertionError(f"seed 0, {said[-1]}: run it: python -m tests.sanitize.fuzz_ops --case NUMBER") from error
    assert len(said) == CASES * len(DRAWS)
    for op in DRAWS:
        assert ended[op, "compared"] >= CASES // 4, op
    for end in ("refused by the plan", "refused by C++", "returned"):
        assert sum(number for (_, by), number in ended.items() if by == end) > CASES, end
