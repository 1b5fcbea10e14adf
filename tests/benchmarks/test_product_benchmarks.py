"""The grouped products of the GPU benchmark on a CPU, at small sizes: cases, checks, peers, lines, tables.

The figures mean nothing. A GPU alone has the clock and `torch._scaled_grouped_mm`; torch's shape rule checks the
arguments of the latter here.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import gpu, gpu_grouped_gemm
from benchmarks.cases import error_check, shapes
from benchmarks.cases.products import grouped_gemm
from benchmarks.cases.products.grouped_gemm_case import operands
from benchmarks.cases.shapes import Product
from benchmarks.clocks import device_timing
from benchmarks.clocks.timing import Sample
from benchmarks.figures import results, roofline
from benchmarks.figures.tables import table_grouped_gemm


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    offs: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """The function that torch has on a GPU only. Torch's own rule checks shapes, dtypes and strides."""
    meta = (x.to("meta") for x in (a, b, scale_a, scale_b))
    out = torch.ops.aten._scaled_grouped_mm(
        *meta, offs=offs.to("meta"), out_dtype=out_dtype, use_fast_accum=use_fast_accum
    )
    assert (offs.dtype, use_fast_accum) == (torch.int32, False)
    rows = (a.float() * scale_a[:, None]).bfloat16()
    result = torch._grouped_mm(rows, (b.float() * scale_b[:, None]).bfloat16(), offs=offs)
    assert (result.shape, result.dtype) == (out.shape, out.dtype)
    return result


