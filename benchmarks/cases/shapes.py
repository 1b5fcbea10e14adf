"""The shapes of all benchmarks. M tokens, K row length, N output features, G local experts."""

from typing import NamedTuple


class Layer(NamedTuple):
    """One rank's share of a Mixture-of-Experts layer, for single ops. hiddens: the widths of SwiGLU."""

    tokens: int
    dim: int
    hiddens: tuple[int, ...]
    num_experts: int
    top_k: int
    local_experts: int

    @property
    def ranks(self) -> int:
        return self.num_experts // self.local_experts


class Product(NamedTuple):
    """A linear layer of G experts, each N x K, on M rows in total."""

    M: int
    K: int
    N: int
    G: int
    routing: str = "balanced"


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


H200 = Shapes(
    layer=Layer(131072, 7168, (2048, 5120), num_experts=256, top_k=8, local_experts=8),
    products=Products(
        large=(
            Product(131072, 7168, 2048, 8),
            Product(131072, 8192, 5120, 8),
            Product(131072, 2048, 1408, 8),
            Product(131072, 7168, 2048, 8, "skewed"),
        ),
        small=tuple(Product(m, k, n, g) for k, n in ((7168, 2048), (2048, 1408)) for m, g in ((4096, 64), (512, 8))),
    ),
    moe_layers=(
        MoELayer(16384, 7168, 2048, 32, 8),
        MoELayer(16384, 2048, 1408, 64, 6),
        MoELayer(16384, 4096, 14336, 8, 2),
        MoELayer(4096, 2048, 768, 128, 8),
    ),
    uneven=tuple(
        RoutedLayer(MoELayer(tokens, *sizes), routing)
        for sizes in ((7168, 2048, 32, 8), (4096, 14336, 8, 2))
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
