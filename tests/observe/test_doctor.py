"""`lazygt doctor`: what it says, and what it makes of machines that lack something."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import lazygt
from lazygt.observe import doctor


def test_report_names_every_part_once() -> None:
    names = [check.name for check in doctor.report()]
    assert names == [
        "python",
        "torch",
        "cuda",
        "collectives",
        "compiler",
        "recorder",
        "plan code",
        "cores",
        "threads",
        "memory",
        "shared memory",
        "process watch",
        "costs",
    ]


def test_this_machine_can_run_lazygt() -> None:
    assert [check for check in doctor.report() if check.status == "fail"] == []


@pytest.mark.parametrize(
    ("text", "expected"), [("2.13.0+cpu", (2, 13)), ("2.11.0a0", (2, 11)), ("3.0.1", (3, 0))]
)
def test_version_of(text: str, expected: tuple[int, int]) -> None:
    assert doctor.version_of(text) == expected


def test_old_torch_fails_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    check = doctor.torch_version()
    assert (check.status, check.advice) == ("fail", "install torch 2.11 or newer")


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    check = doctor.compiler()
    assert check.status == "warn"
    assert "install g++" in check.advice


def test_a_quota_below_the_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 0.5)
    assert "may use 0.5 cores" in doctor.cores().advice


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda: 1 << 30)
    assert doctor.memory() == doctor.Check(
        "memory", "warn", "1.0 GiB available", "each worker loads torch: about 0.3 GiB by itself"
    )


def test_a_session_that_does_not_open_is_a_failure() -> None:
    @contextmanager
    def broken() -> Iterator[None]:
        raise OSError("no socket")
        yield

    check = doctor.report(broken)[-1]
    assert (check.name, check.status, check.detail) == ("session", "fail", "OSError: no socket")


@pytest.mark.parametrize("launcher", ["inline", "process"])
def test_a_real_session_works(launcher: str) -> None:
    check = doctor.session(lambda: lazygt.session(workers=1, launcher=launcher))
    assert check.status == "ok", check
