"""The conversion of a model's Linear layers: what is chosen, what is kept, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mxep.torch_frontend import MoE, MXLinear, Recipe, RouterConfig, convert_linear
from torch import Tensor, nn

from ..products.test_linear import Launched

FOLD = Recipe.parse("mxfp8", compute="fold")


def meta(n: int, k: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(k, n, bias=bias, device="meta")


class Attention(nn.Module):
    def __init__(self, d: int, heads_d: int, make: Callable[[int, int], nn.Linear] = meta) -> None:
        super().__init__()
        self.q_proj, self.o_proj = make(d, d), make(d, d)
        self.k_proj, self.v_proj = make(heads_d, d), make(heads_d, d)

    def forward(self, x: Tensor) -> Tensor:
        rest = torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(self.q_proj(x) * rest.sigmoid())


class MLP(nn.Module):
    def __init__(self, d: int, f: int, make: Callable[[int, int], nn.Linear] = meta) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = make(f, d), make(f, d), make(d, f)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, d: int, heads_d: int, f: int, make: Callable[[int, int], nn.Linear] = meta) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.attention, self.mlp, self.router = Attention(d, heads_d, make), MLP(d, f, make), make(64, d)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class Model(nn.Module):
    """The sizes of Llama 3.1 8B, if there are no others."""

    def __init__(
        self, d: int = 4096, heads_d: int = 1024, f: int = 14336, vocabulary: int = 128256,
        make: Callable[[int, int], nn.Linear] = meta,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d, device=make(32, 32).weight.device)
        self.layers = nn.ModuleList([Block(d, heads_d, f, make) for _ in range(2)])
        self.lm_head = make(vocabulary, d)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def real(n: int, k: int) -> nn.Linear:
    return nn.Linear(k, n, bias=False)


def small(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(64, 32, 96, 128, real)


def in_blocks(module: nn.Module, name: str) -> bool | None:
    """A filter for sizes that gain nothing."""
    return True if name.startswith("layers") and not name.endswith("router") else None


ALL = ("attention.q_proj", "attention.o_proj", "attention.k_proj", "attention.v_proj",
       "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def test_the_layers_of_a_model_that_gain() -> None:
    """k_proj and v_proj gain with q_proj, with which they share the operands of x."""
    model = Model()
    report = convert_linear(model)
    assert [row.name for row in report.converted] == [f"layers.{i}.{name}" for i in range(2) for name in ALL]
    others = {f"layers.{i}.router": "a router" for i in range(2)} | {"lm_head": "a head"}
    assert dict(report.others) == others
    assert report.converted[2].same_rows == ("layers.0.attention.q_proj", "layers.0.attention.v_proj")
    assert "  layers.0.mlp.up_proj       K   4096  N  14336  x with layers.0.mlp.gate_proj\n" in str(report)
    assert "  lm_head                    runs as before: a head" in str(report)
    for name, module in model.named_modules():
        assert isinstance(module, MXLinear) == (name in [row.name for row in report.converted])


@pytest.mark.parametrize(
    ("model", "reasons"),
    [
        (nn.Sequential(meta(4096, 4096), meta(1024, 1024)), {"1": "too small to gain, N K / (N + K) = 512"}),
        (nn.Sequential(meta(4096, 4096), meta(4100, 4096)), {"1": "N = 4100 is no positive multiple of 32"}),
        (nn.Sequential(meta(4096, 4096), meta(4096, 4100)), {"1": "K = 4100 is no positive multiple of 32"}),
        (
            nn.Sequential(meta(4096, 4096), nn.MultiheadAttention(64, 2)),
            {"1.out_proj": "a NonDynamicallyQuantizableLinear"},
        ),
        (nn.ModuleDict({"gate": meta(4096, 4096), "output": meta(4096, 4096)}), {"output": "a head"}),
    ],
    ids=["small", "N", "K", "a subclass", "a square gate and a head"],
)
def test_layers_that_are_left(model: nn.Module, reasons: dict[str, str]) -> None:
    report = convert_linear(model)
    assert dict(report.others) == reasons
    assert len(report.converted) == 1


def test_the_filter_decides_before_the_rules() -> None:
    model = Model()
    answers = {"lm_head": True, "layers.0.mlp.up_proj": False}
    report = convert_linear(model, lambda module, name: answers.get(name))
    assert isinstance(model.lm_head, MXLinear)
    assert dict(report.others)["layers.0.mlp.up_proj"] == "filter_fn returns False"
    gate = next(row for row in report.converted if row.name == "layers.0.mlp.gate_proj")
    assert gate.same_rows == ()
    assert model.layers[0].mlp.gate_proj.shared_rows is None


def test_names_values_identities_and_hooks_are_kept() -> None:
    model = small()
    want, module, called = copy.deepcopy(model.state_dict()), model.layers[0].mlp.down_proj, []
    parameters = dict(model.named_parameters())
    module.register_forward_hook(lambda *of: called.append(1))
    convert_linear(model, in_blocks, FOLD)
    assert model.layers[0].mlp.down_proj is module
    assert all(parameters[name] is p for name, p in model.named_parameters())
    got = model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    model(torch.arange(12).view(2, 6))
    assert called == [1]

    plain = small(1)
    plain.load_state_dict(got)  # a checkpoint of a converted model is a checkpoint of the model, and the reverse
    fresh = small(2)
    convert_linear(fresh, in_blocks, FOLD)
    fresh.load_state_dict(plain.state_dict())
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(fresh(ids), model(ids))


def test_a_model_converts_again() -> None:
    model, plain = small(), small()
    convert_linear(model, in_blocks, FOLD)
    assert convert_linear(model, in_blocks, "bf16").recipe.name == "bf16"
    assert {m.recipe.name for m in model.modules() if isinstance(m, MXLinear)} == {"bf16"}
    convert_linear(plain, in_blocks, "bf16")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model(ids), plain(ids))


@pytest.mark.parametrize("copied", [False, True])
def test_layers_of_the_same_rows_quantize_them_once(copied: bool) -> None:
    """q, k and v; gate and up. The results are the same as of layers that quantize their own."""
    model = small()
    convert_linear(model, in_blocks, FOLD)
    model = copy.deepcopy(model) if copied else model
    ids = torch.arange(64).view(2, 32)
    with Launched() as shared:
        out = model(ids)
    out.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    for module in model.modules():
        if isinstance(module, MXLinear):
            module.shared_rows = None
    model.zero_grad()
    with Launched() as alone:
        want = model(ids)
    want.sum().backward()
    assert shared.found["quantize_both_fold"] == 2 * 4
    assert alone.found["quantize_both_fold"] == 2 * 7
    assert torch.equal(out, want)
    pairs = zip(gradients, [p.grad for p in model.parameters()], strict=True)
    assert all(g is h or torch.equal(g, h) for g, h in pairs)  # type: ignore[arg-type]


def test_a_moe_keeps_its_router_and_experts() -> None:
    model = nn.Sequential(meta(2048, 2048), MoE(2048, 64, 64, RouterConfig(2), device="meta"))
    report = convert_linear(model)
    assert [row.name for row in report.converted] == ["0"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.projection = nn.Linear(64, 64)
        self.projection.weight = self.embedding.weight


class OfItself(nn.Linear):
    pass


def with_own_forward() -> nn.Module:
    model = nn.Sequential(real(64, 64))
    model[0].forward = lambda x: x  # type: ignore[method-assign]
    return model


def yes(module: nn.Module, name: str) -> bool:
    return True


BAD: dict[str, tuple[type[Exception], str, Callable[[], Any], Any]] = {
    "no Linear": (ValueError, r"model: got LayerNorm without a torch\.nn\.Linear", lambda: nn.LayerNorm(4), None),
    "none chosen": (ValueError, r"model: got no Linear to convert: model: too small", lambda: real(32, 32), None),
    "tied": (ValueError, r"projection\.weight: got a weight tied to embedding\.weight; allowed", Tied, yes),
    "N": (ValueError, r"0: got N = 40; allowed: positive multiples of 32", lambda: nn.Sequential(real(40, 64)), yes),
    "half": (TypeError, r"0\.weight: got dtype torch\.float16", lambda: nn.Sequential(real(64, 64)).half(), yes),
    "a subclass": (TypeError, r"0: got a OfItself", lambda: nn.Sequential(OfItself(64, 64)), yes),
    "its own forward": (ValueError, r"0\.forward: got a function of the instance", with_own_forward, yes),
    "a filter": (TypeError, r"filter_fn: got 'all'", small, "all"),
    "a list": (TypeError, r"model: got list", list, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str) -> None:
    error, message, build, filter_fn = BAD[name]
    model = build()
    with pytest.raises(error, match=f"convert_linear: {message}"):
        convert_linear(model, filter_fn)
    if isinstance(model, nn.Module):
        assert not [module for module in model.modules() if isinstance(module, MXLinear)]
