"""The MoE layer: tokens alone and in batches, dtypes, statistics, graphs, autocast; values: tests/conformance/layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mxep.torch_frontend import GroupedExperts, MoE, Recipe, RouterConfig, SharedExpert
from mxep.torch_frontend.exchange.shards import Ranks
from mxep.torch_frontend.ops import direct
from torch import Tensor

from ...layer_options import layer_options
from ..exchange.ep_repeated import same_as_two_experts

D, HIDDEN, E, TOP_K = 64, 96, 8, 2


def layer(recipe: str = "bf16", seed: int = 0, **options) -> MoE:
    torch.manual_seed(seed)
    return MoE(D, HIDDEN, E, recipe=recipe, **layer_options(TOP_K, **options))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed))


def gradients(moe: MoE, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*moe.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [x, *parameters], tokens(*y.shape[:-1], seed=2).to(y.dtype))
    return dict(zip(("x", *names), grads, strict=True))


def test_a_token_does_not_depend_on_its_batch() -> None:
    moe, x = layer("mxfp8_wgrad_with_hp"), tokens(40)
    together, _ = moe(x)
    backwards, _ = moe(x.flip(0))
    assert torch.equal(together, backwards.flip(0))


def rows_saved(prob_in) -> int:
    """Rows of D bf16 kept for the backward; among them may be what the experts returned."""
    moe, kept = layer("bf16", prob_in=prob_in), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        moe(tokens(50))
    return sum(t.dtype == torch.bfloat16 and t.dim() == 2 and t.shape[1] == D for t in kept)


def test_weights_inside_swiglu_save_no_expert_outputs() -> None:
    assert rows_saved("combine") == rows_saved("swiglu") + 1


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
@pytest.mark.parametrize("prob_in", ["combine", "swiglu"])
def test_one_device_computes_what_a_dispatch_to_itself_does(recipe: str, prob_in) -> None:
    moe, x, dy = layer(recipe, prob_in=prob_in), tokens(70).requires_grad_(), tokens(70, seed=2)

    inputs = (x, *moe.parameters())
    want, _ = moe(x)
    want = (want, *torch.autograd.grad(want, inputs, dy))
    moe.experts.expert_parallel = Ranks("", 1, E, "cpu")
    got, _ = moe(x)
    got = (got, *torch.autograd.grad(got, inputs, dy))
    assert all(map(torch.equal, got, want))


def test_on_one_device_a_token_is_quantized_once_for_all_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    for name in ("quantize_row", "quantize_row_packed"):
        real = getattr(direct, name)
        monkeypatch.setattr(direct, name, lambda x, *rest, real=real: calls.append(tuple(x.shape)) or real(x, *rest))
    layer("mxfp8")(tokens(50))
    assert [shape for shape in calls if len(shape) == 2] == [(50, D)]


def test_shapes_dtypes_and_runs() -> None:
    moe, x = layer("mxfp8"), tokens(2, 3)
    y, _ = moe(x)
    assert torch.equal(y, moe(x.view(-1, D))[0].view(2, 3, D))
    assert moe(x.bfloat16())[0].dtype == torch.bfloat16
    half = layer("mxfp8", dtype=torch.bfloat16)
    assert half(x)[0].dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_no_tokens() -> None:
    moe, x = layer("mxfp8_wgrad_with_hp"), tokens(0).requires_grad_()
    y, stats = moe(x)
    (y.sum() + stats.aux_loss).backward()
    assert y.shape == (0, D)
    assert stats.counts.tolist() == [0] * E
    assert all((p.grad == 0).all() for p in moe.parameters())


def test_stats() -> None:
    moe, x = layer(), tokens(50)
    _, stats = moe(x)
    probabilities = F.linear(x, moe.router.weight).softmax(-1)
    counts = torch.bincount(probabilities.topk(TOP_K).indices.flatten(), minlength=E)
    assert torch.equal(stats.counts.long(), counts)
    torch.testing.assert_close(stats.aux_loss, E * (counts / counts.sum() * probabilities.mean(0)).sum())
    assert stats.overflow == 0
    balanced = copy.deepcopy(moe)
    torch.nn.init.zeros_(balanced.router.weight)
    torch.testing.assert_close(balanced(x)[1].aux_loss, torch.ones(()))
    (gradient,) = torch.autograd.grad(stats.aux_loss, moe.router.weight)
    assert (gradient != 0).any()


def test_a_nan_token_stays_alone() -> None:
    moe, x = layer("mxfp8_wgrad_with_hp"), tokens(40)
    want, _ = moe(x)
    x[7] = torch.nan
    got, _ = moe(x)
    others = torch.arange(40) != 7
    assert got[7].isnan().all()
    assert torch.equal(got[others], want[others])


def test_state_dict_is_plain() -> None:
    shapes = {name: tuple(p.shape) for name, p in layer().state_dict().items()}
    assert shapes == {
        "router.weight": (E, D),
        "experts.w1": (E, HIDDEN, D),
        "experts.w2": (E, D, HIDDEN),
        "experts.w3": (E, HIDDEN, D),
    }


@pytest.mark.parametrize(
    ("recipe", "prob_in"),
    [
        ("mxfp8_wgrad_with_hp", "combine"),
        (Recipe.parse("mxfp8", compute="fold"), "swiglu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "folded",
)
def test_whole_graph(recipe: Recipe | str, prob_in) -> None:
    torch._dynamo.reset()
    moe, x = layer(recipe, prob_in=prob_in), tokens(20).requires_grad_()
    want, stats = moe(x)
    got, compiled_stats = torch.compile(moe, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got, want)
    assert torch.equal(stats.counts, compiled_stats.counts)
    exact = gradients(moe, want, x)
    for name, gradient in gradients(moe, got, x).items():
        assert torch.equal(gradient, exact[name]), name


@pytest.mark.parametrize(
    ("error", "message", "run"),
    [
        (ValueError, r"MoE: router: got top_k=9; allowed: 1 to num_experts = 8",
         lambda: MoE(D, HIDDEN, E, RouterConfig(9))),
        (TypeError, r"MoE: router: got 2; allowed: a RouterConfig, such as RouterConfig\(top_k=2\)",
         lambda: MoE(D, HIDDEN, E, 2)),  # type: ignore[arg-type]
        (ValueError, r"scales: got 'float32' with operands 'mxfp8'; allowed: 'power_of_two'",
         lambda: Recipe.parse("mxfp8", scales="float32")),
        (ValueError, r"rounding: got FLOOR with operands 'fp8_blockwise'; allowed: RCEIL",
         lambda: Recipe.parse("fp8_blockwise", rounding="floor")),
        (ValueError, r"wgrad_with_hp: got False with operands 'fp8_rowwise'",
         lambda: Recipe.parse("fp8_rowwise", wgrad_with_hp=False)),
        (ValueError, r"alignment: got 48", lambda: layer(Recipe("mxfp8", alignment=48))),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], message: str, run) -> None:
    with pytest.raises(error, match=message):
        run()


def test_underflowed_sigmoids_give_zeros() -> None:
    moe = layer("mxfp8", score_func="sigmoid")
    torch.nn.init.constant_(moe.router.weight, -1000)
    y, stats = moe(tokens(4).abs())
    assert (y == 0).all()
    assert stats.aux_loss == 0


def test_autocast_to_fp16_is_refused() -> None:
    """Experts of other libraries: test_transformers.py, test_convert.py."""
    moe, x = layer("mxfp8"), tokens(4)
    message = (
        r"torch\.autocast: got dtype torch\.float16; allowed: torch\.bfloat16; or torch\.autocast\('cpu', enabled=Fa"
    )
    with torch.autocast("cpu", torch.float16):
        for op, call in (("MoE", lambda: moe(x)), ("forward", lambda: moe.experts(x[:0], torch.zeros(E).int()))):
            with pytest.raises(TypeError, match=f"{op}: {message}"):
                call()
        with pytest.raises(TypeError, match=message):
            torch.compile(moe, backend="eager")(x)
        with torch.autocast("cpu", enabled=False):
            got = moe(x)[0]
    assert torch.equal(got, moe(x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prob_in", ["combine", "swiglu", "input"])
def test_autocast_to_bf16_changes_no_output(prob_in: str, dtype: torch.dtype) -> None:
    moe, x = layer("mxfp8", prob_in=prob_in, shared=SharedExpert(32), dtype=dtype), tokens(40).to(dtype)
    want = moe(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = moe(x)[0]
        if (prob_in, dtype) == ("swiglu", torch.float32):
            torch._dynamo.reset()
            assert torch.equal(torch.compile(moe, fullgraph=True, backend="eager")(x)[0], want)
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_autocast_changes_no_choice() -> None:
    moe, x = layer(), tokens(64)
    with torch.autocast("cpu", torch.bfloat16):
        y, stats = moe(x)
    assert torch.equal(y, moe(x)[0])
    assert torch.equal(stats.counts, moe(x)[1].counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initial_weights_are_normal(dtype: torch.dtype) -> None:
    """Of 1 / sqrt(fan in), without values that a normal number never has: `tests/gpu/test_init.py` runs it there."""
    torch.manual_seed(0)
    for w in GroupedExperts(256, 128, 8, dtype=dtype).parameters():
        w = w.detach().float() * w.shape[-1] ** 0.5
        assert abs(w.std() - 1) < 0.01
        assert w.abs().max() < 6.5
        assert len(w.unique()) > 1000


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_rowwise"])
@pytest.mark.parametrize("prob_in", ["combine", "swiglu", "input"])
def test_an_expert_that_a_token_has_twice_counts_twice(prob_in: str, recipe: str) -> None:
    """Over two ranks in ep_ranks.py."""
    same_as_two_experts(None, prob_in, None, recipe)
