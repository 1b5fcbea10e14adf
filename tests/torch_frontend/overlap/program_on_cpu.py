"""A CudaProgram on a CPU: each step by the C++ ops and NumPy, in a random order that streams and marks allow."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mxep import cpp_bindings
from mxep.core_kernels.fold.oracle import fold_rows
from mxep.core_kernels.peer import oracle
from mxep.core_kernels.peer.programs.program import Step, list_earlier
from mxep.core_kernels.registry import OPS
from mxep.torch_frontend.ops import cpu_gemm
from torch import Tensor


class ProgramOnCPU:
    """In place of CudaProgram. memory_of(side): the mapped memory of each rank, uint8, by the number of a stream."""

    def __init__(
        self, types: Sequence[tuple[Sequence[int], str]], places: Sequence[int], steps: Sequence[Step],
        memory_of: Callable[[int], list[Tensor]], seed: int,
    ) -> None:  # fmt: skip
        self.types, self.places, self.steps = types, places, steps
        self.memory_of, self.generator = memory_of, np.random.default_rng(seed)
        *_, ended = list_earlier([*steps, Step("the next kernel of the main stream", 0, (), (), ())])
        for i, step in enumerate(steps):
            assert i < ended[step.stream], f"nothing waits for step {i}, {step.op}"

    def __call__(self, passed: tuple[Tensor, ...], buffer: Tensor, side: int) -> None:
        self.of_rank, left, arrays = self.memory_of(side), list(passed), []
        for (shape, name), at in zip(self.types, self.places, strict=True):
            dtype, size = getattr(torch, name), torch.Size(shape)
            nbytes = size.numel() * dtype.itemsize
            arrays.append(left.pop(0) if at < 0 else buffer[at : at + nbytes].view(dtype).view(size))
            assert (arrays[-1].shape, arrays[-1].dtype) == (size, dtype)
        queues = [[step for step in self.steps if step.stream == stream] for stream in (0, 1)]
        reached: set[int] = set()
        while any(queues):
            ready = [q for q in queues if q and not (q[0].op == "wait" and q[0].attrs[0] not in reached)]
            assert ready, "a stream waits for a mark that no stream records"
            step = ready[self.generator.integers(len(ready))].pop(0)
            if step.op == "record":
                reached.add(step.attrs[0])
            elif step.op != "wait":
                self.run(step, [arrays[i] for i in step.inputs], [arrays[i] for i in step.outputs])

    def run(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if hasattr(self, step.op):
            getattr(self, step.op)(step, inputs, outputs)
            return
        op = OPS[step.op]
        first, last, _ = step.share
        if (first, last) != (0, 2**31 - 1):
            inputs, outputs = _groups(step, inputs, outputs)
        if step.op in cpu_gemm.TABLE:
            cpu_gemm.TABLE[step.op](*inputs, *outputs)
        else:
            outputs = outputs[: len(op.outputs)]
            cpp_bindings.run(step.op, inputs, outputs, step.attrs[: len(op.options)])

    def lay_out(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        counts = inputs[0].numpy().clip(0)
        ends, sources, totals, worst = (t.numpy() for t in outputs)
        rank, capacity, alignment, rounds, order_at, missing = step.attrs
        order = self.view(rank, order_at, np.int32)[: len(sources)]
        order = order[order >= 0]
        laid_out = oracle.lay_out(counts, rank, len(order), capacity, alignment, bool(rounds))
        positions, ends[:], totals[:], needed = laid_out
        # A row beyond the capacity has a place in a later round, a row beyond the counts nowhere.
        placed = np.arange(len(order)) < counts[rank].sum() if rounds else positions >= 0
        sources[:] = 2**30  # slots without a row are unspecified
        sources[order] = np.where(placed, order, missing)
        for r, rows in enumerate(needed):
            if not rounds and rows - capacity > max(worst[r, 0], 0):
                worst[r] = rows - capacity, rows

    def find_home(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        counts, ends, _ = (t.numpy() for t in inputs)
        counts = counts.clip(0)
        home, weights = (t.numpy() for t in outputs)
        rank, order_at, weights_at, slots = step.attrs
        home[:], weights[:] = 77, np.nan  # rows past the last end are unspecified
        begin = 0
        for group, end in enumerate(ends):
            expert, row = rank * len(ends) + group, begin
            home[begin:end], weights[begin:end] = (-1, 0), 0
            for source, n in enumerate(counts[:, expert]):
                at = counts[source, :expert].sum() + np.arange(n)
                at, rows = at[: max(end - row, 0)], np.arange(row, min(row + n, end))
                at, rows = at[at < slots], rows[at < slots]
                slot = self.view(source, order_at, np.int32)[at]
                at, rows, slot = at[slot >= 0], rows[slot >= 0], slot[slot >= 0]
                home[rows, 0], home[rows, 1] = source, slot
                weights[rows] = self.view(source, weights_at, np.float32)[at]
                row += n
            begin = end

    def pull_fold(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        home, ends, _ = (t.numpy() for t in inputs)
        q, sf, qf, row_sf = (t.numpy() for t in outputs)
        at, top_k, _ = step.attrs
        width = q.shape[1] + sf.shape[1]
        for row in _rows(step, ends):
            rank, slot = home[row]
            packed = np.zeros(width, np.uint8) if rank < 0 else self.view(rank, at + slot // top_k * width, np.uint8)
            q[row], sf[row] = packed[: q.shape[1]], packed[q.shape[1] : width]
            qf[row], row_sf[row] = fold_rows(q[row], sf[row])

    def pull_rows(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        home, ends, _ = (t.numpy() for t in inputs)
        values, scales = (t.numpy() for t in outputs)
        at, top_k, length, _ = step.attrs
        assert length % 16 == values.shape[1] % 16 == 0
        for row in _rows(step, ends):
            rank, slot = home[row]
            of = np.zeros(length, np.uint8) if rank < 0 else self.view(rank, at + slot // top_k * length, np.uint8)
            values[row], scales[row] = np.split(of[: values.shape[1] + scales.shape[1]], [values.shape[1]])

    def push_rows(self, step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        rows, numbers, home, ends, *_ = inputs
        slots_at, numbers_at, _ = step.attrs
        values = rows.view(torch.uint8).numpy()
        assert values.shape[1] % 16 == 0
        for row in _rows(step, ends.numpy()):
            rank, slot = home[row].tolist()
            if rank >= 0:
                self.view(rank, slots_at, np.uint8)[slot * values.shape[1] :][: values.shape[1]] = values[row]
                if numbers.numel():
                    self.view(rank, numbers_at, np.float32)[slot] = numbers[row].item()

    def view(self, rank: int, at: int, dtype: Any) -> Any:
        memory = self.of_rank[rank].numpy()[at:]
        return memory[: len(memory) // 4 * 4].view(dtype)


def _rows(step: Step, ends: Any) -> range:
    first, last, _ = step.share
    return range(int(ends[first - 1]) if first else 0, int(ends[min(last, len(ends)) - 1]))


def _groups(step: Step, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The arrays of some groups alone: rows of arrays of rows, matrices of weights, ends from the first row on."""
    first, last, _ = step.share
    ends = inputs[-1]
    rows, total = _rows(step, ends.numpy()), outputs[0].shape[0]
    cut = lambda t: t[rows.start : rows.stop] if t.shape[0] == total else t[first:last]  # noqa: E731
    return [*map(cut, inputs[:-1]), ends[first:last] - rows.start], [*map(cut, outputs)]
