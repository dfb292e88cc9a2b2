"""Compiled kernels: artifacts on disk, their callables, and the executor of plans that use them.

An artifact is a compiled group, with a record of its speedup. The record contains a checksum of
itself and of the code, whose file name contains it too. Disks fill up and machines lose power:
damaged code is never loaded, and is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from lazygt import native
from lazygt.graph.node import Node
from lazygt.graph.per_tensor import LANES, Lanes, lanes_of
from lazygt.host.files import cache_directory, private_directory, replace
from lazygt.runtime.executors.eager import EagerExecutor, MakeCode
from lazygt.runtime.executors.kernel_group import KernelGroup, packed
from lazygt.runtime.plan import Plan
from lazygt.runtime.wire import bits

# -- artifacts -------------------------------------------------------------------------------------

_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Record:
    """Record of an artifact."""

    seconds: float  # duration of the compile
    #: (elements, seconds of a run member by member, seconds of a compiled run)
    times: tuple[tuple[int, float, float], ...]

    def gain(self, numel: int) -> float:
        """Return the speedup over running member by member, as measured at the nearest size."""
        _, eager, compiled = self._nearest(numel)
        return eager / compiled

    def saved(self, numel: int) -> float:
        """Return the seconds that one call saves, as measured at the nearest size."""
        _, eager, compiled = self._nearest(numel)
        return eager - compiled

    def _nearest(self, numel: int) -> tuple[int, float, float]:
        return min(self.times, key=lambda row: abs(math.log2(row[0] / numel)))


class Cache:
    """Directory of artifacts, stored as ``KEY.json`` and ``KEY-CHECKSUM.so``.

    Args:
        path: path of the directory; None: the user's default, see ``cache_directory``.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = cache_directory(path)

    def directory(self) -> Path:
        """Return the directory, created if it is missing.

        Raises:
            PermissionError: as ``private_directory``.
        """
        return private_directory(self.path)

    def code(self, key: str) -> Path:
        """Return the path of an artifact's compiled code, after a check of its checksum.

        Raises:
            ValueError: ``key`` is no key, or the artifact is missing or damaged.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        if record is None:
            raise ValueError(f"there is no artifact {key} in {self.path}, or it is damaged")
        return record[1]

    def find(self, key: str) -> Record | None:
        """Return the record of an intact artifact; None if it is missing or damaged.

        Raises:
            ValueError: ``key`` is no key.
            PermissionError: as ``directory``.
        """
        _check(key)
        record = self._read(key)
        return None if record is None else record[0]

    def _read(self, key: str) -> tuple[Record, Path] | None:
        """Return an artifact's record and the path of its code; None: missing or damaged."""
        directory = self.directory()
        try:
            record, checksum = _decoded((directory / f"{key}.json").read_bytes())
            code = directory / _code_name(key, checksum)
            is_intact = checksum == _checksum(code.read_bytes(), asdict(record))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None  # missing, or not written by us: it is compiled again
        return (record, code) if is_intact else None

    def copy_of(self, key: str) -> tuple[bytes, bytes]:
        """Return the record and the code of an artifact, for another machine's ``store_copy``.

        Raises:
            OSError: the artifact is missing.
            ValueError: the record is damaged.
        """
        record = (self.directory() / f"{key}.json").read_bytes()
        try:
            _, checksum = _decoded(record)
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"its record is none: {error}") from error
        return record, (self.path / _code_name(key, checksum)).read_bytes()

    def store_copy(self, key: str, record: bytes, code: bytes) -> None:
        """Store a copy of an artifact from another machine's cache.

        Raises:
            ValueError: ``key`` is no key, or the copy is damaged.
            OSError: the files can't be written, or as ``directory``.
        """
        _check(key)
        known, checksum = _decoded(record)
        if checksum != _checksum(code, asdict(known)):
            raise ValueError(f"the artifact {key} was damaged on its way")
        self.keep(key, code, known)

    def keep(self, key: str, code: bytes, record: Record) -> None:
        """Store an artifact; the record is written last, so it exists only with the code."""
        fields = asdict(record)
        checksum = _checksum(code, fields)
        directory = self.directory()
        replace(directory / _code_name(key, checksum), code)
        replace(directory / f"{key}.json", json.dumps(fields | {"checksum": checksum}).encode())


