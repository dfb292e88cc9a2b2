"""Compile service: compiles a group, times it against its single ops, and caches the code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._inductor.loop_body import LoopBody

from lazygt.errors import in_one_line
from lazygt.graph.flags import write_flags
from lazygt.graph.per_tensor import merge_slices, vectors
from lazygt.runtime import graph_codec
from lazygt.runtime.executors.compiled import Cache, Compiled, Record
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.executors.kernel_group import KernelGroup, Members, packed
from lazygt.runtime.plan import Plan

#: Vector lengths at which a group is timed, and those for a group of lanes.
_LENGTHS = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
_LANE_LENGTHS = (1 << 5, 1 << 8, 1 << 12)
#: Seconds of timing one form of a group, and the smallest number of runs.
_TIMING_SECONDS, _MIN_RUNS = 0.05, 8
#: Relative tolerance of the check of a result, by dtype; others: 1e-4.
_RTOL = {torch.float16: 1e-2, torch.bfloat16: 1e-1}
_OPTIONS = {
    # one artifact serves workers with any number of threads
    "cpp.dynamic_threads": True,
    # the wrapper only passes pointers: optimising it doubles the compile time
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": True,
}


def begin(directory: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Make this process a compile process, on one thread; return its request handler.

    Args:
        directory: path of the artifact cache.
    """
    torch.set_num_threads(1)
    mend_outer_loop_fusion()
    cache = Cache(directory)
    return lambda request: answer(request, cache)


def mend_outer_loop_fusion() -> None:
    """Make Inductor compile groups that overwrite an operand after a reduction has read it.

    Its scheduler counts the loop that overwrites an operand among the users of all results of the
    operand's earlier readers. Outer-loop fusion takes each user for one that loads the buffer, and
    looks up its index: ``KeyError: 'buf1'`` (pytorch issue 196570). Without an index the buffer
    stays in memory, as in upstream's own fix.
    """

    def read_index(body: LoopBody, buffer: str) -> Any:
        return next(iter(body.get_all_read_expr(buffer)), None)

    LoopBody.get_read_expr = read_index  # type: ignore[method-assign]


def answer(request: Mapping[str, Any], cache: Cache) -> dict[str, Any]:
    """Compile one group, cache the artifact, and return the outcome.

    Returns:
        ``key`` and ``error``; the latter is empty if the artifact lies in the cache.
    """
    begin = time.perf_counter()
    try:
        body, flags = graph_codec.decode_program(request["body"])
        write_flags(flags, torch.get_num_threads())
        group = KernelGroup(
            body,
            tuple((operand, output) for operand, output in request["writes"]),
            request["fresh"],
            request["flat"],
            tuple(map(tuple, request["dynamic_dims"])),
            request["lanes"],
        )
        device = torch.device(request["device"])
        code = compile_group(group, device)
        seconds = time.perf_counter() - begin
        record = Record(seconds, times(group, code, device))
        cache.keep(request["key"], code.read_bytes(), record)
    except Exception as error:  # noqa: BLE001 - any error of a compiler is reported to the client
        return {"key": request["key"], "error": in_one_line(error)}
    return {"key": request["key"], "error": ""}


def compile_group(group: KernelGroup, device: torch.device) -> Path:
    """Compile a group; return the code's path in Inductor's own cache.

    Raises:
        Exception: of torch.export, Inductor or the C++ compiler.
    """
    module = Members(group.body, group.writes, group.fresh)
    operands = tuple(example(_with_length(group, max(group.numel, 2)), device))
    program = torch.export.export(
        module, operands, dynamic_shapes=(_dynamic_shapes(group, device),)
    )
    _check_dynamic(group, program)
    code = torch._inductor.aot_compile(program.module(), operands, options=_OPTIONS)
    return Path(str(code))


def _dynamic_shapes(group: KernelGroup, device: torch.device) -> tuple[Any, ...]:
    """Return torch.export's ``dynamic_shapes`` of the operands."""
    numbers = (None,) * len(packed(_example_numbers(group), device))
    if group.flat:
        lengths = [torch.export.Dim(f"length{lane}", min=2) for lane in range(group.lanes)]
        width = len(group.body.inputs) // group.lanes
        return tuple({0: length} for length in lengths for _ in range(width)) + numbers
    dims = group.dynamic_dims or ((),) * len(group.body.inputs)
    return tuple(dict.fromkeys(dynamic, torch.export.Dim.AUTO) for dynamic in dims) + numbers


