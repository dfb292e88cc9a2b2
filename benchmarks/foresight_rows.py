"""Rows of a table of measured training runs: how a model was trained on which GPUs, and how fast.

A table is a CSV file with a header; lines that begin with # are comments. Columns are named as the
attributes of ``Model`` and ``Row``; those without a default have to be there. Of what was measured
(seconds, tokens_per_second_per_gpu, tflops_per_gpu, gib, activation_gib) each row has something.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SHARDINGS = ("none", "fsdp", "zero1", "hsdp")
RECOMPUTES = ("none", "selective", "full")
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ATTENTIONS = ("fused", "unfused")
#: Other names of columns in tables of the literature.
ALIASES = {
    "vocab": "vocabulary", "vocab_size": "vocabulary", "seq": "sequence", "seq_len": "sequence",
    "batch": "global_batch", "global_batch_size": "global_batch", "micro_batch": "microbatch",
    "micro_batch_size": "microbatch", "microbatch_size": "microbatch", "hidden_size": "hidden",
    "num_layers": "layers", "num_heads": "heads", "tokens_per_second": "tokens_per_second_per_gpu",
    "tokens/s/gpu": "tokens_per_second_per_gpu", "tflop/s/gpu": "tflops_per_gpu",
    "tflops": "tflops_per_gpu", "memory_gib": "gib", "measured_seconds": "seconds",
}  # fmt: skip


class TableError(ValueError):
    """A table can't be read: says which line and column, and what was expected."""


@dataclass(frozen=True)
class Model:
    """A transformer.

    Attributes:
        ffn: width of the inner layer; with one of four times ``hidden`` it is GPT's, with GELU and
            two matrices, with another one Llama's, gated and with three.
        dropout: GPT's rate; the gated ones have none.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    dropout: float

    @property
    def gated(self) -> bool:
        return self.ffn != 4 * self.hidden

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        keys = 2 * self.hidden * self.hidden * self.kv_heads // self.heads
        return 2 * self.hidden**2 + keys + (3 if self.gated else 2) * self.hidden * self.ffn

    def flops_per_token(self, *, recomputed: bool) -> float:
        """Arithmetic operations of a step: 6 a weight that is multiplied with, and 12 times
        sequence and width for the scores of attention, causal or not (Narayanan et al., arXiv
        2104.04473, sec. 5.1). A recomputed layer does a third more."""
        layer = 6 * self.layer_weights + 12 * self.sequence * self.hidden
        return (
            self.layers * layer * (4 / 3 if recomputed else 1) + 6 * self.hidden * self.vocabulary
        )


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        machine: a machine's name, or the path of its file.
        interleave: stages of a rank (1: no interleaving).
        microbatch, global_batch: sequences.
        sequence_parallel: what tensor parallelism leaves whole is cut along the sequence.
        seconds: of a step, as measured.
        gib: the most memory of a rank, as measured; None: not known.
        activation_gib: of it what layers keep for backward passes.
    """

    model: Model
    gpus: int
    hosts: int
    machine: str
    dp: int
    tp: int
    pp: int
    interleave: int
    sharding: str
    microbatch: int
    global_batch: int
    precision: str
    recompute: str
    compiled: bool
    attention: str
    sequence_parallel: bool
    seconds: float | None
    gib: float | None
    activation_gib: float | None
    line: int

    @property
    def microbatches(self) -> int:
        """Of a rank in a step."""
        return self.global_batch // (self.dp * self.microbatch)

    @property
    def stage_layers(self) -> float:
        """Layers of a stage, the mean."""
        return self.model.layers / self.pp

    def __str__(self) -> str:
        model = self.model
        return (
            f"{model.layers} x {model.hidden}, {self.gpus} {Path(self.machine).stem}, "
            f"dp {self.dp} tp {self.tp} pp {self.pp}"
        )


def read_table(path: Path) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        TableError: a column is missing, a value is none, or figures contradict each other.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        names = {_column(name) for name in reader.fieldnames or ()}
        missing = sorted(set(_NEEDED) - names)
        if missing:
            raise TableError(f"{path}: there is no column {', '.join(missing)}")
        return [
            _row(
                {_column(name): text for name, text in cells.items()},
                f"{path}, row {number}",
                number,
            )
            for number, cells in enumerate(reader, 1)
        ]


def _column(name: str) -> str:
    plain = name.strip().lower().replace(" ", "_")
    return ALIASES.get(plain, plain)


_NEEDED = ("layers", "hidden", "heads", "vocabulary", "sequence", "gpus", "machine", "global_batch")


