"""The router: the differentiable choice, routing from outside, shared experts, the balance."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mxep.core_kernels.reference import choice
from mxep.torch_frontend import MoE, RouterConfig, SharedExpert, route, update_selection_bias
from mxep.torch_frontend.routing.router import Routing, route_tokens, router_logits
from torch import Tensor

from ... import routed_layers
from ...compare import gemm_bound, sqnr_db
from ...layer_options import layer_options
from ...routed_layers import DIM, EXPERTS, HIDDEN, LAYERS, SHARED, TOP_K
from ..inputs import rows


def layer_of(case: routed_layers.RoutedLayer, recipe: str) -> MoE:
    router = RouterConfig(TOP_K, selection_bias=len(case.bias) > 0, **case.options)
    moe = MoE(DIM, HIDDEN, EXPERTS, router, shared=SharedExpert(SHARED), recipe=recipe)
    router, w1, w3, w2, shared = case.parameters
    state = {"router.weight": router, "experts.w1": w1, "experts.w2": w2, "experts.w3": w3}
    state |= dict(zip(("shared_expert.w1", "shared_expert.w3", "shared_expert.w2"), shared, strict=True))
    state |= {"selection_bias": case.bias} if len(case.bias) else {}
    moe.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return moe


def results(moe: MoE, case: routed_layers.RoutedLayer) -> dict[str, Tensor]:
    x = torch.from_numpy(case.x).requires_grad_()
    y, _ = moe(x)
    names, parameters = zip(*moe.named_parameters(), strict=True)
    names = [
        n.replace("router.weight", "router").replace("experts.", "").replace("shared_expert.", "shared.") for n in names
    ]
    grads = torch.autograd.grad(y, [x, *parameters], torch.from_numpy(case.dy))
    return {"y": y, **dict(zip(("x", *names), grads, strict=True))}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_options_is_its_definition(name: str) -> None:
    """In bf16, the worst of 8 seeds: 44.8 dB, 43.1 for the router, whose gradient sums few terms, less 0.8."""
    case = LAYERS[name]
    got, want = results(layer_of(case, "bf16"), case), case.expected()
    assert got.keys() == want.keys()
    measured = {key: sqnr_db(got[key], value) for key, value in want.items()}
    assert measured.pop("router") > 42.3
    assert min(measured.values()) > 44.0, measured


def test_a_layer_with_options_compiles() -> None:
    torch._dynamo.reset()
    case = LAYERS["deepseek_v3"]
    moe = layer_of(case, "mxfp8")
    want = results(moe, case)
    got = results(torch.compile(moe, fullgraph=True, backend="aot_eager"), case)
    for (name, a), b in zip(want.items(), got.values(), strict=True):
        assert torch.equal(a, b), name


def test_layers_of_two_scales_compile() -> None:
    """Dynamo traces a number of which it has seen two values."""
    torch._dynamo.reset()
    x = torch.ones(5, DIM)
    for scale in (1.0, 2.5, 1.5):
        moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, route_scale=scale))
        assert torch.equal(torch.compile(moe, fullgraph=True, backend="aot_eager")(x)[0], moe(x)[0])


def test_the_selection_bias_stays_in_float32() -> None:
    moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, selection_bias=True))
    assert moe.selection_bias is not None
    moe.selection_bias += 1 + 2**-12
    for of in (moe.to(torch.bfloat16), moe.bfloat16(), moe.to("cpu", torch.bfloat16)):
        assert of.selection_bias is not None
        assert (of.selection_bias == 1 + 2**-12).all()
        assert of.selection_bias.dtype == torch.float32
    assert moe.router.weight.dtype == torch.bfloat16
    moe(torch.ones(3, DIM, dtype=torch.bfloat16))
    assert moe.to("meta").selection_bias.is_meta  # type: ignore[union-attr]


def test_cached_weights_cover_the_shared_expert() -> None:
    case = LAYERS["deepseek_v3"]
    moe, x = layer_of(case, "mxfp8"), torch.from_numpy(case.x)
    want, _ = moe(x)
    with moe.cached_weights():
        assert moe.shared_expert is not None
        assert moe.shared_expert._held is not None
        assert torch.equal(moe(x)[0], want)


# --- the choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_the_gradient_of_weights_and_shares(score_func) -> None:
    """Measured at least 137.1 dB, less 3."""
    logits, dweights, dshares = rows(40, 12, dtype=torch.float32), rows(40, 3).float(), rows(12).float()
    logits.requires_grad_()
    routing = route(logits, RouterConfig(3, score_func=score_func, route_scale=1.5))
    ((routing.weights * dweights).sum() + (routing.shares * dshares).sum()).backward()
    options = choice.Choice(3, score_func, route_scale=1.5)
    want = choice.route_vjp(dweights.numpy(), dshares.numpy(), logits.detach().numpy(), options)
    assert logits.grad is not None
    assert sqnr_db(logits.grad, want) > 134.1
    assert not routing.experts.requires_grad


def test_the_logits_of_bf16_values() -> None:
    """fp32 sums of bf16 products, forward; bf16 gradients of an fp32 gradient, 55.5 dB, which the exact gradients have
    too after their rounding, less 0.3. With one bf16 term for the gradient they have 52.4 at most."""
    x, weight, grad = rows(60, 64).requires_grad_(), rows(8, 64).requires_grad_(), rows(60, 8, dtype=torch.float32)
    grad = grad * 1.001  # bits that bf16 does not hold
    logits = router_logits(x, weight, None)
    x64, w64, g64 = (t.detach().double() for t in (x, weight, grad))
    assert logits.dtype == torch.float32
    gemm_bound(logits, x64 @ w64.T, x64.abs() @ w64.abs().T, 64)
    dx, dweight = torch.autograd.grad(logits, (x, weight), grad)
    assert dx.dtype == dweight.dtype == torch.bfloat16
    assert sqnr_db(dx, g64 @ w64) > 55.2
    assert sqnr_db(dweight, g64.T @ x64) > 55.2


@pytest.mark.parametrize("of_x", [True, False])
def test_the_gradients_of_experts_and_router_meet_in_one_sum(of_x: bool) -> None:
    """One rounding to bf16 of the whole gradient of x, 55.5 dB less 0.3; of x that needs none, no gradient at all."""
    x, weight = rows(60, 64).requires_grad_(of_x), rows(8, 64).requires_grad_()
    tokens, routing = route_tokens(x, weight, None, None, RouterConfig(2, score_func="sigmoid", normalize=False))
    assert torch.equal(tokens, x)
    assert tokens.requires_grad == of_x
    if not of_x:
        return
    (of_logits,) = torch.autograd.grad(routing.weights.sum(), x, retain_graph=True)
    dx = rows(60, 64) * of_logits.std()
    given = dx.clone()
    (got,) = torch.autograd.grad((tokens, routing.weights), x, (given, torch.ones_like(routing.weights)))
    assert torch.equal(given, dx), "the gradient of the experts is the caller's"
    logits = (x.detach().double() @ weight.detach().double().T).requires_grad_()
    logits.sigmoid().gather(1, routing.experts.long()).sum().backward()
    assert logits.grad is not None
    want = logits.grad @ weight.detach().double()
    assert sqnr_db(of_logits, want) > 55.2
    assert sqnr_db(got, want + dx.double()) > 55.2
    assert sqnr_db(of_logits + dx, want + dx.double()) < 54.7  # two roundings: 54.2


def test_an_infinite_gradient_of_a_logit_stays_infinite() -> None:
    x, weight = rows(3, 64).requires_grad_(), rows(8, 64)
    grad = torch.zeros(3, 8)
    grad[1, 5] = torch.inf
    (dx,) = torch.autograd.grad(router_logits(x, weight, None), x, grad)
    infinite = weight[5].float() * torch.inf
    assert torch.equal(dx, torch.stack([0 * infinite.sign(), infinite, 0 * infinite.sign()]).bfloat16())


def test_a_nan_logit() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, torch.nan]])
    assert route(logits, RouterConfig(2, score_func="softmax")).weights.isnan().all()
    assert route(logits, RouterConfig(2, score_func="sigmoid")).weights.isnan().all()
    experts, weights, _ = route(logits, RouterConfig(2, score_func="sigmoid", normalize=False))
    assert (experts.tolist(), weights.isnan().tolist()) == ([[3, 2]], [[True, False]])


def test_a_forced_balance() -> None:
    moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, force_balance=True), recipe="bf16")
    _, stats = moe(rows(40, DIM, dtype=torch.float32))
    assert stats.counts.tolist() == [40 * TOP_K // EXPERTS] * EXPERTS


def test_a_bias_of_the_router_is_added_to_the_logits() -> None:
    moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, bias=True), recipe="bf16")
    x = rows(40, DIM, dtype=torch.float32)
    with torch.no_grad():
        moe.router.bias.copy_(torch.arange(EXPERTS))
    y, stats = moe(x)
    chosen = route(F.linear(x, moe.router.weight, moe.router.bias), RouterConfig(TOP_K))
    assert torch.equal(y, moe(x, chosen.experts, chosen.weights)[0])
    assert stats.counts[-1] > 20
    (grad,) = torch.autograd.grad(y.sum() + stats.aux_loss, moe.router.bias)
    assert (grad != 0).any()


# --- routing from outside -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prob_in", ["combine", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_experts_chosen_outside(dtype: torch.dtype, prob_in) -> None:
    """The layer's own choice, given to it, changes no bit of y or of a gradient."""
    moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, prob_in=prob_in), recipe="mxfp8")
    x, dy = rows(5, 8, DIM, dtype=torch.float32).requires_grad_(), rows(5, 8, DIM).float()
    parameters = moe.experts.w1, moe.experts.w2, moe.experts.w3, moe.router.weight
    want, _ = moe(x)
    _, own = moe._route(x.view(-1, DIM))
    weights = own.weights.detach().view(5, 8, TOP_K).requires_grad_()
    got, stats = moe(x, own.experts.to(dtype).view(5, 8, TOP_K), weights)
    assert torch.equal(got, want)
    assert stats.aux_loss == 0
    *of_experts, of_router = torch.autograd.grad(want, parameters, dy)
    *again, dweights = torch.autograd.grad(got, (*parameters[:3], weights), dy)
    assert all(map(torch.equal, again, of_experts))
    (through,) = torch.autograd.grad(own.weights, moe.router.weight, dweights.view(-1, TOP_K))
    assert torch.equal(through, of_router)