def _check_dynamic(group: KernelGroup, program: Any) -> None:
    """Raise ValueError if torch.export specialized a dynamic size."""
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for placeholder, dynamic in zip(placeholders, group.dynamic_dims, strict=False):
        shape = placeholder.meta["val"].shape
        if any(isinstance(shape[dim], int) for dim in dynamic):
            raise ValueError(f"torch.export fixed a size of {placeholder.name}: {tuple(shape)}")


def example(group: KernelGroup, device: torch.device) -> list[torch.Tensor]:
    """Return random operands, and numbers, to run a group with."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for meta in group.body.inputs:
        memory = torch.rand(meta.extent, generator=generator) + 0.5
        memory = (memory > 1 if meta.dtype == torch.bool else memory.to(meta.dtype)).to(device)
        tensors.append(memory.as_strided(meta.shape, meta.stride, meta.offset))
    return tensors + packed(_example_numbers(group), device)


def _example_numbers(group: KernelGroup) -> tuple[float, ...]:
    return (0.5,) * len(group.body.params)


def times(
    group: KernelGroup, code: Path, device: torch.device
) -> tuple[tuple[int, float, float], ...]:
    """Check a group's code against its single ops, and time both.

    Returns:
        (length of the vectors, seconds of the single ops, seconds of the code) for several lengths;
        of a group that is compiled for its sizes, for its number of elements.
    """
    lengths = _LANE_LENGTHS if group.lanes > 1 else _LENGTHS
    measurements = []
    for length in lengths if group.flat else (group.numel,):
        sized = _with_length(group, length, shortest=1)
        operands, numbers = (
            example(sized, device)[: len(group.body.inputs)],
            _example_numbers(group),
        )
        body = merge_slices(sized.body, group.lanes) if group.lanes > 1 else sized.body
        compiled, eager = Compiled(sized, code, device), EagerExecutor(Plan.build(body), device)
        _check_results(sized, compiled, eager, operands, numbers)
        measurements.append((
            length,
            _best_seconds(lambda: eager.run(list(operands), numbers), device),  # noqa: B023
            _best_seconds(lambda: compiled(*operands, *numbers), device),  # noqa: B023
        ))  # fmt: skip
    return tuple(measurements)


def _with_length(group: KernelGroup, length: int, shortest: int = 0) -> KernelGroup:
    """Return the group for vectors of this length; each further lane's is one longer.

    Args:
        shortest: the length of the first of several lanes.
    """
    if not group.flat:
        return group
    lengths = [length + lane for lane in range(group.lanes)]
    if group.lanes > 1 and shortest:
        lengths[0] = shortest
    return replace(group, body=vectors(group.body, lengths))


def _check_results(
    group: KernelGroup,
    compiled: Callable[..., Any],
    eager: EagerExecutor,
    operands: list[torch.Tensor],
    numbers: tuple[float, ...],
) -> None:
    """Raise AssertionError if compiled code and single members disagree beyond rounding."""
    copies = [operand.clone() for operand in operands]
    outcome = eager.run([operand.clone() for operand in operands], numbers)
    returned = compiled(*copies, *numbers)
    fresh = [returned] if group.fresh == 1 else list(returned)
    results = fresh + [copies[operand] for operand, _ in group.writes]
    for result, wanted in zip(results, outcome.outputs, strict=True):
        assert isinstance(wanted, torch.Tensor)
        expected = wanted.cpu()
        rtol = _RTOL.get(expected.dtype, 1e-4)
        atol = rtol * _magnitude(expected)
        torch.testing.assert_close(result.cpu(), expected, rtol=rtol, atol=atol, equal_nan=True)


def _magnitude(values: torch.Tensor) -> float:
    """Return the largest absolute value, at least 1.

    It scales the tolerance: sums that cancel out are as exact as their terms.
    """
    finite = values.abs()[values.isfinite()] if values.is_floating_point() else values.new_empty(0)
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of several runs."""
    best = float("inf")
    end = time.perf_counter() + _TIMING_SECONDS
    runs = 0
    with torch.no_grad():
        while runs < _MIN_RUNS or time.perf_counter() < end:
            begin, runs = time.perf_counter(), runs + 1
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - begin)
    return best
