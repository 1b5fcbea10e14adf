"""The shapes of all benchmarks. M tokens, K row length, N output features, G local experts."""

from typing import NamedTuple

from mxep.core_kernels.cases import TIMED_LAYER, Layer
from mxep.core_kernels.grouped_gemm.cases import TIMED, TIMED_SMALL, Product


class Products(NamedTuple):
    """large: forward, both gradients, autograd. small: the forward product, quantization of its rows included."""

    large: tuple[Product, ...]
    small: tuple[Product, ...]


class MoELayer(NamedTuple):
    """A whole Mixture-of-Experts layer on one device."""

    tokens: int
    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int


class RoutedLayer(NamedTuple):
    """A layer whose experts are chosen by a routing of chosen_experts.py, or by a "random" router."""

    layer: MoELayer
    routing: str


class Shapes(NamedTuple):
    """Everything that a run on a GPU measures. uneven: layers with uneven groups, or with a prime number of tokens."""

    layer: Layer
    products: Products
    moe_layers: tuple[MoELayer, ...]
    uneven: tuple[RoutedLayer, ...] = ()


_MOE_LAYERS = (
    MoELayer(16384, 7168, 2048, 32, 8),
    MoELayer(16384, 2048, 1408, 64, 6),
    MoELayer(16384, 4096, 14336, 8, 2),
    MoELayer(4096, 2048, 768, 128, 8),
)
H200 = Shapes(
    layer=TIMED_LAYER,
    products=Products(large=TIMED, small=TIMED_SMALL),
    moe_layers=_MOE_LAYERS,
    uneven=tuple(
        RoutedLayer(layer._replace(tokens=tokens), routing)
        for layer in (_MOE_LAYERS[0], _MOE_LAYERS[2])
        for tokens, routing in ((16384, "one_expert"), (16384, "dirichlet"), (16381, "random"))
    ),
)
# The device finishes these launches before the host sends the next one, so the host's time is what remains.
TINY_LAYER = Layer(96, 64, (32,), num_experts=8, top_k=2, local_experts=2)
TINY = Shapes(
    TINY_LAYER,
    # Every kind of group: full tiles, part of a tile, empty.
    Products(large=(Product(256, 64, 32, 4), Product(256, 64, 32, 4, "skewed")), small=(Product(128, 64, 32, 4),)),
    (MoELayer(96, 64, 96, 8, 2),),
    (RoutedLayer(MoELayer(83, 64, 96, 8, 2), "one_expert"),),
)


def of_layer(layer: MoELayer) -> Shapes:
    """The shapes of a run for one layer on one device."""
    t, d, f, e, k = layer
    products = Products(large=(Product(t * k, d, f, e),), small=())
    return Shapes(Layer(t * k, d, (f,), e, k, local_experts=e), products, (layer,))


def layer_named(text: str) -> MoELayer:
    """A layer from the text of `--shape`.

    >>> layer_named("tokens=96,dim=64,hidden_dim=32,num_experts=8,top_k=2")
    MoELayer(tokens=96, dim=64, hidden_dim=32, num_experts=8, top_k=2)

    Raises ValueError for other names, for values that are not positive integers, and for sizes that the layer refuses.
    """
    given = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    if set(given) != set(MoELayer._fields) or not all(value.isdecimal() and int(value) for value in given.values()):
        raise ValueError(f"got {text!r}; allowed: {','.join(f'{name}=N' for name in MoELayer._fields)}, N at least 1")
    layer = MoELayer(**{name: int(value) for name, value in given.items()})
    if layer.dim % 32 or layer.hidden_dim % 32:
        raise ValueError(f"got {text!r}; allowed: dim and hidden_dim in multiples of 32")
    if layer.top_k > layer.num_experts:
        raise ValueError(f"got {text!r}; allowed: top_k of at most {layer.num_experts}, the number of experts")
    return layer