def test_any_number_of_experts_chosen_outside() -> None:
    moe, x = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K), recipe="bf16"), rows(6, DIM, dtype=torch.float32)
    one = moe(x, torch.full((6, 1), 3), torch.ones(6, 1))[0]
    three = moe(x, torch.tensor([[3, 4, 5]]).repeat(6, 1), torch.tensor([[1.0, 0, 0]]).repeat(6, 1))[0]
    assert torch.equal(one, three)


# --- balance ------------------------------------------------------------------------------------------------


def test_the_selection_bias_balances() -> None:
    """The update moves each expert by the rate towards the mean; steps of it balance a skewed router."""
    bias = torch.tensor([0.5, -1.0, 0, 0])
    assert update_selection_bias(bias, torch.tensor([4, 0, 2, 2]), 0.25).tolist() == [0.25, -0.75, 0, 0]
    logits = rows(512, 8, dtype=torch.float32) + torch.arange(8) / 2
    bias = torch.zeros(8)
    for _ in range(100):
        counts = torch.bincount(
            route(logits, RouterConfig(2, score_func="sigmoid"), selection_bias=bias).experts.flatten(), minlength=8
        )
        bias = update_selection_bias(bias, counts, 0.01)
    assert counts.max() / counts.float().mean() < 1.2


