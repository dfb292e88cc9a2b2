"""Hot plans are compiled in another process and swapped in; whatever goes wrong, they go on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

import lazygt
from lazygt.runtime.compiling import compiler
from lazygt.runtime.executors.compiled import Cache
from lazygt.settings import grouped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

#: One compile serves all tests that want just any compiled plan.
SIZE = 100_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(autouse=True)
def cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(shared))
    return shared


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def chain(x: Tensor, factor: float) -> Tensor:
    for _ in range(4):
        x = (x + 0.25).abs() * 0.5 * factor
    return x


def results(device: str, sizes: list[int], factor: float = 1.5) -> list[Tensor]:
    made = [torch.rand(size, generator=torch.Generator().manual_seed(0)) for size in sizes]
    return [chain(x.to(device), factor).cpu() for x in made]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("launcher", ["process", "inline"])
def test_a_plan_seen_twice_is_compiled(launcher: str) -> None:
    expected = results("cpu", [SIZE] * 4)
    with lazygt.session(compile="auto", launcher=launcher) as s:
        first = results("lazygt", [SIZE] * 2)
        assert s.compiled(timeout=200)
        after = results("lazygt", [SIZE] * 2)
        signs = [results("lazygt", [SIZE], factor)[0].signbit() for factor in (0.0, -0.0)]
        (made,) = s.compiles()
    # before the swap nothing is compiled, so every bit is eager's
    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=False))
    same(after, expected[2:])
    assert [bool(each.all()) for each in signs] == [False, True]
    assert made.status in {"compiled", "cached"}
    assert made.tier == "compiled"
    assert made.gain > 1
    assert made.ops == 16


def test_a_program_that_ends_at_once_compiles_nothing(empty_cache: Path) -> None:
    with lazygt.session(compile="auto") as s:
        results("lazygt", [SIZE] * 2)
        assert s.compiles() == []
        assert s.compiler_pid is None


def test_a_program_that_goes_on_is_compiled_unasked(empty_cache: Path) -> None:
    with lazygt.session(compile="auto") as s:
        until = time.monotonic() + 60
        while not s.compiles() and time.monotonic() < until:
            results("lazygt", [SIZE])
        assert s.compiles()


def test_run_time_numbers_stay_open() -> None:
    with lazygt.session(compile="auto") as s:
        results("lazygt", [SIZE] * 2)
        assert s.compiled(timeout=200)
        same(results("lazygt", [SIZE], factor=0.75), results("cpu", [SIZE], factor=0.75))
        assert s.stats()["plans_built"] == 1


def test_now_compiles_before_the_first_run() -> None:
    with lazygt.session(compile="now") as s:
        found = results("lazygt", [SIZE])
        (made,) = s.compiles()
        assert made.status in {"compiled", "cached"}
    same(found, results("cpu", [SIZE]))


def test_off_compiles_nothing_and_stays_bit_exact() -> None:
    with lazygt.session(compile="off") as s:
        found = results("lazygt", [SIZE] * 4)
        assert s.compiled()
        assert s.compiles() == []
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 4), strict=True))


def test_a_second_start_is_warm() -> None:
    with lazygt.session(compile="now"):
        results("lazygt", [SIZE])
    with lazygt.session(compile="now") as s:
        results("lazygt", [SIZE])
        (made,) = s.compiles()
        assert made.status == "cached"
        assert s.compiler_pid is None


def test_one_artifact_serves_every_size() -> None:
    sizes = [SIZE, SIZE, SIZE + 32, SIZE + 32, SIZE + 1000]
    with lazygt.session(compile="now") as s:
        same(results("lazygt", sizes), results("cpu", sizes))
        assert len(s.compiles()) == 1


def test_sizes_that_vary_become_open() -> None:
    def row_means(device: str, rows: int) -> Tensor:
        torch.manual_seed(0)
        x = torch.rand(rows, 4096).to(device)
        return ((x * 2 + 1).tanh().mean(1) + 0.5).cpu()

    with lazygt.session(compile="now") as s:
        for rows in (40, 50, 60, 45, 33):
            torch.testing.assert_close(row_means("lazygt", rows), row_means("cpu", rows))
        assert [one.status for one in s.compiles()] == ["compiled", "compiled"]


@pytest.mark.anew
def test_a_failed_compile_is_said_once_and_costs_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nseq 1000 >&2\necho 'a.cpp:1: error: mine' >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    with lazygt.session(compile="auto") as s, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results("lazygt", [SIZE] * 2)
        assert s.compiled(timeout=200)
        found += results("lazygt", [SIZE])
        (made,) = s.compiles()
        (row,) = [row for row in str(lazygt.why(s)).splitlines() if "stay eager" in row]
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))
    assert (made.status, made.tier) == ("failed", "eager")
    assert made.names == "mul_ x8, abs_ x4, add_ x3, add"
    assert "\n" not in made.error
    assert row.endswith(f"{made.line}  16 ops stay eager: {made.error} ({made.names})")
    (warned,) = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert f"({made.names}; {made.line}) could not be compiled: {made.error}\n" in str(
        warned.message
    )
    assert "compile='off'" in str(warned.message)


@pytest.mark.anew
def test_a_killed_compile_process_is_said_once_and_costs_nothing(empty_cache: Path) -> None:
    with lazygt.session(compile="auto") as s:
        found = results("lazygt", [SIZE] * 2)
        assert not s.compiled(timeout=0)
        pid = s.compiler_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="compile process ended"):
            s.compiled(timeout=100)
        found += results("lazygt", [SIZE])
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))


@pytest.mark.anew
@pytest.mark.parametrize("mode", ["auto", "now"])
def test_a_stopped_compile_process_is_given_up(
    mode: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = compiler._start

    def stopped(cache: Path) -> subprocess.Popen[bytes]:
        process = start(cache)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(compiler, "_start", stopped)
    with (
        lazygt.session(compile=mode, workers=lazygt.Workers(frozen_after=1.0)) as s,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = results("lazygt", [SIZE] * 2)
        assert s.compiled()
        assert s.compiler_pid is None
        assert [made.status for made in s.compiles()] == ["failed"]
        found += results("lazygt", [SIZE])
    assert "the compile process is stopped" in str([str(one.message) for one in caught])
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))


@pytest.mark.anew
def test_a_compile_process_that_never_answers_is_given_up(empty_cache: Path) -> None:
    with lazygt.session(compile=lazygt.Compile("auto", timeout=0.3)) as s:
        results("lazygt", [SIZE] * 2)
        with pytest.warns(
            RuntimeWarning, match=r"answered nothing for 0\.3 s; .*=Compile\(timeout="
        ):
            assert s.compiled()
        assert s.compiler_pid is None


@pytest.mark.anew
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGKILL, lazygt.WorkerDied), (signal.SIGSTOP, lazygt.WorkerFrozen)],
)
def test_a_wait_for_compiled_code_watches_the_workers(
    empty_cache: Path, number: signal.Signals, error: type[lazygt.LazyGTError]
) -> None:
    settings = {"compile": "auto", "workers": 2, "frozen_after": 1.0, "recovery": "off"}
    with lazygt.session(**grouped(settings)) as s:
        results("lazygt", [SIZE] * 2)
        s.synchronize()  # who has not come up yet has until start_timeout
        assert not s.compiled(timeout=0)
        pid = s.compiler_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # no compile ends the wait before
        os.kill(s.worker_pids[1], number)
        with pytest.raises(error):
            s.compiled()
        s.close()


def test_the_compile_process_ends_with_its_session(empty_cache: Path) -> None:
    with lazygt.session(compile="auto") as s:
        results("lazygt", [SIZE] * 2)
        assert not s.compiled(timeout=0)
        pid = s.compiler_pid
        assert pid is not None
    assert not psutil.pid_exists(pid)


def test_a_forgotten_plan_comes_back_compiled() -> None:
    with lazygt.session(compile="now", planning=lazygt.Planning(max_plans=1)) as s:
        for _ in range(2):
            same(results("lazygt", [SIZE]), results("cpu", [SIZE]))
            torch.ones(3, device="lazygt").sum().item()
        assert {one.tier for one in s.compiles()} == {"compiled"}


def test_a_cache_that_others_may_write_to_is_refused(empty_cache: Path) -> None:
    empty_cache.mkdir()
    empty_cache.chmod(0o777)
    with lazygt.session(compile="auto") as s:
        found = results("lazygt", [SIZE] * 2)
        with pytest.warns(RuntimeWarning, match="only you may write"):
            s.compiled()
        found += results("lazygt", [SIZE])
        assert [(made.status, "only you" in made.error) for made in s.compiles()] == [
            ("failed", True)
        ]
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))


def test_a_cache_that_is_closed_meanwhile_leaves_nothing_compiling(empty_cache: Path) -> None:
    with lazygt.session(compile="auto") as s:
        found = results("lazygt", [SIZE] * 2)
        assert not s.compiled(timeout=0)
        assert [made.status for made in s.compiles()] == ["compiling"]
        empty_cache.chmod(0o777)
        with pytest.warns(RuntimeWarning, match="only you may write"):
            assert s.compiled(timeout=200)
        assert [(made.status, "only you" in made.error) for made in s.compiles()] == [
            ("failed", True)
        ]
        found += results("lazygt", [SIZE])
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))


@pytest.mark.anew
def test_damaged_code_is_compiled_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")  # Inductor tries them all, as for users
    with lazygt.session(compile=lazygt.Compile("now", cache_dir=str(empty_cache))) as s:
        results("lazygt", [SIZE])
    (code,) = empty_cache.glob("*.so")
    whole = code.read_bytes()
    code.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with lazygt.session(compile=lazygt.Compile("now", cache_dir=str(empty_cache))) as s:
        same(results("lazygt", [SIZE]), results("cpu", [SIZE]))
        assert [(made.status, made.tier) for made in s.compiles()] == [("compiled", "compiled")]


@pytest.mark.anew
def test_a_compile_process_that_cannot_start_is_said_once_and_costs_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with lazygt.session(compile="auto") as s:
        found = results("lazygt", [SIZE] * 2)
        monkeypatch.setattr("lazygt.runtime.compiling.compiler.subprocess.Popen", refused)
        with pytest.warns(RuntimeWarning, match="temporarily unavailable"):
            assert s.compiled(timeout=10)
        assert [made.status for made in s.compiles()] == ["failed"]
        found += results("lazygt", [SIZE])
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seconds": 1, "times": []}', '{"seconds": 1, "times": 5}',
             '{"seconds": 1, "times": [[1, 2]]}', '{"seconds": "x", "times": [[1, 2, 3]]}'],
)  # fmt: skip
def test_a_record_that_is_none_is_as_good_as_missing(text: str, tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "cache"))
    (cache.directory() / f"{'0' * 32}.json").write_text(text)
    assert cache.find("0" * 32) is None


def test_code_that_cannot_be_loaded_is_said_and_costs_nothing(
    shared: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(shared))
    with lazygt.session(compile="now") as s:
        results("lazygt", [SIZE])
        (made,) = s.compiles()
    record = Cache(str(shared)).find(made.key)
    assert record is not None
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(empty_cache))
    Cache(str(empty_cache)).keep(made.key, b"no code", record)
    with lazygt.session(compile="auto") as s:
        found = results("lazygt", [SIZE] * 2)
        with pytest.warns(RuntimeWarning, match="stays on the eager tier"):
            s.compiled()
        found += results("lazygt", [SIZE])
    assert all(torch.equal(a, b) for a, b in zip(found, results("cpu", [SIZE] * 3), strict=True))
