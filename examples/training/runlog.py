"""The log of a run: one JSON object per line in DIR/log.jsonl, and progress on stderr: a bar on a CPU, lines on a GPU.

    {"kind": "run", "framework": "jax", "device": "cpu", "ep": 2, "recipe": "mxfp8", ...the config}
    {"kind": "train", "step": 10, "loss": 3.1, "aux_loss": 2.0, "grad_norm": 0.9, "lr": 1e-3, "tokens_per_s": 9000.0}
    {"kind": "eval", "step": 50, "loss": 2.7}

A "train" record at step s has the loss of batch s before its update; PyTorch adds imbalance (of the worst layer: its
fullest expert, divided by the mean) and dead_experts (of all layers: without a token in that step). An "eval" record at
step s follows s updates. On a GPU a "train" record has three more fields: tflops of each GPU, of_bf16_peak
(throughput.py), peak_gib of memory.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from .config import LOG_NAME, Config, learning_rates
from .throughput import rates


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All complete records of a run, without the unfinished last line of a killed run."""
    lines = (folder / LOG_NAME).read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


class RunLog:
    """Writes records and shows progress; does neither if `write` is False.

    start: the first step of a resumed run. Older records from that step on are dropped: they were written after the
    checkpoint. header: "ep" and "device", the name of a GPU or "cpu", and what else describes the run."""

    def __init__(self, folder: Path, config: Config, start: int, header: dict[str, Any], write: bool) -> None:
        self._file = _open(folder, start, {"kind": "run"} | header) if write else None
        self._config, self._device, self._ranks = config, header["device"], header["ep"]
        self._on_gpu = self._device != "cpu"
        hidden = not write or self._on_gpu
        self._bar = tqdm(total=config.steps, initial=start, unit="step", desc=folder.name, disable=hidden)
        self._name = folder.name
        self._rates = learning_rates(config)
        self._tokens_per_step = config.batch_size * config.seq_len
        self._steps = 0
        self._clock = time.perf_counter()

    def step(self) -> None:
        """Count one step."""
        self._steps += 1
        self._bar.update()

    def train(self, step: int, values: Mapping[str, float], peak_nbytes: int = 0) -> None:
        """Write one training record. tokens_per_s covers the steps since the last record."""
        speed = self._steps * self._tokens_per_step / (time.perf_counter() - self._clock)
        work = {}
        if self._on_gpu:
            work = rates(self._config, speed, self._device, self._ranks) | {"peak_gib": round(peak_nbytes / 2**30, 1)}
        self._write("train", step, **values, lr=float(self._rates[step]), tokens_per_s=round(speed, 1), **work)
        shown = {"loss": f"{values['loss']:.3f}", "tokens_per_s": f"{speed:.0f}"}
        if "imbalance" in values:
            shown["imbalance"] = f"{values['imbalance']:.2f}"
        self._bar.set_postfix(shown)
        if self._file and self._on_gpu:
            balance = f", imbalance {values['imbalance']:.2f}" if "imbalance" in values else ""
            share = f" ({work['of_bf16_peak']:.1%} of the bf16 peak)" if "of_bf16_peak" in work else ""
            print(
                f"{self._name}: step {step}: loss {values['loss']:.4f}, {speed:.0f} tokens/s, "
                f"{work['tflops']} TF/s per GPU{share}, at most {work['peak_gib']} GiB{balance}",
                file=sys.stderr,
            )
        self.restart_clock()

    def eval(self, step: int, loss: float) -> None:
        """Write one held-out record."""
        self._write("eval", step, loss=loss)
        if self._file:
            tqdm.write(f"{self._name}: step {step}: held-out loss {loss:.4f}", file=sys.stderr)

    def restart_clock(self) -> None:
        """Exclude the time since the last step (evaluation, checkpoint) from tokens_per_s."""
        self._steps, self._clock = 0, time.perf_counter()

    def close(self) -> None:
        self._bar.close()
        if self._file:
            self._file.close()

    def _write(self, kind: str, step: int, **values: float) -> None:
        if self._file:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()


def _open(folder: Path, start: int, header: dict[str, Any]) -> TextIO:
    """Open the log for appending. It holds the header and, in a resumed run, the records up to `start`."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [header]
    if start and (folder / LOG_NAME).exists():
        records += [r for r in read_log(folder) if r["kind"] != "run" and r["step"] < start + (r["kind"] == "eval")]
    path = folder / LOG_NAME
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records))
    partial.replace(path)
    return path.open("a")