def _check(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not the key of an artifact")


def _decoded(record: bytes) -> tuple[Record, str]:
    """Decode a record and its checksum.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: it is no record of ours.
    """
    fields = json.loads(record)
    times = tuple((int(n), float(eager), float(compiled)) for n, eager, compiled in fields["times"])
    if not times:
        raise ValueError("a record without times")
    return Record(float(fields["seconds"]), times), str(fields["checksum"])


def _code_name(key: str, checksum: str) -> str:
    return f"{key}-{checksum[:16]}.so"


def _checksum(code: bytes, record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + code).hexdigest()


# -- executor --------------------------------------------------------------------------------------


def with_compiled(
    plan: Plan,
    device: torch.device,
    groups: Mapping[int, Callable[..., Any]],
    code: MakeCode | None = None,
) -> EagerExecutor:
    """Return the executor of a plan in which some fused nodes are one compiled call each.

    Args:
        groups: number of a fused node of ``plan.graph`` -> its callable.
        code: see ``EagerExecutor``.
    """
    schedule = plan.with_fused(groups)
    fused_nodes = [
        number for number, node in enumerate(schedule.graph.nodes) if node.body is not None
    ]
    callables = dict(zip(fused_nodes, (groups[number] for number in sorted(groups)), strict=True))
    return EagerExecutor(plan, device, schedule, callables, code)


def compiled(
    plan: Plan,
    device: torch.device,
    artifacts: Sequence[tuple[int, str]],
    cache: Cache,
    code: MakeCode | None = None,
) -> EagerExecutor:
    """Build the executor of a plan with these artifacts: (number of a fused node, key).

    Raises:
        ValueError: there is no such fused node, or no such artifact.
        PermissionError: the cache directory is not the user's own.
        RuntimeError: the code can't be loaded.
    """
    groups: dict[int, Callable[..., Any]] = {}
    for number, key in artifacts:
        node = plan.graph.nodes[number] if 0 <= number < len(plan.graph.nodes) else None
        if node is None or node.body is None:
            raise ValueError(f"node {number} of the plan is not a fused one")
        lanes, code_path = lanes_of(node.body), cache.code(key)
        groups[number] = (
            Compiled(KernelGroup.of(node), code_path, device)
            if lanes is None
            else CompiledLanes(lanes, node, code_path, device)
        )
    return with_compiled(plan, device, groups, code)


# -- callables of artifacts ------------------------------------------------------------------------


class Compiled:
    """A loaded artifact: the callable of one fused node.

    Its arguments are the operands and then the run-time numbers of the node. Like a kernel, it
    writes the node's written operands and returns the new outputs.

    Args:
        code: path of the compiled code.
    """

    def __init__(self, group: KernelGroup, code: Path, device: torch.device) -> None:
        self._run = load(code, device)
        self._operands, self._device = len(group.body.inputs), device
        self._flat = group.flat
        values = group.body.values
        shapes = [values[value] for value in group.body.outputs[: group.fresh]]
        self._shapes = [meta.shape for meta in shapes if meta is not None]
        #: bits of the numbers that ``_number_tensors`` contains
        self._numbers = b""
        self._number_tensors: list[torch.Tensor] = []

    def __call__(self, *args: Any) -> Any:
        count = self._operands
        operands: list[torch.Tensor] = [*args[:count]]
        if self._flat:
            operands = [operand.view(-1) for operand in operands]
        numbers = args[count:]
        if numbers:
            number_bits = bits(numbers)
            if number_bits != self._numbers:
                self._numbers, self._number_tensors = number_bits, packed(numbers, self._device)
            operands += self._number_tensors
        results = self._run(operands)[: len(self._shapes)]
        if self._flat:
            results = [r.view(shape) for r, shape in zip(results, self._shapes, strict=True)]
        return results[0] if len(results) == 1 else results


class CompiledLanes:
    """A loaded artifact for per-tensor slices (lanes): the callable of a horizontally fused node.

    Each call of the code computes ``LANES`` lanes; superfluous lanes of the last call work on dummy
    tensors.

    Args:
        node: the fused node that ``lanes`` describes.
        code: path of the compiled code.
    """

    def __init__(self, lanes: Lanes, node: Node, code: Path, device: torch.device) -> None:
        self._run = load(code, device)
        self._device = device
        assert node.body is not None
        self._operands = len(node.body.inputs)
        count, width = len(lanes.operands), len(lanes.lane.inputs)
        self._dummy_tensors = [
            torch.ones(2, dtype=meta.dtype, device=device)
            for _ in range(-count % LANES)
            for meta in lanes.lane.inputs
        ]
        operand_order = [value for lane in lanes.operands for value in lane]
        operand_order += range(self._operands, self._operands + len(self._dummy_tensors))
        calls = range(0, len(operand_order), LANES * width)
        #: for each call, an ``itemgetter`` of its operands
        self._calls = [itemgetter(*operand_order[first : first + LANES * width]) for first in calls]
        params = [index for lane in lanes.params for index in lane]
        # the dummy lanes of the last call get number 0
        params += [0] * (len(lanes.lane.params) * len(calls) * LANES - len(params))
        self._param_indices = torch.tensor(params).reshape(len(calls), -1)
        outputs_per_lane = _new_output_count(lanes, node)
        #: (call, index among the call's results, shape) of each new output
        self._results = [
            (lane // LANES, lane % LANES * outputs_per_lane + position, meta.shape)
            for (lane, position), meta in zip(lanes.outputs, node.fresh, strict=False)
            if meta is not None
        ]
        self._numbers = b""
        self._number_tensors: list[list[torch.Tensor]] = [[] for _ in calls]

    def __call__(self, *args: Any) -> Any:
        count = self._operands
        numbers = args[count:]
        if numbers:
            number_bits = bits(numbers)
            if number_bits != self._numbers:
                self._numbers, self._number_tensors = number_bits, self._packed(numbers)
        vectors = [operand if operand.dim() == 1 else operand.view(-1) for operand in args[:count]]
        vectors += self._dummy_tensors
        calls = zip(self._calls, self._number_tensors, strict=True)
        returned = [self._run([*operands(vectors), *tensors]) for operands, tensors in calls]
        results = [returned[call][index].view(shape) for call, index, shape in self._results]
        return results[0] if len(results) == 1 else results

    def _packed(self, numbers: tuple[Any, ...]) -> list[list[torch.Tensor]]:
        """Return the numbers of each call, packed as by ``packed``."""
        numbers_by_call = torch.tensor(numbers, dtype=torch.float64)[self._param_indices]
        return [
            [call_numbers] if self._device.type == "cpu" else list(call_numbers.unbind())
            for call_numbers in numbers_by_call
        ]


def _new_output_count(lanes: Lanes, node: Node) -> int:
    """Return the number of new outputs of one lane."""
    return len({output for _, output in lanes.outputs[: len(node.fresh)]})


@cache
def load(path: Path, device: torch.device) -> Callable[..., Any]:
    """Load an artifact's code, once per file and process.

    The C++ extension calls the code directly; without it, torch's own loader serves CPUs. On a GPU,
    torch's loader queries an event of an earlier call of the same model: a CUDA graph
    can't capture that, and torch's next kernel would report CUDA's "not ready" as an error.

    Raises:
        LazyGTError: code for a GPU, and there is no extension.
        RuntimeError: the code can't be loaded here.
    """
    if device.type == "cuda" or native.load().module is not None:
        runner = native.extension().CompiledCode(str(path), str(device))
    else:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    return runner.run  # type: ignore[no-any-return]
