"""One call of expert parallelism whose exchange overlaps with its products: its programs and weights."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.peer.programs.ffn import SAVED_FFN, write_ffn_backward, write_ffn_forward
from ...core_kernels.peer.programs.mm import SAVED_MM, write_mm_backward, write_mm_forward
from ...core_kernels.peer.programs.program import Program
from ...core_kernels.peer.programs.writer import LAID_OUT, Layout, Memory, Sizes
from ..products.gathered_weights import CopiedBytes, GatheredBytes
from ..products.weights import Cached
from .prepared import Prepared, prepare
from .rank_rows import RankRows
from .rows import Rows

if TYPE_CHECKING:
    from .peer_memory import PeerMemory


class Programs(NamedTuple):
    """What writes the programs of one kind of experts. weights, saved: the names of arrays in them."""

    weights: tuple[str, ...]
    saved: tuple[str, ...]
    write_forward: Callable[[Sizes, Memory, bool, Sequence[str], Layout, bool], Program]
    write_backward: Callable[[Sizes, Memory, bool], Program]

    @property
    def along_k(self) -> tuple[str, ...]:
        """The names of the weights' operands."""
        return tuple(f"{w}_{part}" for w in self.weights for part in ("q", "sf"))

    @property
    def along_n(self) -> tuple[str, ...]:
        return tuple(f"{name}_t" for name in self.along_k)


FFN = Programs(("w1", "w3", "w2"), SAVED_FFN, write_ffn_forward, write_ffn_backward)
MM = Programs(("w",), SAVED_MM, write_mm_forward, write_mm_backward)


class DeviceCall(NamedTuple):
    """What the forward and the backward of a call need. width: of the result. kept: operands along N live until the
    backward. Not the rows: they would live as long as the graph of the result."""

    rows: RankRows
    programs: Programs
    sizes: Sizes
    width: int
    cached: tuple[Cached | GatheredBytes, ...]
    kept: bool

    def with_rows(self, rows: RankRows) -> "DeviceCall":
        return self._replace(rows=rows, sizes=self.sizes._replace(rows=rows.capacity))

    @property
    def memory(self) -> "PeerMemory":
        return self.rows.memory

    def prepared(self, quantize: bool, results: Sequence[str] | None, push: bool = True) -> Prepared:
        """The program of the forward with these results, or of the backward. push: of the forward."""
        sizes, places, layout = self.sizes, self.rows.places, self.rows.layout

        def write() -> Program:
            if results is None:
                return self.programs.write_backward(sizes, places, quantize)
            return self.programs.write_forward(sizes, places, quantize, (*LAID_OUT, *results), layout, push)

        return prepare(self.memory, (results, push, quantize, sizes, places, layout, self.programs.weights), write)

    def packed(self, width: int) -> Rows:
        """Rows to the experts."""
        return Rows(width, torch.bfloat16, self.sizes.rounding)

    def sums(self, sources: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """(T, width): the sum of each token's slots, or the row."""
        return self.rows.sums(sources, Rows(width, torch.bfloat16, None), dtype)

    @property
    def gathered(self) -> bool:
        """Whether the weights are bytes that a backward reads anew, since they are gathered for each pass."""
        return isinstance(self.cached[0], GatheredBytes)

    def given(self) -> dict[str, Tensor]:
        """Arrays of both programs."""
        no_numbers = torch.empty(0, dtype=torch.float32, device=self.memory.device)
        return {"no_numbers": no_numbers, **self.rows.given()}

    def given_forward(self, counts: Tensor, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        values = dict(zip(self.programs.weights, weights, strict=True))
        return {"counts": counts, "worst": self.memory.worst, **self.given(), **values, **self.operands(False)}

    def copied(self) -> "DeviceCall":
        """The call for a backward that runs the forward again."""
        return self._replace(cached=tuple(CopiedBytes(w) if isinstance(w, GatheredBytes) else w for w in self.cached))

    def operands(self, transposed: bool) -> dict[str, Tensor]:
        """Of cached or gathered weights, by name; nothing without them."""
        if self.cached[0] is None:
            return {}
        operands = [w.along_n if transposed else w.along_k for w in self.cached if w is not None]
        parts = [part for operand in operands for part in operand]
        return dict(zip(self.programs.along_n if transposed else self.programs.along_k, parts, strict=True))
