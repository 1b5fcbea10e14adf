"""The shapes that benchmarks run. M tokens, K row length, G local experts."""

from typing import NamedTuple


class Matrix(NamedTuple):
    M: int
    K: int


class Received(NamedTuple):
    """What a rank holds after an all-to-all: M rows of K values from `ranks` ranks for G local experts."""

    M: int
    K: int
    G: int
    ranks: int


class Layer(NamedTuple):
    """One rank's share of a mixture-of-experts layer. `hiddens` are the widths that SwiGLU runs at."""

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
    """A linear layer of G experts, N x K each, whose groups have M rows together."""

    M: int
    K: int
    N: int
    G: int
    routing: str = "balanced"


class Products(NamedTuple):
    """large: forward, both gradients, autograd. small: the forward product alone, its quantization included."""

    large: tuple[Product, ...]
    small: tuple[Product, ...]


CPU_MATRICES = (Matrix(8192, 4096), Matrix(1024, 2048))
CPU_RECEIVED = (Received(8192, 4096, G=8, ranks=4), Received(1024, 2048, G=4, ranks=2))
H200_LAYER = Layer(131072, 7168, (2048, 5120), num_experts=256, top_k=8, local_experts=8)
# Launches that the device finishes before the host sends the next one: what is left is the host's time.
TINY_LAYER = Layer(96, 64, (32,), num_experts=8, top_k=2, local_experts=2)
H200_PRODUCTS = Products(
    large=(
        Product(131072, 7168, 2048, 8),
        Product(131072, 8192, 5120, 8),
        Product(131072, 2048, 1408, 8),
        Product(131072, 7168, 2048, 8, "skewed"),
    ),
    small=tuple(Product(m, k, n, g) for k, n in ((7168, 2048), (2048, 1408)) for m, g in ((4096, 64), (512, 8))),
)
# Every kind of group: full tiles, a part of one, none.
TINY_PRODUCTS = Products(
    large=(Product(256, 64, 32, 4), Product(256, 64, 32, 4, "skewed")), small=(Product(128, 64, 32, 4),)
)
