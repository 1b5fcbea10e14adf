"""One call of expert parallelism whose exchange the device drives: its programs, prepared on a device, and this rank's
part of the mapped memory, which kernels of other ranks read and write."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.dispatch import facts
from ...core_kernels.formats import packed_width
from ...core_kernels.launch import ArrayType
from ...core_kernels.oracle_math import Array
from ...core_kernels.peer import plan
from ...core_kernels.peer.programs.ffn import SAVED_FFN, write_ffn_backward, write_ffn_forward
from ...core_kernels.peer.programs.mm import SAVED_MM, write_mm_backward, write_mm_forward
from ...core_kernels.peer.programs.program import ADDRESSES, Program
from ...core_kernels.peer.programs.writer import Memory, Sizes
from ...core_kernels.registry import OPS
from ..ops.call import call_out
from ..ops.device import arch_of
from ..ops.private import exchange
from ..products.gathered_weights import CopiedBytes, GatheredBytes
from ..products.weights import Cached
from .peer_exchange import Layout
from .rounds import Later, list_later

if TYPE_CHECKING:
    from .peer_memory import PeerMemory


class Programs(NamedTuple):
    """What writes the programs of one kind of experts. weights, saved: the names of arrays in them."""

    weights: tuple[str, ...]
    saved: tuple[str, ...]
    write_forward: Callable[[Sizes, Memory, bool, Sequence[str]], Program]
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


class Prepared(NamedTuple):
    """A program on a device. results: the shapes and dtypes of its results."""

    program: Program
    launch: Any
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, program: Program, device: torch.device) -> "Prepared":
        types = [(array.shape, array.dtype) for array in program.arrays.values()]
        places = [program.places.get(name, -1) for name in program.arrays]
        assert exchange is not None
        launch = cpp_bindings.CudaProgram(exchange, device.index, types, places, program.steps)
        return cls(program, launch, tuple(_torch_type(program.arrays[name]) for name in program.results))

    def __call__(self, memory: "PeerMemory", given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The results."""
        program, device = self.program, memory.device
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results)
        buffer = torch.empty(program.nbytes, dtype=torch.uint8, device=device)
        passed = given | dict(zip(program.results, results, strict=True))
        passed = tuple(passed[name] for name in program.arrays if name not in program.places)
        self.launch(passed, buffer, memory.side_stream)
        return results


def _torch_type(array: ArrayType) -> tuple[tuple[int, ...], torch.dtype]:
    return array.shape, getattr(torch, array.dtype)


