"""Compiled code for hosts with caches of their own: asked for, sent once, and all or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lazygt
from lazygt.errors import ProtocolError
from lazygt.runtime.compiling import kernel_group
from lazygt.runtime.compiling.artifacts import Cache, Record
from lazygt.runtime.compiling.installs import Installs
from lazygt.runtime.compiling.kernel_group import toolchain
from lazygt.runtime.compiling.tiers import Compile
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer, decode, encode
from lazygt.runtime.worker import Worker
from tests.runtime.cluster.agents import Hosts, on_host

pytestmark = pytest.mark.timeout(240)

KEY = "0123456789abcdef" * 2
RECORD = Record(1.0, ((1024, 2e-6, 1e-6),))
CODE = b"code of a test" * 1000


class Far:
    """Workers with caches of their own, which answer when they are asked to."""

    def __init__(self, folders: dict[int, Path]) -> None:
        self.workers = {rank: Worker(cache_dir=str(folder)) for rank, folder in folders.items()}
        self.told: list[tuple[int, Install, Sequence[Buffer]]] = []

    def tell(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None:
        self.told.append((rank, message, buffers))

    def answer(self, installs: Installs) -> list[tuple[int, int]]:
        """Have all answered that they were told; (rank, buffers) of each."""
        seen = []
        while self.told:
            rank, message, buffers = self.told.pop(0)
            seen.append((rank, len(buffers)))
            (reply,) = self.workers[rank].handle(encode(message, buffers))
            installs.answered(rank, decode(reply, (Installed,)))
        return seen


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(str(tmp_path / "client"))
    cache.keep(KEY, CODE, RECORD)
    return cache


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far({2: tmp_path / "second", 4: tmp_path / "third"})


def installs_of(cache: Cache, far: Far) -> Installs:
    return Installs(sorted(far.workers), cache, "cpu", far.tell)


def test_what_a_host_lacks_is_sent_once(cache: Cache, far: Far, tmp_path: Path) -> None:
    installs = installs_of(cache, far)
    assert not installs.fits()
    assert far.answer(installs) == [(2, 0), (4, 0)]
    assert installs.fits()
    assert not installs.ready([KEY])
    assert not installs.ready([KEY])  # it is asked for once
    assert far.answer(installs) == [(2, 0), (4, 0), (2, 2), (4, 2)]
    assert installs.ready([KEY])
    assert installs.error == ""
    for folder in ("second", "third"):
        there = Cache(str(tmp_path / folder))
        assert there.find(KEY) == RECORD
        assert there.code(KEY).read_bytes() == CODE

    later = installs_of(cache, far)  # another session
    assert not later.ready([KEY])
    assert far.answer(later) == [(2, 0), (4, 0)]
    assert later.ready([KEY])


def test_what_was_asked_is_asked_again_after_a_recovery(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready([KEY])
    lost, far.told = far.told[1:], far.told[:1]
    assert len(lost) == 1
    installs.again()
    assert far.answer(installs) == [(2, 0), (2, 0), (4, 0), (2, 2), (4, 2)]
    assert installs.ready([KEY])
    assert installs.error == ""


def damaged(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    return [buffers[0], bytes(buffers[1])[:-1]]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Install("../../etc/passwd", toolchain("cpu")), "is not the key of an artifact"),
        (Install(KEY, toolchain("cpu")), "was damaged on its way"),
        (Install(KEY, "another processor"), "'another processor', and this is 'cpu|', and this is"),
    ],
)
def test_what_is_not_an_artifact_is_not_kept(
    message: Install, said: str, cache: Cache, far: Far, tmp_path: Path
) -> None:
    record, code = cache.copy_of(KEY)
    (reply,) = far.workers[2].handle(encode(message, damaged([record, code])))
    told = decode(reply, (Installed,))
    assert any(part in told.error for part in said.split("|"))
    assert not list((tmp_path / "second").glob("*"))


def test_a_worker_that_takes_no_code_takes_none(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_SHIP_CODE", "0")
    far = Far({1: tmp_path / "second"})
    installs = installs_of(cache, far)
    assert not installs.fits()
    far.answer(installs)
    assert "takes no code (LAZYGT_SHIP_CODE=0)" in installs.error


def test_an_artifact_that_is_gone_is_not_sent(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready([KEY])
    (Path(cache.place) / f"{KEY}.json").unlink()
    assert far.answer(installs) == [(2, 0), (4, 0)]
    assert "the cache was emptied meanwhile" in installs.error


def test_who_was_not_asked_makes_no_sense() -> None:
    with lazygt.session(compile="off", launcher="inline") as session, pytest.raises(ProtocolError):
        session._client.take((0, encode(Installed(KEY))))


# -- sessions --------------------------------------------------------------------------------


@pytest.fixture
def far_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the other host's lies; the client's is empty, too."""
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(tmp_path / "client"))
    return tmp_path / "far"


