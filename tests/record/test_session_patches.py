"""torch's flags reach the workers with the ops that were recorded under them, and no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import lazygt
from lazygt.graph.flags import read_flags, write_flags
from lazygt.session import Session

pytestmark = pytest.mark.timeout(120)

THREADS = torch.get_num_threads()
TINY = 2.0**-1022


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with lazygt.session() as s:
        yield s


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Each test begins, and ends, with torch's defaults."""
    reset()
    yield
    reset()


def reset() -> None:
    """Through torch's own functions, which sessions watch."""
    torch.use_deterministic_algorithms(False)
    write_flags((), THREADS)
    torch.set_num_threads(THREADS)
    torch.set_default_dtype(torch.float32)


def seen(x: torch.Tensor) -> torch.Tensor:
    """What flags a process has, as bytes."""
    return torch.tensor(list(repr(read_flags()).encode()), dtype=torch.uint8)


def threads(x: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), torch.get_num_threads())


def of_workers() -> str:
    return bytes(lazygt.apply(seen, torch.ones(1)).tolist()).decode()


def threads_of_workers() -> int:
    return int(lazygt.apply(threads, torch.ones(1)))


def setting(owner: Any, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


CHANGES: dict[str, Callable[[], object]] = {
    "precision": lambda: torch.set_float32_matmul_precision("high"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warns": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "debug_mode": lambda: torch.set_deterministic_debug_mode("warn"),
    "fill": setting(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "denormal": lambda: torch.set_flush_denormal(True),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "tensor_type": lambda: torch.set_default_tensor_type(torch.DoubleTensor),
    "tf32": setting(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp16_reduction": setting(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
    ),
    "bf16_reduction": setting(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)
    ),
    "fp16_sums": setting(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "cudnn": setting(torch.backends.cudnn, "enabled", False),
    "cudnn_tf32": setting(torch.backends.cudnn, "allow_tf32", False),
    "benchmark": setting(torch.backends.cudnn, "benchmark", True),
    "cudnn_deterministic": setting(torch.backends.cudnn, "deterministic", True),
    "mkldnn": setting(torch.backends.mkldnn, "enabled", False),
    "mkldnn_deterministic": setting(torch.backends.mkldnn, "deterministic", True),
    "generic_precision": setting(torch.backends, "fp32_precision", "tf32"),
    "mkldnn_precision": setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "conv_precision": setting(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "nnpack": lambda: torch.backends.nnpack.set_flags(False),
    "flags": lambda: torch.backends.cudnn.set_flags(_benchmark=True, _deterministic=True),
}


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("name", CHANGES)
def test_flag_reaches_the_workers_and_leaves_them_again(name: str, session: Session) -> None:
    assert of_workers() == "()"
    CHANGES[name]()
    assert read_flags() != ()
    assert of_workers() == repr(read_flags())
    reset()
    torch.set_default_dtype(torch.float32)
    assert of_workers() == "()"


def test_flags_set_before_a_session_reach_its_workers() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(THREADS + 2)
    with lazygt.session():
        assert of_workers() == repr(read_flags())
        assert threads_of_workers() == THREADS + 2


def test_threads_of_the_program_reach_workers_unless_the_session_says(session: Session) -> None:
    before = threads_of_workers()
    torch.set_num_threads(THREADS + 1)
    assert threads_of_workers() == THREADS + 1
    torch.set_num_threads(THREADS)
    assert threads_of_workers() == before
    with lazygt.session(workers=lazygt.Workers(threads=1)):
        torch.set_num_threads(THREADS + 1)
        assert threads_of_workers() == 1


def test_ops_run_under_the_flags_that_they_were_recorded_under(session: Session) -> None:
    x = torch.full((3,), TINY, dtype=torch.float64)
    kept = x * 0.5
    torch.set_flush_denormal(True)
    flushed = x * 0.5
    torch.set_flush_denormal(False)
    again = x * 0.5
    session.synchronize()
    assert [t[0].item() for t in (kept, flushed, again)] == [TINY / 2, 0.0, TINY / 2]


def test_default_dtype_changes_in_the_midst_of_a_trace(session: Session) -> None:
    numbers = torch.arange(3)
    for _ in range(2):
        single = numbers.sqrt(), numbers / 2, torch.zeros(2), torch.tensor(1.5), numbers + 0.5
        torch.set_default_dtype(torch.float64)
        double = numbers.sqrt(), numbers / 2, torch.zeros(2), torch.tensor(1.5), numbers + 0.5
        torch.set_default_dtype(torch.float32)
        assert {t.dtype for t in single} == {t.cpu().dtype for t in single} == {torch.float32}
        assert {t.dtype for t in double} == {t.cpu().dtype for t in double} == {torch.float64}
        eager = torch.arange(3, device="cpu").double().sqrt()  # of MKL, which rounds on its own
        assert torch.equal(double[0].cpu(), eager)


def zeros_of(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) + x


def test_default_dtype_holds_inside_functions_that_workers_run(session: Session) -> None:
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        result = lazygt.apply(zeros_of, torch.arange(2))
        assert result.dtype == result.cpu().dtype == dtype


@pytest.mark.parametrize("fills", [True, False])
def test_new_memory_is_filled_as_in_eager_torch(fills: bool, session: Session) -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    dtypes = (torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.bool, torch.complex64)

    def made(device: str) -> list[torch.Tensor]:
        like = torch.zeros(2, 3, device=device)
        return [
            *[torch.empty(3, dtype=dtype, device=device) for dtype in dtypes],
            torch.empty(0, device=device),
            torch.empty(1, 4, 2, 2, device=device, memory_format=torch.channels_last),
            torch.empty_strided((2, 2), (1, 3), device=device),
            torch.empty_like(like),
            like.new_empty(2),
        ]

    lazy, eager = made("lazygt"), made("cpu")
    torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(lazy, eager, strict=True):
        assert ours.stride() == theirs.stride()
        if fills:
            assert torch.equal(ours.cpu().nan_to_num(7), theirs.nan_to_num(7))


def test_op_that_is_deterministic_on_the_workers_device_is_not_refused(session: Session) -> None:
    values = torch.arange(10.0)
    torch.use_deterministic_algorithms(True)
    assert torch.histc(values, 4, 0, 9).tolist() == [3, 2, 2, 3]


def test_nondeterministic_op_fails_with_torchs_message_and_the_users_line(
    session: Session,
) -> None:
    def put(device: str) -> torch.Tensor:
        where, what = torch.tensor([1], device=device), torch.tensor([2.0], device=device)
        return torch.zeros(3, device=device).put_(where, what)

    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as eager:
        put("cpu")
    with pytest.raises(RuntimeError) as ours:
        put("lazygt").tolist()
    assert str(eager.value) in str(ours.value)
    assert f"{__file__}:{put.__code__.co_firstlineno + 2}" in str(ours.value)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert put("lazygt").tolist() == [0, 2, 0]


def test_unchanged_flag_sends_nothing(session: Session) -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    recorded = torch.ones(3) + 1
    before = dict(session.stats()["flushes"])
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(torch.get_num_threads())
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, fp32_precision="none"):
        pass
    assert session.stats()["flushes"] == before
    assert recorded.tolist() == [2, 2, 2]


def test_steps_under_flags_send_no_extra_bytes(session: Session) -> None:
    def sent() -> tuple[int, int]:
        weight = torch.ones(4)
        for _ in range(6):
            weight.mul_(0.5).sum().item()
        before = session.stats()
        for _ in range(5):
            weight.mul_(0.5).sum().item()
        after = session.stats()
        assert after["plans_built"] == before["plans_built"]
        messages, nbytes = [after[k] - before[k] for k in ("messages_sent", "bytes_sent")]
        return messages, nbytes

    without = sent()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    under = sent()
    assert under[0] == without[0]
    assert abs(under[1] - without[1]) <= 5 * 2  # a number may take a byte more by then


def test_runs_that_alternate_between_flags_take_two_plans(session: Session) -> None:
    x = torch.full((3,), TINY, dtype=torch.float64)
    session.flush()
    before, found = session.stats()["plans_built"], []
    for step in range(12):
        torch.set_flush_denormal(step % 3 == 2)
        found.append((x * 0.5).sum().item())
    assert found == [TINY * 1.5, TINY * 1.5, 0.0] * 4
    assert session.stats()["plans_built"] == before + 2


def test_replayed_runs_have_the_flags_that_they_had() -> None:
    with lazygt.session(
        workers=lazygt.Workers(threads=1), recovery=lazygt.Recovery(snapshot_cost=1e-6)
    ) as s:
        x = torch.full((3,), TINY, dtype=torch.float64)
        kept = x * 0.5
        torch.set_flush_denormal(True)
        flushed = x * 0.5
        torch.set_default_dtype(torch.float64)
        wide = torch.arange(3).sqrt()
        s.synchronize()
        os.kill(s.worker_pids[0], signal.SIGKILL)
        assert kept.tolist() == [TINY / 2] * 3
        assert flushed.tolist() == [0.0] * 3
        assert wide.cpu().dtype == torch.float64
        assert of_workers() == repr(read_flags())
        assert len(s.recoveries) == 1


def test_all_workers_of_a_sharded_session_have_the_flags() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        x = lazygt.distribute(torch.full((4,), TINY, dtype=torch.float64), [Shard(0)])
        kept = x * 0.5
        torch.set_flush_denormal(True)
        flushed = x * 0.5
        assert kept.tolist() == [TINY / 2] * 4
        assert flushed.tolist() == [0.0] * 4


def test_inline_sessions_run_under_the_flags_of_the_process() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.full((3,), TINY, dtype=torch.float64)
        kept = x * 0.5
        torch.set_flush_denormal(True)
        flushed = x * 0.5
        assert of_workers() == repr(read_flags()) == "(('flush_denormal', True),)"
        torch.set_flush_denormal(False)
        assert (kept.tolist(), flushed.tolist()) == ([TINY / 2] * 3, [0.0] * 3)
    torch.use_deterministic_algorithms(True)
    with lazygt.session(launcher="inline"):
        assert of_workers() == repr(read_flags())
    assert torch.are_deterministic_algorithms_enabled()


def test_all_open_sessions_ship_before_a_flag_changes(session: Session) -> None:
    outer = torch.full((3,), TINY, dtype=torch.float64) * 0.5
    with lazygt.session(launcher="inline"):
        inner = torch.full((3,), TINY, dtype=torch.float64) * 0.5
        torch.set_flush_denormal(True)
        assert inner.tolist() == [TINY / 2] * 3
    assert outer.tolist() == [TINY / 2] * 3


def test_plan_names_its_flags(session: Session) -> None:
    torch.backends.cudnn.benchmark = True
    torch.ones(2).tolist()
    assert session.last_plan is not None
    assert " under cudnn.benchmark=True {" in str(session.last_plan)
