"""The MoE layer against SonicMoE, without the package: SonicMoE is its definition, an expert at a time."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import gpu
from benchmarks.cases import moe_layer, shapes
from benchmarks.clocks import device_timing
from benchmarks.figures import results, speed
from benchmarks.figures.tables import table_sonic_moe
from benchmarks.peers import moe_layer as plain
from benchmarks.peers import sonic_moe

LAYER = shapes.TINY.moe_layers[0]
Halves = Callable[[Tensor], tuple[Tensor, ...]]


def alternating_rows(h: Tensor) -> tuple[Tensor, ...]:
    """Gate and up, as SonicMoE's moe.py takes them."""
    return h[:, ::2], h[:, 1::2]


def definition(
    x: Tensor, router: Tensor, w1: Tensor, b1: None, w2: Tensor, b2: None, k: int, stream: int,
    halves: Halves = alternating_rows,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """SonicMoE's layer: w1 (2 F, D, E) and w2 (D, F, E); of equal logits the lower index."""
    assert w1.stride()[2] > w1.stride()[0] > w1.stride()[1] == 1
    assert w2.stride()[2] > w2.stride()[0] > w2.stride()[1] == 1
    logits, experts = F.linear(x, router).float().sort(dim=-1, descending=True, stable=True)
    probs = logits[:, :k].softmax(-1)
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(w1.shape[2]):
        gate, up = halves(F.linear(x, w1[:, :, expert]))
        chosen = (probs * (experts[:, :k] == expert)).sum(-1, keepdim=True)
        y = y + chosen * F.linear(F.silu(gate) * up, w2[:, :, expert]).float()
    return y.to(x.dtype), None, None


@dataclass(frozen=True)
class GemmConfig:
    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    is_dynamic_persistent: bool


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules with the names that the peer reads; `sonicmoe` computes the definition."""
    contents: dict[str, dict[str, Any]] = {
        "sonicmoe": {"moe_TC_softmax_topk_layer": definition, "__spec__": ModuleSpec("sonicmoe", None)},
        "sonicmoe.functional.reduction_over_k_gather": {
            "token_gather_sum_kernel": type("Kernel", (), {"configs": list(range(34))})()
        },
        "quack.gemm_config": {"GemmConfig": GemmConfig, "_get_sm90_configs": lambda *_: list(range(44))},
        "quack.autotuner": {"Autotuner": type("Autotuner", (), {"_precompile": lambda *_, **__: 1 / 0})},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sonic_moe, "version", lambda: "0.1.2")
    sonic_moe._sonic_moe.cache_clear()
    yield sys.modules
    sonic_moe._sonic_moe.cache_clear()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One sample of everything, and formulas as written."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "in_a_row", partial(device_timing.in_a_row, rounds=2, groups=1))
    plain._swiglu.cache_clear()
    yield
    plain._swiglu.cache_clear()


def measured() -> list[Any]:
    return list(gpu.lines(["sonic_moe"], shapes.TINY, "cpu"))


def test_rows_of_gate_and_up_alternate() -> None:
    """w13[:, 2 f] is w1[:, f] and w13[:, 2 f + 1] is w3[:, f]; the gradients come back in the plain layout."""
    weights = moe_layer.layer_inputs(LAYER, "cpu").weights
    router, w13, w2 = sonic_moe.sonic_weights(weights)
    w1, w3 = (w.detach().float().numpy() for w in (weights.w1, weights.w3))
    want = np.empty((len(w1), 2 * w1.shape[1], w1.shape[2]), np.float32)
    for f in range(w1.shape[1]):
        want[:, 2 * f], want[:, 2 * f + 1] = w1[:, f], w3[:, f]
    np.testing.assert_array_equal(w13.detach().float().numpy(), want)
    for leaf, weight in zip(sonic_moe.plain_gradients(sonic_moe.SonicWeights(router, w13, w2)), weights, strict=True):
        assert torch.equal(leaf, weight)
        assert leaf.data_ptr() != weight.data_ptr()  # an update of one is not an update of the other


def test_of_equal_logits_the_lower_index_is_selected() -> None:
    """All logits are equal: the first k experts have equal weights."""
    inputs = moe_layer.layer_inputs(LAYER, "cpu")
    t, k = LAYER.tokens, LAYER.top_k
    weights = inputs.weights._replace(router=torch.zeros_like(inputs.weights.router))
    experts, probs = torch.arange(k).expand(t, k), torch.full((t, k), 1 / k)
    want = plain.torch_experts(inputs.x, experts, probs, weights)
    assert torch.equal(sonic_moe.reference_layer(inputs.x, weights, k), want)


def test_the_layer_is_checked_compared_and_reported(package: Any) -> None:
    lines = measured()
    assert {line.peer for line in lines} == {"sonic_moe", "recipe_bf16", "plain_torch_bf16"}
    for line in lines:
        assert (line.op, line.frontend, line.case["recipe"]) == ("sonic_moe_fwd_bwd", "torch", "mxfp8")
        assert (line.case["sonic_moe"], line.case["clock"]) == ("0.1.2", "in a row")
        assert line.error["sqnr_db"] >= moe_layer.MIN_SQNR_DB
        assert line.error["sonic_moe_sqnr_db"] > 40
        assert results.row(results.cells(line))
    run = asdict(results.Run("1x GPU", "a" * 40))
    rows = [json.loads(json.dumps({**run, **asdict(line)})) for line in lines]
    sonic = next(row for row in rows if row["peer"] == "sonic_moe")
    sonic |= {"us": 2000.0, "peer_us": 1500.0, "ratio": 0.75, "peer_joules": 6.0, "joules": 4.0}
    text = table_sonic_moe.table(rows)
    assert text.count(f"\n| {', '.join(map(str, LAYER))} |") == 1
    assert " / 1.50 / 2.00 (" in text
    assert "| 0.75x |" in text
    assert "| 6.0 / 4.0 |" in text
    (headline,) = speed.headlines(rows, [])
    assert (headline.what, headline.rows) == ("MoE layer of SonicMoE in bf16", [sonic])


def test_a_search_has_few_configurations_and_compiles_in_this_process(package: Any) -> None:
    assert sonic_moe._sonic_moe() is package["sonicmoe"]
    configs = package["quack.gemm_config"]._get_sm90_configs
    for epilogue in (None, "gated", "dgated"):
        assert len(set(configs(epilogue, True))) == 2
    kernel = package["sonicmoe.functional.reduction_over_k_gather"].token_gather_sum_kernel
    assert len(kernel.configs) == len(sonic_moe.SUM_BLOCKS)
    assert package["quack.autotuner"].Autotuner()._precompile(1, configs=[]) is None


def test_a_search_that_was_read_before_is_an_error(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", ModuleType("quack.gemm_interface"))
    with pytest.raises(RuntimeError, match=r"sonic_moe: got quack\.gemm_interface imported before"):
        sonic_moe._sonic_moe()


def test_another_layout_is_an_error(
    package: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that takes gate and up from the two halves of h computes another layer."""
    other = partial(definition, halves=lambda h: h.chunk(2, 1))
    monkeypatch.setattr(package["sonicmoe"], "moe_TC_softmax_topk_layer", other)
    with pytest.raises(RuntimeError, match=r"^gpu: sonic_moe \(96, 64, 96, 8, 2\)$"):
        measured()
    assert f"dB from bf16; expected {moe_layer.MIN_SONIC_DB}" in capsys.readouterr().err


def test_without_the_package_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sonic_moe, "find_spec", lambda _: None)
    assert measured() == []
    assert "sonic-moe: not installed" in capsys.readouterr().out
