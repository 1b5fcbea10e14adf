"""The cost model of expert parallelism: its schedule, its counts of rows, and its distance from measured times."""

import doctest
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from mxep.core_kernels.peer.programs.writer import BACKWARD, FORWARD, list_chunks
from mxep.core_kernels.policy.deduplicate import CHOICES
from mxep.core_kernels.policy.recipe import RECIPES, Recipe
from mxep.torch_frontend import TokenReplicas, sort_by_expert
from mxep.torch_frontend.exchange.replicas import lay_out

from benchmarks import ep_model
from benchmarks.ep_model import Case, Copies, Program, distinct, rows_sent, run, token_bytes
from benchmarks.figures import ep_rates, ep_scale
from benchmarks.figures.results import newest

PAGE = Path(__file__).parents[2] / "docs" / "design" / "ep_scale.md"


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(ep_model)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(("units", "experts", "top_k"), [(2, 8, 3), (4, 8, 2), (8, 8, 3), (3, 12, 4)])
def test_distinct_units_are_those_of_all_choices(units: int, experts: int, top_k: int) -> None:
    hit = [len({e * units // experts for e in chosen}) for chosen in combinations(range(experts), top_k)]
    assert distinct(units, experts, top_k) == pytest.approx(sum(hit) / len(hit))


def test_rows_sent() -> None:
    case = Case(4, 1024, 64, 32, 8, RECIPES["mxfp8"])
    assert rows_sent(case, 8) == (768, 0, 1024)
    far = case._replace(ranks=32, experts=8, top_k=8)
    copies, once = rows_sent(far, 8), rows_sent(far._replace(once=True), 8)
    assert copies == (224, 768, 1024)
    assert copies[1] > once[1]
    assert once[0] == once[2] * 7 / 32


@pytest.mark.parametrize(("ranks", "experts"), [(4, 64), (8, 64), (64, 256)])
def test_a_token_has_the_bytes_of_the_copies_that_dispatch_lays_out(ranks: int, experts: int) -> None:
    """4096 tokens, drawn; the closed form is their expectation."""
    tokens, top_k, sent = 4096 // ranks, 8, 0
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(rank)
        chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].int()
        order, inverse, counts = sort_by_expert(chosen, experts)
        copies = lay_out(TokenReplicas(torch.empty(tokens, 0), order, inverse, top_k), counts, ranks).counts
        sent += int(copies.sum() - copies[rank])
    of = {how: token_bytes(ranks, experts, top_k, 32, RECIPES["bf16"], how) for how in CHOICES}
    # Measured: within 0.4%.
    assert of["both"].backward == pytest.approx(2 * sent / 4096 * 64, rel=0.01)
    slots = 4 * top_k * (ranks - 1) / ranks
    assert of["both"].forward == pytest.approx(of["both"].backward + slots)
    assert of["dispatch"].backward == pytest.approx((of[None].backward + of["both"].backward) / 2)
    weighted = token_bytes(ranks, experts, top_k, 32, RECIPES["bf16"], "dispatch", weighted=True)
    assert (weighted.forward, weighted.backward) == pytest.approx((of["dispatch"].forward, of[None].backward))


def test_the_page_states_the_rates_of_pulls_and_pushes() -> None:
    page, of = PAGE.read_text(), ep_rates.rates(7168, 2048)
    assert f"| {of.pull.link / 1e9:.0f} GB/s |" in page
    assert f"| {of.push.link / 1e9:.0f} GB/s |" in page
    assert f"| {of.pull.kernel / 1e9:.0f}, {of.push.kernel / 1e9:.0f} GB/s |" in page
    assert f"| {of.pull.slower:.2f} times as long during a pull, {of.push.slower:.2f} times during a push |" in page


def test_a_program_has_the_chunks_of_the_library_and_rows_of_its_own_rank_use_no_link() -> None:
    case = Case(2, 131072, 7168, 2048, 6, RECIPES["mxfp8"])
    rates = ep_rates.rates(7168, 2048)
    quick = rates._replace(pull=Copies(1e9, 1e12, 1.0), push=Copies(1e12, 1e9, 1.0))
    for program, parts, pulled, pushed in (
        (ep_model.forward_program(case, quick), FORWARD, 7168, 2048),
        (ep_model.backward_program(case, quick), BACKWARD, 2048, 7168),
    ):
        pull, push = 131072 * pulled * 33 / 32 / 2 / 1e9, 131072 * pushed * 2 / 1e9  # the link's limit, the kernel's
        for found, whole in ((program.pulls, pull), (program.gemms, sum(program.gemms)), (program.pushes, push)):
            assert found == pytest.approx([whole * (last - first) / 6 for first, last in list_chunks(6, parts)])


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [
        ({}, True),
        ({"ranks": 16}, False),
        ({"once": True}, False),
        ({"hidden": 1408}, False),
        ({"dim": 16384}, False),
        ({"recipe": RECIPES["mxfp8_wgrad_with_hp"]}, False),
        ({"recipe": Recipe.parse("mxfp8", mxfp8_all_to_all=("dispatch",))}, False),
    ],
)
def test_calls_that_the_device_drives(changes: dict[str, Any], overlaps: bool) -> None:
    case = Case(8, 131072, 7168, 2048, 8, RECIPES["mxfp8"])._replace(**changes)
    assert case.overlaps(8) == overlaps
    assert (ep_scale.programs(case) is not None) == overlaps


def program(pull: float, gemm: float, push: float, chunks: int, **rest: float) -> Program:
    stages = {"before": 0.0, "first": 0.0, "last": 0.0, "after": 0.0} | rest
    return Program(pulls=(pull,) * chunks, gemms=(gemm,) * chunks, pushes=(push,) * chunks, **stages)


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        (program(2, 5, 3, 1), 10),  # one chunk overlaps nothing
        (program(2, 5, 3, 4), 2 + 4 * 5 + 3),  # GEMMs: the first pull and the last push are exposed
        (program(5, 1, 2, 4), 4 * 5 + 4 * 2),  # copies: pushes follow all pulls, the first waits for none
        (program(5, 1, 2, 1), 5 + 1 + 2),
        (program(5, 1, 2, 4, last=100), 4 * 5 + 1 + 100),  # pushes are overlapped with the weight gradient
        (program(2, 5, 3, 4, before=7, first=4, after=9), 7 + 4 + 4 * 5 + 3 + 9),  # `first` covers the first pull
    ],
)
def test_the_schedule(of: Program, seconds: float) -> None:
    free = ep_rates.rates(7168, 2048)._replace(pull=Copies(1, 1, 1.0), push=Copies(1, 1, 1.0))
    assert run(of, free) == seconds