class _Cells:
    """The cells of a row, with what stands in for empty ones."""

    def __init__(self, cells: Mapping[str, str], where: str) -> None:
        self._cells, self._where = cells, where

    def number(self, name: str, default: float | None = None, kind: Any = int) -> Any:
        text = (self._cells.get(name) or "").strip().replace("_", "")
        if not text:
            if default is None and name in _NEEDED:
                raise TableError(f"{self._where}: {name} is empty")
            return default
        try:
            value = kind(float(text))
        except ValueError:
            raise TableError(f"{self._where}: {name} is {text!r}, expected a number") from None
        if value < 0 or (kind is int and value < 1):
            raise TableError(f"{self._where}: {name} is {text}, expected more than 0")
        return value

    def choice(self, name: str, default: str, choices: Any) -> str:
        text = (self._cells.get(name) or "").strip().lower() or default
        if text not in choices:
            raise TableError(
                f"{self._where}: {name} is {text!r}, expected one of {', '.join(choices)}"
            )
        return text

    def flag(self, name: str, default: bool) -> bool:
        text = self.choice(
            name, "yes" if default else "no", ("yes", "no", "true", "false", "1", "0")
        )
        return text in ("yes", "true", "1")


def _row(cells: Mapping[str, str], where: str, number: int) -> Row:
    read = _Cells(cells, where)
    model = _model(read)
    gpus, tp, pp = read.number("gpus"), read.number("tp", 1), read.number("pp", 1)
    dp = read.number("dp", max(gpus // (tp * pp), 1))
    sharding = read.choice("sharding", "none", SHARDINGS)
    recompute = read.choice("recompute", "none", RECOMPUTES)
    compiled = read.flag("compiled", False)
    row = Row(
        model, gpus, read.number("hosts", max(-(-gpus // 8), 1)), str(cells["machine"]).strip(),
        dp, tp, pp, read.number("interleave", 1), sharding, read.number("microbatch", 1),
        read.number("global_batch"), read.choice("precision", "bf16", PRECISIONS), recompute,
        compiled,
        read.choice("attention", "fused" if model.gated else "unfused", ATTENTIONS),
        read.flag("sequence_parallel", tp > 1 and recompute == "selective"),
        None, read.number("gib", None, float), read.number("activation_gib", None, float), number,
    )  # fmt: skip
    _check(row, where)
    return _measured(row, read, where)


def _model(read: _Cells) -> Model:
    hidden, heads = read.number("hidden"), read.number("heads")
    ffn = read.number("ffn", 4 * hidden)
    dropout = read.number("dropout", 0.1 if ffn == 4 * hidden else 0.0, float)
    return Model(
        read.number("layers"), hidden, heads, read.number("kv_heads", heads), ffn,
        read.number("vocabulary"), read.number("sequence"), dropout,
    )  # fmt: skip


def _check(row: Row, where: str) -> None:
    model = row.model
    wrong = {
        f"dp {row.dp} x tp {row.tp} x pp {row.pp} is not gpus {row.gpus}":
            row.dp * row.tp * row.pp != row.gpus,
        f"hidden {model.hidden} does not divide by heads {model.heads}": model.hidden % model.heads,
        f"heads {model.heads} do not divide by kv_heads {model.kv_heads}":
            model.heads % model.kv_heads,
        f"heads {model.heads} do not divide by tp {row.tp}": model.heads % row.tp,
        f"global_batch {row.global_batch} is no multiple of dp x microbatch":
            row.global_batch % (row.dp * row.microbatch),
        f"dp {row.dp} does not divide by hosts {row.hosts}, over which hsdp has replicas":
            row.sharding == "hsdp" and row.dp % row.hosts,
    }  # fmt: skip
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise TableError(f"{where}: {what}")


def _measured(row: Row, read: _Cells, where: str) -> Row:
    """The row with its measured seconds, of whichever column says them."""
    tokens = row.global_batch * row.model.sequence
    seconds = read.number("seconds", None, float)
    if seconds is None and (rate := read.number("tokens_per_second_per_gpu", None, float)):
        seconds = tokens / (rate * row.gpus)
    if seconds is None and (rate := read.number("tflops_per_gpu", None, float)):
        flops = row.model.flops_per_token(recomputed=row.recompute == "full")
        seconds = tokens * flops / (rate * 1e12 * row.gpus)
    if seconds is None and row.gib is None and row.activation_gib is None:
        raise TableError(
            f"{where}: nothing was measured; fill seconds, tokens_per_second_per_gpu, "
            f"tflops_per_gpu, gib or activation_gib"
        )
    return replace(row, seconds=seconds)