class DeviceCall(NamedTuple):
    """What the forward and the backward of a call need. inverse: of TokenReplicas; None for rows. width: of the result.
    kept: operands along N live until the backward. Not the rows: they would live as long as the graph of the result.
    room: the most slots that a rank may have, the same on all ranks."""

    memory: "PeerMemory"
    programs: Programs
    tokens: int
    inverse: Tensor | None
    sizes: Sizes
    width: int
    alignment: int
    cached: tuple[Cached | GatheredBytes, ...]
    kept: bool
    room: int

    def prepared(self, quantize: bool, results: Sequence[str] | None) -> tuple[Prepared, Memory]:
        """The program of the forward with these results, or of the backward, and the memory that it knows."""
        memory, sizes = self.memory, self.sizes
        assert memory.buffer is not None
        places = Memory.of(memory.buffer.starts[1], self.room, sizes.top_k, max(sizes.dim, self.width))
        key = results, quantize, sizes, places, self.programs.weights
        if key not in memory.programs:
            if results is None:
                program = self.programs.write_backward(sizes, places, quantize)
            else:
                program = self.programs.write_forward(sizes, places, quantize, results)
            memory.programs[key] = Prepared.of(program, memory.device)
        return memory.programs[key], places

    def enlarged(self, counts: Array) -> "DeviceCall | None":
        """The call with more memory, or None if the call has enough. counts: of all ranks, ~counts of a rank whose rows
        had no slots. A collective if one of them needs more."""
        sizes, groups = self.sizes, self.sizes.groups
        rows = np.where(counts < 0, ~counts, counts).sum(1).tolist()
        self.memory.note_rows(rows, max(rows) * min(sizes.top_k, groups) // sizes.top_k)
        capacity, room = self.memory.capacity(groups, self.alignment)
        if (capacity, room) == (sizes.rows, self.room):
            return None
        widest = max(sizes.dim, self.width)
        self.memory.allocate(groups * sizes.ranks, [Memory.of(0, room, sizes.top_k, widest).end, 0])
        return self._replace(sizes=sizes._replace(rows=capacity), room=room)

    def write_rows(self, x: Tensor, places: Memory) -> None:
        """Packed MXFP8 rows to this rank's memory."""
        t, width = x.shape[0], packed_width(x.shape[1])
        packed = self._own(places.rows, (t, width), torch.uint8)
        call_out((packed,), OPS["quantize_row_packed"], x.contiguous(), rounding=self.sizes.rounding)

    def write_order(
        self, order: Tensor | None, probs: Tensor | None, places: Memory, rows: Tensor | None = None
    ) -> None:
        """order: None for rows, which are in order. rows: indices of some rows; None is all. Counts of more rows than
        the order has find no slot behind it."""
        n = self.slots if rows is None else rows.shape[0]
        own, rest = self._own(places.order, (self.room,), torch.int32).tensor_split([n])
        rest.fill_(-1)
        if order is None and rows is None:
            torch.arange(n, out=own)
        else:
            chosen = order if rows is None else rows if order is None else order[rows]
            assert chosen is not None
            own.copy_(chosen)
        weights = self._own(places.weights, (n,), torch.float32)
        if order is None or probs is None:
            weights.fill_(1.0)
        else:
            torch.index_select(probs.reshape(-1), 0, own, out=weights)

    def sums(self, layout: Layout, places: Memory, width: int, dtype: torch.dtype) -> Tensor:
        """(T, width): the sum of each token's slots, or the row, without a row that exceeded a capacity."""
        memory, t, k = self.memory, self.tokens, self.sizes.top_k
        y = torch.empty((t, width), dtype=dtype, device=memory.device)
        hw_cast = memory.device.type == "cuda" and facts(arch_of(memory.device)).hw_cast
        replicas = self.inverse is not None
        memory.launch(
            "pull", min(t, memory.width), self.inverse if replicas else layout.positions, layout.positions,
            self._own_address(), t, places.slots, 0, y,
            **plan.pull(width, k, replicas, False, False, hw_cast, True, memory.on_overflow == "drop"),
        )  # fmt: skip
        return y

    def numbers(self, layout: Layout, places: Memory) -> Tensor:
        """(T, k) fp32 of the slots of TokenReplicas."""
        assert self.inverse is not None
        out = torch.empty((self.tokens, self.sizes.top_k), dtype=torch.float32, device=self.memory.device)
        self.memory.launch(
            "pull_weights", -(-out.numel() // 256), self.inverse, layout.positions, self._own_address(),
            out.numel(), places.numbers, out,
            **plan.pull_weights(True, self.memory.on_overflow == "drop"),
        )  # fmt: skip
        return out

    @property
    def gathered(self) -> bool:
        """Whether the weights are bytes that a backward reads anew, since they are gathered for each pass."""
        return isinstance(self.cached[0], GatheredBytes)

    @property
    def slots(self) -> int:
        return self.tokens * self.sizes.top_k

    def given(self, layout: Layout) -> dict[str, Tensor]:
        """Arrays of both programs."""
        buffer = self.memory.buffer
        assert buffer is not None
        addresses = dict.fromkeys(ADDRESSES, buffer.addresses.view(torch.int32).view(-1, 2))
        no_numbers = torch.empty(0, dtype=torch.float32, device=self.memory.device)
        return {"group_ends": layout.group_ends, "no_numbers": no_numbers, **addresses}

    def given_forward(self, layout: Layout, counts: Tensor, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        values = dict(zip(self.programs.weights, weights, strict=True))
        return {"counts": counts, **self.given(layout), **values, **self.operands(False)}

    def copied(self) -> "DeviceCall":
        """The call for a backward that runs the forward again."""
        return self._replace(cached=tuple(CopiedBytes(w) if isinstance(w, GatheredBytes) else w for w in self.cached))

    def later(self, counts: Array | None) -> list[Later]:
        """The rounds after the first one. counts: of all ranks; None if there can be one round alone."""
        if counts is None:
            return []
        memory = self.memory
        return list_later(counts, memory.rank, self.slots, self.sizes.rows, self.alignment, memory.device)

    def operands(self, transposed: bool) -> dict[str, Tensor]:
        """Of cached or gathered weights, by name; nothing without them."""
        if self.cached[0] is None:
            return {}
        operands = [w.along_n if transposed else w.along_k for w in self.cached if w is not None]
        parts = [part for operand in operands for part in operand]
        return dict(zip(self.programs.along_n if transposed else self.programs.along_k, parts, strict=True))

    def _own_address(self) -> Tensor:
        buffer, rank = self.memory.buffer, self.memory.rank
        assert buffer is not None
        return buffer.addresses[rank : rank + 1]

    def _own(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory.own[start : start + nbytes].view(dtype).view(shape)
