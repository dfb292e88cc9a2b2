"""Settings that every test shares: one thread, repeatable draws, no process left behind."""

import os

# Thousands of processes import lazygt: the first one compiles it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Read by OpenMP when torch loads its library, so they must stand before the import below.
# One thread makes sums bit-exact; passive waiting keeps idle threads off the shared cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["GOMP_SPINCOUNT"] = "0"
# Every graph that any test records is verified after every pass.
os.environ["LAZYGT_CHECK_PASSES"] = "1"
# Compiled code rounds differently: tests of the compiled tier ask for it.
os.environ["LAZYGT_COMPILE"] = "off"
# Inductor takes the processor's word for its vector instructions, and compiles no code to try them.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
# Plans are those that come without a calibration.
os.environ.pop("LAZYGT_MACHINE", None)

import gc
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import PurePath
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

from lazygt.record.bridge import NativeRecorder
from lazygt.recovery import recover
from lazygt.runtime.compiling import compiler
from lazygt.runtime.executors.compiled import Record
from tests.support import forking
from tests.support.timeouts import DEEP, patience

# A shell starts jobs in the background with SIGINT ignored; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Messages and their bytes are asserted to the last one, and snapshots are sent by the clock: tests
# of recovery have them.
recover._LEAST_SECONDS = 1e9

# Tests compare bits with eager torch, and a sum over two threads adds in another order.
torch.set_num_threads(1)

# torch.testing._internal freezes the flags of the process that imports it; programs set theirs.
torch.backends.disable_global_flags = lambda: None  # type: ignore[attr-defined]

CHILD_EXIT_SECONDS = 5.0
#: A test's limit is for one that hangs; this is how much slower a busy machine may be.
BUSY = 10

settings.register_profile(
    "ci",
    max_examples=60,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    max_examples=5_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile, and none of modules and tests later: it takes half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Load the profile again: torch.testing, once imported, has loaded one with 10 examples."""
    chosen = session.config.getoption("--hypothesis-profile", None)
    settings.load_profile(chosen or os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the minutes of each part of the tests, with those of its setup."""
    minutes: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = PurePath(report.nodeid.partition("::")[0])
                minutes["/".join(path.parts[:2])] += report.duration / 60
    if sum(minutes.values()) >= 1:
        terminalreporter.section("minutes of each part, of all processes together")
        for part, spent in minutes.most_common():
            terminalreporter.write_line(f"{spent:6.1f} {part}")


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Draw one of each `n` cases of the tests that are marked ``sampled(n)``, always the same ones,
    and return the others."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {item for all_ in cases.values() for item in all_}
    for test, all_ in cases.items():
        apart = all_[0].get_closest_marker("sampled").args[0]  # type: ignore[union-attr]
        left.difference_update(random.Random(test).sample(all_, -(-len(all_) // apart)))
    return left


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not DEEP and (left := left_out(items)):
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    for item in items:
        if item.get_closest_marker("deep") is not None and not DEEP:
            item.add_marker(pytest.mark.skip(reason="minutes: `make test-deep`"))
        limit = item.get_closest_marker("timeout")
        if limit is not None:
            item.add_marker(pytest.mark.timeout(BUSY * limit.args[0]), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fork what the test starts from a process with torch, its sessions' workers too."""
    anew = item.get_closest_marker("anew") is not None
    subprocess.Popen = forking.Popen if anew else forking.Forked  # type: ignore[misc]


@pytest.fixture(scope="session", autouse=True)
def compile_like_others() -> Iterator[Callable[[int], None]]:
    """The compile process gets only what nobody else wants, which on a busy machine is nothing."""
    with pytest.MonkeyPatch.context() as patch:
        theirs = compiler.leave_only_spare_time
        patch.setattr(compiler, "leave_only_spare_time", lambda pid: None)
        yield theirs


@pytest.fixture
def compiled_code_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have compiled code used, on machines that gain nothing by it, too."""
    monkeypatch.setattr(Record, "gain", lambda record, numel: 2.0)
    monkeypatch.setattr(Record, "saved", lambda record, numel: 1.0)


@pytest.fixture
def ops_in_python(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that C++ has to ask Python about, as they come."""
    asked: list[str] = []
    own = NativeRecorder.step_for

    def step_for(self: NativeRecorder, f: Any, args: Any, kwargs: Any) -> Any:
        asked.append(f.name)
        return own(self, f, args, kwargs)

    monkeypatch.setattr(NativeRecorder, "step_for", step_for)
    return asked


@pytest.fixture(scope="session", autouse=True)
def seed_what_is_there() -> Iterator[None]:
    """torch keeps the formatted stack of each seed for GPUs, should there be some later."""
    with pytest.MonkeyPatch.context() as patch:
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            if not devices.is_available():
                patch.setattr(devices, "manual_seed_all", lambda seed: None)
        yield


def child_pids() -> set[int]:
    """Direct children of this process, zombies included."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(int(pid) for pid in file.read().split())
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
    return found


def lives_on(process: psutil.Process) -> bool:
    """multiprocessing's own tracker and what we fork live as long as the interpreter, by design."""
    tracker = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return tracker or forking.is_template(process.pid)


def left_behind(before: set[int]) -> list[str]:
    """Children that started since `before` and are still there after a grace period."""
    started = []
    for pid in child_pids() - before:
        try:
            process = psutil.Process(pid)
            if not lives_on(process):
                started.append(process)
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(started, timeout=patience(CHILD_EXIT_SECONDS))
    return [describe(process) for process in alive]


def describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"pid {process.pid}"


@pytest.fixture(autouse=True)
def no_child_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process; wider fixtures open theirs before this runs."""
    before = child_pids()
    yield
    alive = left_behind(before)
    assert not alive, "child processes left behind:\n" + "\n".join(alive)
