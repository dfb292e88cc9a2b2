"""torch's flags: read, set, and refused where they come from elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazygt.errors import ProtocolError
from lazygt.graph.flags import (
    TABLE,
    Flags,
    check_flags,
    flags_of_code,
    nondeterministic,
    read_flags,
    write_flags,
)
from lazygt.graph.node import Graph
from lazygt.runtime.graph_codec import decode_graph, decode_program, encode_graph

THREADS = torch.get_num_threads()
EMPTY = Graph((), (), (), ())
SETTINGS: list[tuple[Any, str, list[Any]]] = [
    (torch.backends.cuda.matmul, "allow_tf32", [False, True]),
    (torch.backends.cudnn, "allow_tf32", [False, True]),
    *[
        (owner, "fp32_precision", ["none", "ieee", "tf32"])
        for owner in (
            torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn,
            torch.backends.cudnn.conv, torch.backends.mkldnn.matmul, torch.backends.mkldnn.rnn,
        )
    ],
    (torch.backends.mkldnn.conv, "fp32_precision", ["none", "ieee", "bf16"]),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", [False, True]),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction",
     [False, True, (False, False)]),
    (torch.backends.cudnn, "benchmark", [False, True]),
    (torch.backends.mkldnn, "enabled", [False, True]),
    (torch.utils.deterministic, "fill_uninitialized_memory", [False, True]),
]  # fmt: skip
DRAWN = st.lists(
    st.sampled_from(SETTINGS).flatmap(
        lambda row: st.tuples(st.just(row[0]), st.just(row[1]), st.sampled_from(row[2]))
    )
    | st.sampled_from(["highest", "high", "medium"])
    | st.sampled_from([torch.float32, torch.float64])
    | st.booleans(),
    max_size=8,
)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    write_flags((), THREADS)


def test_defaults_are_those_of_a_fresh_process() -> None:
    program = "import torch; from lazygt.graph.flags import read_flags; print(read_flags(True))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "()\n", run.stderr


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DRAWN, DRAWN)
def test_written_flags_are_read_again_whatever_was_set_before(
    wanted: list[Any], before: list[Any]
) -> None:
    write_flags((), THREADS)
    apply(wanted)
    flags = read_flags()
    check_flags(flags)
    assert decode_program(encode_graph(EMPTY, flags)) == (EMPTY, flags)
    apply(before)
    write_flags(flags, THREADS)
    assert read_flags() == flags


def apply(drawn: list[Any]) -> None:
    """Set flags in the ways that torch has."""
    for each in drawn:
        if isinstance(each, str):
            torch.set_float32_matmul_precision(each)
        elif isinstance(each, torch.dtype):
            torch.set_default_dtype(each)
        elif isinstance(each, bool):
            torch.use_deterministic_algorithms(True, warn_only=each)
        else:
            setattr(*each)


def test_denormals_are_flushed_where_a_flag_says_so() -> None:
    write_flags((("flush_denormal", True),), THREADS)
    assert float(torch.tensor(1e-300, dtype=torch.float64) * 1e-10) == 0.0
    assert read_flags() == (("flush_denormal", True),)
    write_flags((), THREADS)
    assert float(torch.tensor(1e-300, dtype=torch.float64) * 1e-10) > 0.0


def test_threads_are_a_flag_where_the_program_has_set_them() -> None:
    torch.set_num_threads(THREADS + 1)
    assert read_flags() == ()
    assert read_flags(threads=True) == (("num_threads", THREADS + 1),)
    write_flags((), THREADS)
    assert read_flags(threads=True) == ()


@pytest.mark.parametrize(
    "flags",
    [
        (("system", True),),
        (("cudnn.enabled", "yes"),),
        (("cudnn.enabled", 1),),
        (("default_dtype", "__builtins__"),),
        (("default_dtype", ["float32"]),),
        (("num_threads", 10**9),),
        (("num_threads", True),),
        (("matmul.allow_fp16_reduced_precision_reduction", (True,)),),
        (("cudnn.benchmark", True), ("cudnn.benchmark", False)),
        (("cudnn.benchmark", float("nan")),),
    ],
)
def test_strange_flags_are_refused(flags: Flags) -> None:
    with pytest.raises(ProtocolError, match="flag"):
        decode_graph(encode_graph(EMPTY, flags))


def test_compiled_code_depends_on_no_flag_that_is_heeded_when_it_runs() -> None:
    flags = (("cudnn.benchmark", True), ("flush_denormal", True), ("num_threads", 3))
    assert flags_of_code(flags) == (("cudnn.benchmark", True),)


def test_meta_kernels_heed_no_determinism() -> None:
    for mode in ("on", "warn"):
        TABLE["deterministic_algorithms"].set(mode)
        with nondeterministic():
            assert not torch.are_deterministic_algorithms_enabled()
        assert TABLE["deterministic_algorithms"].get() == mode
