"""The cost model of expert parallelism: its schedule, its counts of rows, and its distance from measured times."""

import doctest
from itertools import combinations

import pytest
import torch
from mxep.core_kernels.peer.schedule import BACKWARD, FORWARD, list_chunks
from mxep.core_kernels.policy.deduplicate import CHOICES
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import TokenReplicas, sort_by_expert
from mxep.torch_frontend.exchange.replicas import lay_out

from benchmarks import ep_model
from benchmarks.ep_model import Case, Direction, distinct, in_turn, overlapped, rows_sent, token_bytes
from benchmarks.figures import ep_rates, ep_scale
from benchmarks.figures.results import newest


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
    copies, once = (rows_sent(far._replace(send=send), 8) for send in ep_scale.SENDS)
    assert copies == (224, 768, 1024)
    assert copies[1] > once[1]
    assert once == pytest.approx((once[2] * 7 / 32, once[2] * 24 / 32, 128 * distinct(32, 256, 8)))


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


def test_chunks_are_those_of_the_schedule() -> None:
    case = Case(2, 131072, 2048, 1408, 8, RECIPES["mxfp8"])
    for parts in (FORWARD, BACKWARD):
        assert case.chunks(parts) == [(last - first) / 8 for first, last in list_chunks(8, parts)]
        assert sum(case.chunks(parts)) == 1


LIMIT = 0.25


def direction(there: float, chunk: float, back: float, chunks: int, **rest: float) -> Direction:
    stages = {"before": 0.0, "filler": 0.0, "after": 0.0, "group": 0.0, "scatter": 0.0, "fold": 0.0, "narrowed": 1.0}
    wire = chunks * (there + back)
    transfers = {"there": (there,) * chunks, "chunks": (chunk,) * chunks, "back": (back,) * chunks}
    return Direction(**(stages | rest), **transfers, wire=wire)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "seconds"),
    [
        (direction(2, 5, 3, 1), 10),  # one chunk hides nothing
        (direction(2, 5, 3, 4), 2 + 4 * 5 + 3),  # products: the first rows and the last are exposed
        (direction(5, 1, 2, 4), 4 * 5 + 4 * 2),  # wire: rows go back when all have left; the last one waits for nothing
        (direction(5, 1, 2, 4, filler=100), 4 * 5 + 1 + 100),  # combine is overlapped with the filler
        (direction(2, 5, 3, 4, before=7, after=9), 7 + 2 + 4 * 5 + 3 + 9),
        (direction(2, 5, 3, 4, narrowed=1.2, filler=9), 2 + 4 * 6 + 9),  # the filler has all multiprocessors
    ],
)
def test_the_schedule(of: Direction, seconds: float) -> None:
    assert overlapped(of) == seconds
    assert in_turn(of) == of.before + of.travel + sum(of.chunks) + of.filler + of.after


def test_measured_times_in_turn() -> None:
    """Without a fitted number. Measured at an older commit, whose backward had passes that the model lacks."""
    found = list(ep_rates.measured([]))
    assert len(found) == 8
    for of in found:
        (one, both), (forward, step) = ep_rates.modelled(of), of.milliseconds
        # Measured: -9% to 5%, and with the backward -15% to 1%.
        assert one == pytest.approx(forward, rel=0.1)
        assert both == pytest.approx(step, rel=0.1 if of.how == "bf16" else 0.16)


def test_measured_times_of_overlapped_runs() -> None:
    """Nothing is fitted."""
    recorded = newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd"))
    runs = [m for m in ep_rates.measured(recorded) if m.how == ep_rates.OVER_PEERS]
    assert len(runs) >= 3
    for of in runs:
        for real, time in zip(of.milliseconds, ep_rates.modelled(of), strict=True):
            assert time == pytest.approx(real, rel=LIMIT)
