"""The cost model of expert parallelism: its schedule, its counts of rows, and its distance from measured times."""

import doctest
from itertools import combinations

import pytest
import torch
from mxep.core_kernels.policy.deduplicate import CHOICES
from mxep.core_kernels.policy.exchange import plan_exchange
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import TokenReplicas, sort_by_expert
from mxep.torch_frontend.exchange.replicas import lay_out
from mxep.torch_frontend.overlap.transport import CHUNK_BYTES

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
    copies, once, hosts = (rows_sent(far._replace(send=send), 8) for send in ep_scale.SENDS)
    assert copies == (224, 768, 1024)
    assert copies[1] > once[1] > hosts[1]
    assert (once[2], once[0]) == (hosts[2], once[2] * 7 / 32)
    assert hosts[:2] == pytest.approx((once[2] * 7 / 8, 128 * distinct(4, 256, 8) * 3 / 4))


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


def test_chunks_are_those_of_the_transports() -> None:
    case = Case(2, 131072, 2048, 1408, 8, RECIPES["mxfp8"])
    assert case.chunk_bytes == CHUNK_BYTES
    plan = plan_exchange([[8192] * 16] * 2, 0, 32, CHUNK_BYTES // (2048 * 33 // 32))
    assert case.chunks == [(chunk.last - chunk.first) / 8 for chunk in plan.chunks]
    assert len(case.chunks) == 4
    assert case._replace(rows=32).chunks == [1]


def direction(there: float, chunk: float, back: float, chunks: int, **rest: float) -> Direction:
    stages = {"before": 0.0, "filler": 0.0, "after": 0.0, "group": 0.0, "scatter": 0.0, "own": 0.0, "launches": 0.0}
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
        (
            direction(2, 5, 3, 4, before=7, after=9, own=4),
            7 + 4 + 4 * 5 + 3 + 9,
        ),  # own rows while the first ones are sent
        (direction(1, 1, 1, 4, launches=6), 4 * 6 + 1 + 1),  # host
    ],
)
def test_the_schedule(of: Direction, seconds: float) -> None:
    assert overlapped(of) == seconds
    assert overlapped(of, 0.5) == seconds + max(of.local + of.travel - seconds, 0) / 2
    assert in_turn(of) == of.before + of.travel + sum(of.chunks) + of.filler + of.after


def test_measured_times_in_turn() -> None:
    """Without a fitted number. Measured at an older commit, whose backward had passes that the model lacks."""
    found = list(ep_rates.measured([]))
    assert len(found) == 8
    for of in found:
        (one, both), (forward, step) = ep_rates.reckoned(of), of.milliseconds
        # Measured: -9% to 5%, and with the backward -15% to 1%.
        assert one == pytest.approx(forward, rel=0.1)
        assert both == pytest.approx(step, rel=0.1 if of.how == "bf16" else 0.16)


def test_measured_times_of_overlapped_runs() -> None:
    """One number per transport is fitted to four runs, of two sizes on two and on four GPUs. Measured: -20% to 6%,
    with the backward -10% to 14%. The hosts were slow, and launches are left out of the model."""
    recorded = list(newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd")))
    chunks = {ranks: ep_rates.wire_of_chunks(recorded, ranks) for ranks in (2, 4)}
    assert None not in chunks.values()
    runs = [m for m in ep_rates.measured(recorded) if m.case.dim * m.case.hidden > ep_rates.GPU_BOUND]
    for how in ("collectives", "copy engines"):
        of = [m for m in runs if m.how == how]
        assert len(of) == 4
        ends = [[ep_rates.reckoned(m, chunks[m.case.ranks], share)[1] for m in of] for share in (0.0, 1.0)]
        unhidden = ep_model.fitted([m.milliseconds[1] for m in of], *ends)
        assert 0 < unhidden < 1
        for m in of:
            one, both = ep_rates.reckoned(m, chunks[m.case.ranks], unhidden)
            assert one == pytest.approx(m.milliseconds[0], rel=0.23)
            assert both == pytest.approx(m.milliseconds[1], rel=0.17)