def clock(us: dict[str, float]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A clock that returns given times, by the candidate's name."""

    def once(candidates: dict[str, Any]) -> dict[str, Any]:
        for run in candidates.values():
            run()
        return {name: Sample(us.get(name, 10.0), 0.01, 1) for name in candidates}

    return once


ALIKE = clock({})


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(device_timing, "batches", partial(device_timing.batches, samples=1))
    monkeypatch.setattr(device_timing, "BATCH_US", 1)

    def measured(*only: str, products: Any = shapes.TINY.products, each: Any = ALIKE) -> list[Any]:
        return list(gpu.lines(only or ("grouped_gemm",), shapes.TINY._replace(products=products), "cpu", each))

    return measured


def test_every_product_is_checked_compared_and_reported(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op, recipe, routing and peer; then the table and picture from the stored lines."""
    lines = bench()
    large = [line for line in lines if "operands" not in line.case]
    for line in large:
        assert line.error["grade"] == ("sqnr_db" if line.op == "grouped_mm_autograd" else "gemm_bound")
        assert line.error["sqnr_db"] > (25 if line.op == "grouped_mm_autograd" else 50)
        json.loads(json.dumps(asdict(line)), parse_constant=pytest.fail)  # no NaN, no infinity
    assert {line.case["routing"] for line in large if line.frontend == "torch"} == {"balanced", "skewed"}
    assert {line.case["recipe"] for line in large if "recipe" in line.case} == {"mxfp8", "mxfp8_wgrad_with_hp"}
    assert {line.peer for line in lines if line.frontend == "jax"} == {"torch_frontend", "jax_ragged_dot_bf16"}
    roofs = {line.peer: line.peer_roof for line in large if line.peer_of_roof is not None}
    assert roofs == {
        "torch_grouped_mm_bf16": "bf16_mm", "torch_scaled_grouped_mm": "fp8_mm", "jax_ragged_dot_bf16": "bf16_mm"
    }  # fmt: skip

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for line in lines:
        assert results.row(results.cells(line))
        results.record(results.Run("1x GPU", "a" * 40), line, tmp_path / "h200.jsonl")
    rows = results.newest("h200", table_grouped_gemm.is_product)
    assert len(rows) == len(lines)
    text = table_grouped_gemm.table(rows)
    shapes = {(r["op"], r["case"].get("recipe"), table_grouped_gemm.shape_of(r)) for r in rows}
    assert text.count("\n| forward") + text.count("\n| input") + text.count("\n| weight") == len(shapes)
    roofline.draw(rows, tmp_path / "products.svg")
    first = (tmp_path / "products.svg").read_bytes()
    roofline.draw(rows, tmp_path / "products.svg")
    assert (tmp_path / "products.svg").read_bytes() == first


def test_shares_and_ratios_of_known_times(bench: Any) -> None:
    """The time of a dense product is scaled to our operations: three times for the forward and both gradients."""
    times = {"run": 10.0, "cublas_fp8": 9.0, "cublas_bf16": 12.0, "torch_grouped_mm_bf16": 18.0,
             "torch_scaled_grouped_mm": 10.9, "copy": 1.0}  # fmt: skip
    each = clock(times)
    skewed = shapes.TINY.products._replace(large=shapes.TINY.products.large[1:], small=())  # torch alone
    fwd = {line.peer: line for line in bench("grouped_mm_fwd", products=skewed, each=each)}
    assert (fwd["cublas_fp8"].of_roof, fwd["cublas_fp8"].ratio) == (0.9, 0.9)
    assert (fwd["torch_grouped_mm_bf16"].ratio, fwd["torch_grouped_mm_bf16"].peer_of_roof) == (1.8, 0.667)
    assert fwd["torch_scaled_grouped_mm"].peer_of_roof == round(9 / 10.9, 3)
    both = {line.peer: line for line in bench("grouped_mm_autograd", products=skewed, each=each)}
    assert (both["cublas_fp8"].peer_us, both["cublas_fp8"].of_roof) == (27.0, 2.7)
    assert both["torch_grouped_mm_bf16"].peer_of_roof == 2.0


def test_a_wrong_product_is_an_error_and_the_others_are_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong value of ours fails the case; a wrong peer loses its line only."""
    right = grouped_gemm.torch_call

    def wrong(op: str, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        outputs = right(op, *tensors, **options)
        if op == "grouped_wgrad_fold":
            outputs[0][-1, 0, 0] += outputs[0].abs().max()
        return outputs

    monkeypatch.setattr(grouped_gemm, "torch_call", wrong)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda a, b, *_, **__: torch.ones(a.shape[0], b.shape[2]))
    with pytest.raises(RuntimeError, match="grouped_mm_wgrad balanced") as error:
        bench("grouped_mm_wgrad", "grouped_mm_dgrad")
    assert str(error.value).startswith("gpu: grouped_mm_dgrad: peer torch_scaled_grouped_mm; ")
    assert "values are past the bound of their sums" in capsys.readouterr().err


def test_bytes_that_differ_on_a_gpu_are_an_error(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If both frontends run the CUDA kernel; other implementations sum in their own order."""
    balanced = shapes.TINY.products._replace(large=shapes.TINY.products.large[:1], small=())
    monkeypatch.setattr(gpu_grouped_gemm, "differing", lambda a, b: 3)
    assert any(line.error.get("values_that_differ") == 3 for line in bench("grouped_mm_dgrad",
                                                                                     products=balanced))  # fmt: skip
    uses = {"grouped_mm_fold": SimpleNamespace(uses="cuda, sm_90"), "grouped_mm_mx": SimpleNamespace(uses="triton")}
    for frontend in ("torch_frontend", "jax_frontend"):
        monkeypatch.setattr(getattr(gpu_grouped_gemm, frontend), "capabilities", lambda *_: uses)
    with pytest.raises(RuntimeError, match=r"^gpu: grouped_mm_dgrad in JAX$"):
        bench("grouped_mm_dgrad", "grouped_mm_exact", products=balanced)
    assert "3 values differ from torch's" in capsys.readouterr().err


def test_a_check_samples_every_tile(bench: Any) -> None:
    """A long group is checked at its edges and in some rows of every 256; one wrong tile is found."""
    rows = error_check._sampled(1000, 21000, torch.device("cpu"))
    assert rows.unique().equal(rows)
    assert {1000, 1255, 20744, 20999} <= set(rows.tolist())
    assert set(((rows - 1000) // 256).tolist()) == set(range(79))
    p = Product(4096, 64, 32, 2)
    o = operands(p, "cpu")
    tile = (slice(256, 512), slice(16, 32))
    for case, where, factor in ((grouped_gemm.forward(p, o), tile, 1.1),
                                (grouped_gemm.weight_gradient(p, o), (1, 3, 5), float("nan"))):  # fmt: skip
        (out,) = case.run()
        assert case.check((out,))["sqnr_db"] == pytest.approx(55.6, abs=1)
        out[where] *= factor
        with pytest.raises(AssertionError, match="past the bound of their sums"):
            case.check((out,))


def test_every_other_round_runs_backwards(bench: Any) -> None:
    order: list[str] = []
    device_timing.batches({n: (partial(order.append, n), lambda _: None) for n in "abc"}, calls=1, samples=1)
    assert "".join(order[::2]) == "abc" + "cba" + "abc"


def test_a_sample_is_the_mean_of_two_rounds(bench: Any) -> None:
    """If every other round takes longer, all samples are equal."""
    found = device_timing._there_and_back({"slow on the way back": [1.0, 1.2, 1.0, 1.2, 1.0, 1.2]})
    assert {(s.us, s.spread, s.n) for s in found.values()} == {(1.1e6, 0.0, 3)}


def test_group_ends(bench: Any) -> None:
    """Group ends are multiples of 32, the last is M. skewed: half of the rows in one group, none in the next."""
    for p in (*shapes.H200.products.large, *shapes.H200.products.small, *shapes.TINY.products.large):
        ends = p.group_ends
        sizes = np.diff(ends, prepend=0)
        assert (len(ends), ends.dtype, int(ends[-1])) == (p.G, np.int32, p.M)
        assert ((sizes % 32 == 0) & (sizes >= 0)).all()
        assert (sizes[0] == p.M // 2 and sizes[1] == 0) if p.routing == "skewed" else (sizes > 0).all()
    assert len(set(np.diff(shapes.H200.products.large[0].group_ends).tolist())) > 4


def test_a_roofline_needs_its_roofs(bench: Any) -> None:
    case = {"M": 131072, "K": 7168, "N": 2048, "G": 8}
    row = {"op": "grouped_mm_fwd", "frontend": "torch", "case": case, "flops": 10**12, "nbytes": 10**9, "us": 1000.0,
           "peer": "cublas_fp8", "peer_us": 800.0}  # fmt: skip
    with pytest.raises(ValueError, match="no line for bf16, copy"):
        roofline.roofs([row])
    measured = roofline.roofs(
        [row, row | {"peer": "cublas_bf16", "peer_us": 1600.0}, row | {"peer": "copy", "peer_us": 250.0}]
    )
    assert (measured.nbytes_per_s, measured.ceilings) == (4e12, {"FP8": 1250.0, "bf16": 625.0})
    ours, bf16 = roofline.points([row | {"peer": "torch_grouped_mm_bf16", "peer_us": 2000.0}])
    assert (ours.intensity, ours.tflops, bf16.tflops) == (1000.0, 1000.0, 500.0)
    assert bf16.intensity == 10**12 / (2 * (131072 * 7168 + 8 * 2048 * 7168 + 131072 * 2048))