def launching(hosts: Hosts, far_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions with a worker on either of two hosts, each with a cache of its own."""
    from lazygt.runtime.launch import opening
    from tests.runtime.cluster import agents

    def elsewhere(number: int) -> Callable[..., object]:
        return lambda spec: replace(
            on_host(number)(spec),
            environment={**spec.environment, "LAZYGT_CACHE_DIR": str(far_cache)},
        )

    monkeypatch.setattr(agents, "on_host", elsewhere)
    monkeypatch.setitem(opening.LAUNCHERS, "two-hosts", hosts.open([1, 1]))


def step(x: torch.Tensor) -> torch.Tensor:
    return ((x + 0.25).abs() * 0.5 * torch.sin(x) + x.tanh()).sigmoid()


def compiled_run(launcher: str, midway: Callable[[], object] = int) -> tuple[torch.Tensor, int]:
    """What compiled code makes on two ranks, and how many bytes they were sent.

    Args:
        midway: is called when it is compiled.
    """
    start = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    with lazygt.session(
        compile="now", launcher=launcher, workers=2, mesh={"data": 2}, threads=1
    ) as session:
        x = lazygt.distribute(start.to("lazygt"), {"data": lazygt.Shard(0)})
        for _ in range(6):
            x = step(x)
            x.sum().item()
        assert session.compiled(timeout=200)
        midway()
        x = step(x)
        assert {made.tier for made in session.compiles()} == {"compiled"}
        return x.cpu(), session._client.counts.bytes_sent


@pytest.mark.slow
def test_ranks_on_all_hosts_run_what_was_compiled(
    far_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts()
    launching(hosts, far_cache, monkeypatch)
    try:
        first, much = compiled_run("two-hosts")
        again, little = compiled_run("two-hosts")
    finally:
        hosts.close()
    on_one_host, _ = compiled_run("process")
    assert torch.equal(first, again)
    assert torch.equal(first, on_one_host)
    artifacts = list(far_cache.glob("*.so"))
    here = (far_cache.parent / "client").glob("*.so")
    assert {path.name for path in artifacts} == {path.name for path in here} != set()
    assert much - little > sum(path.stat().st_size for path in artifacts)


@pytest.mark.slow
def test_where_a_host_is_lost_its_ranks_go_on_with_the_same_code(
    far_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts()
    launching(hosts, far_cache, monkeypatch)
    try:
        found, _ = compiled_run("two-hosts", lambda: hosts.lose(0))
    finally:
        hosts.close()
    expected, _ = compiled_run("process")
    assert torch.equal(found, expected)


def one_run() -> tuple[list[Compile], int | None]:
    """What was compiled for a session on two hosts, and in which process."""
    with lazygt.session(
        compile="now", launcher="two-hosts", workers=2, mesh={"data": 2}
    ) as session:
        x = lazygt.distribute(torch.rand(20_000), {"data": lazygt.Shard(0)})
        assert step(x).sum().item() > 0
        return session.compiles(), session.compiler_pid


@pytest.mark.slow
def test_where_one_host_s_processor_is_another_nothing_is_compiled(
    far_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts()
    launching(hosts, far_cache, monkeypatch)
    monkeypatch.setattr(kernel_group, "_instructions", lambda: "others")
    toolchain.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="a host can't run it: worker 1: code is compiled"):
            compiles, pid = one_run()
    finally:
        hosts.close()
        toolchain.cache_clear()
    assert (compiles, pid) == ([], None)