# --- bad input ------------------------------------------------------------------------------------------------


def moe(x: Tensor | None = None, **arguments) -> object:
    x = torch.zeros(3, DIM) if x is None else x
    return MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K), recipe="bf16")(x, **arguments)


def made(**options) -> MoE:
    return MoE(DIM, HIDDEN, EXPERTS, **layer_options(TOP_K, **options))


LOGITS, ONES = torch.zeros(3, 8), torch.ones(3, 2)
IDS = ONES.long()


@pytest.mark.parametrize(
    ("error", "message", "run"),
    [
        (ValueError, r"route: router: got top_k=9; allowed: 1 to num_experts = 8",
         lambda: route(LOGITS, RouterConfig(9))),
        (TypeError, r"route: router: got 2; allowed: a RouterConfig, such as RouterConfig\(top_k=2\)",
         lambda: route(LOGITS, 2)),  # type: ignore[arg-type]
        (ValueError, r"route: selection_bias: got None; allowed: a tensor",
         lambda: route(LOGITS, RouterConfig(2, selection_bias=True))),
        (ValueError, r"RouterConfig: normalize: got False; allowed: True",
         lambda: RouterConfig(2, score_func="softmax_of_chosen", normalize=False)),
        (ValueError, r"RouterConfig: route_scale: got inf", lambda: RouterConfig(2, route_scale=float("inf"))),
        (ValueError, r"route: router: got num_groups=3; allowed: divisors of 8",
         lambda: route(LOGITS, RouterConfig(2, num_groups=3))),
        (ValueError, r"RouterConfig: top_k_groups: got 5; allowed: 1 to num_groups = 4",
         lambda: RouterConfig(2, num_groups=4, top_k_groups=5)),
        (ValueError, r"route: router: got top_k=3; allowed: 1 to the experts of the chosen groups = 2",
         lambda: route(LOGITS, RouterConfig(3, num_groups=4))),
        (ValueError, r"MoE: router: got num_groups=3", lambda: made(num_groups=3)),
        (ValueError, r"RouterConfig: force_balance: got True", lambda: made(num_groups=2, force_balance=True)),
        (TypeError, r"RouterConfig: selection_bias: got 'x'", lambda: made(selection_bias="x")),
        (ValueError, r"SharedExpert: hidden_dim: got 40", lambda: SharedExpert(40)),
        (ValueError, r"MoE: weights: got None; allowed: a tensor with experts", lambda: moe(experts=IDS)),
        (ValueError, r"MoE: experts: got 8 to 8; allowed: 0 to 7", lambda: moe(experts=8 * IDS, weights=ONES)),
        (ValueError, r"update_selection_bias: counts: got \[3, -1\]; allowed: counts of at least 0",
         lambda: update_selection_bias(torch.zeros(2), torch.tensor([3, -1]), 0.1)),
        (ValueError, r"update_selection_bias: rate: got 0", lambda: update_selection_bias(ONES[0], ONES[0].int(), 0)),
    ],
)  # fmt: skip
def test_bad_input(error: type[Exception], message: str, run) -> None:
    with pytest.raises(error, match=message):
        run()


def test_a_routing_has_names() -> None:
    routing = route(LOGITS, RouterConfig(2))
    assert isinstance(routing, Routing)
    assert routing.experts.dtype == torch.int32
    np.testing.assert_array_equal(routing.experts, [[0, 1]] * 3)
    assert torch.equal(routing.shares, torch.full((8,), 3 / 8))