def test_gemms_are_slower_next_to_a_copy() -> None:
    rates = ep_rates.rates(7168, 2048)._replace(pull=Copies(1, 1, 2.0), push=Copies(1, 1, 3.0))
    # Chunks start at 2, 12 and 27, and all pulls have ended at 6.
    assert run(program(2, 5, 0, 3), rates) == 2 + 5 * 2 + 2 * 5 * 3
    assert run(program(2, 5, 0, 1, last=7), rates) == 2 + 5 * 3 + 7 * 3


def test_measured_times_without_overlap() -> None:
    """Without a fitted number. Measured at an older commit, whose backward had passes that the model lacks."""
    found = list(ep_rates.measured([]))
    assert len(found) == 8
    for case, how, (forward, step) in found:
        one, both = ep_rates.compute(case, how)
        # Measured: -9% to 5%, and with the backward -15% to 1%.
        assert one == pytest.approx(forward, rel=0.1)
        assert both == pytest.approx(step, rel=0.1 if how == "bf16" else 0.16)


def test_overlapped_runs_are_lines_that_the_device_drove() -> None:
    """Neither earlier commits, nor sizes that the kernels do not take."""
    sizes = {"ranks": 2, "rows": 131072, "dim": 7168, "hidden": 2048, "experts": 8, "recipe": "mxfp8"}
    line = {"op": "ep_fwd_bwd", "case": sizes | {"how": ep_rates.OVERLAPPED}, "us": 2e3, "peer_us": 9e3}
    lines = [
        line | {"commit": "0" * 40},
        line | {"commit": "e65087e" + "0" * 33, "us": 1.0},
        line | {"commit": "0" * 40, "case": line["case"] | {"hidden": 1408}},
    ]
    found = [of for of in ep_rates.measured(lines) if of.how == ep_rates.OVERLAPPED]
    assert [(of.case.hidden, of.milliseconds) for of in found] == [(2048, (0.0, 2.0))]


OVERLAPPED_LIMIT = 0.19
"""Of the modelled time, relative to the measured one: -10% to -16% measured, plus three points. The model has the rates
of single calls; the lines are of back-to-back steps, at the power limit of the card."""


def test_measured_times_of_overlapped_runs() -> None:
    """Without a fitted number. The lines of both sizes that the kernels take must exist."""
    recorded = newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd"))
    found = [of for of in ep_rates.measured(recorded) if of.how == ep_rates.OVERLAPPED]
    assert {(2, 7168, 2048), (2, 8192, 5120)} <= {(of.case.ranks, of.case.dim, of.case.hidden) for of in found}
    for case, how, milliseconds in found:
        assert ep_rates.compute(case, how) == pytest.approx(milliseconds, rel=OVERLAPPED_LIMIT)
