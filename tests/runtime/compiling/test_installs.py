"""Compiled code for hosts with caches of their own: asked for, sent once, and all or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lazygt
from lazygt.config import Config
from lazygt.errors import ProtocolError
from lazygt.runtime.client.reports import Installs
from lazygt.runtime.cluster import opening
from lazygt.runtime.compiling.tiers import CompileRecord
from lazygt.runtime.executors import kernel_group
from lazygt.runtime.executors.compiled import Cache, Record
from lazygt.runtime.executors.kernel_group import toolchain
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.messages import Install, Installed
from lazygt.runtime.wire import Buffer, decode, encode
from lazygt.runtime.worker import shipped_plans
from lazygt.runtime.worker.worker import Worker
from tests.runtime.cluster import agents
from tests.runtime.cluster.agents import Hosts, on_host

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("compiled_code_pays")]

KEY = "0123456789abcdef" * 2
RECORD = Record(1.0, ((1024, 2e-6, 1e-6),))
CODE = b"code of a test" * 1000


class Far:
    """Workers with caches of their own, which answer when they are asked to.

    Attributes:
        hosts: the number of each host -> a rank that is there.
    """

    def __init__(self, folder: Path, hosts: dict[int, int]) -> None:
        self.folder, self.hosts = folder, hosts
        self.workers: dict[int, Worker] = {}
        self.told: list[tuple[int, Install, Sequence[Buffer]]] = []

    def tell(self, rank: int, message: Install, buffers: Sequence[Buffer] = ()) -> None:
        self.told.append((rank, message, buffers))

    def cache(self, host: int) -> Cache:
        return Cache(str(self.folder / f"host{host}"))

    def answer(self, installs: Installs) -> list[tuple[int, int]]:
        """Have all answered that they were told; (rank, buffers) of each."""
        seen = []
        while self.told:
            rank, message, buffers = self.told.pop(0)
            seen.append((rank, len(buffers)))
            (host,) = (host for host, there in self.hosts.items() if there == rank)
            worker = self.workers.setdefault(
                host, Worker(config=Config.load(cache_dir=str(self.cache(host).path)))
            )
            (reply,) = worker.handle(encode(message, buffers))
            installs.answered(rank, decode(reply, (Installed,)))
        return seen


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(str(tmp_path / "client"))
    cache.keep(KEY, CODE, RECORD)
    return cache


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return Far(tmp_path, {0: 2, 1: 4})


@pytest.fixture
def loadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of these tests is none; where that is not the point, it can be loaded."""
    monkeypatch.setattr(shipped_plans, "load", lambda path, device: path.read_bytes())


def installs_of(cache: Cache, far: Far) -> Installs:
    return Installs(lambda: far.hosts, cache, "cpu", far.tell)


@pytest.mark.usefixtures("loadable")
def test_missing_artifact_is_sent_once_per_host(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    assert not installs.ready([""])
    assert far.answer(installs) == [(2, 0), (4, 0)]
    assert installs.ready([""])
    assert not installs.ready([KEY])
    assert not installs.ready([KEY])  # it is asked for once
    assert far.answer(installs) == [(2, 0), (4, 0), (2, 2), (4, 2)]
    assert installs.ready([KEY])
    assert (installs.error, installs.pending) == ("", set())
    for host in far.hosts:
        assert far.cache(host).find(KEY) == RECORD
        assert far.cache(host).code(KEY).read_bytes() == CODE

    later = installs_of(cache, far)  # another session
    assert not later.ready([KEY])
    assert far.answer(later) == [(2, 0), (4, 0)]
    assert later.ready([KEY])


@pytest.mark.usefixtures("loadable")
def test_unanswered_install_is_requested_again_after_recovery(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready([KEY])
    far.told.clear()
    installs.repeat_requests()
    assert far.answer(installs) == [(2, 0), (4, 0), (2, 2), (4, 2)]
    assert installs.ready([KEY])
    assert (installs.error, installs.pending) == ("", set())


@pytest.mark.usefixtures("loadable")
def test_new_host_gets_artifacts_of_plans(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready(["", KEY])
    far.answer(installs)
    assert installs.ready(["", KEY])
    far.hosts = {0: 2, 2: 4}  # in the place of a lost one
    installs.repeat_requests()
    assert installs.pending == {("", 2), (KEY, 2)}
    assert sorted(far.answer(installs)) == [(4, 0), (4, 2)]
    assert installs.ready(["", KEY])
    assert far.cache(2).find(KEY) == RECORD


def test_code_that_can_not_be_loaded_there_is_for_no_host(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready([KEY])
    far.answer(installs)
    assert not installs.ready([KEY])
    assert "worker 2: RuntimeError: " in installs.error
    assert installs.pending == set()


@pytest.mark.usefixtures("loadable")
def test_a_host_that_keeps_nothing_is_not_asked_for_ever(
    cache: Cache, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cache, "store_copy", lambda *_: None)
    installs = installs_of(cache, far)
    installs.ready([KEY])
    assert far.answer(installs) == [(2, 0), (4, 0), (2, 2), (4, 2)]
    assert installs.error == "worker 2: its cache does not keep what it is given"
    assert installs.pending == set()


def damaged(buffers: Sequence[Buffer]) -> Sequence[Buffer]:
    return [buffers[0], bytes(buffers[1])[:-1]]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Install("../client/" + KEY, toolchain("cpu")), "is not the key of an artifact"),
        (Install(KEY, toolchain("cpu")), "was damaged on its way"),
        (Install(KEY, "another processor"), "for 'another processor', and this is "),
    ],
)
def test_invalid_artifact_is_not_stored(
    message: Install, said: str, cache: Cache, far: Far
) -> None:
    there = far.cache(0)
    worker = Worker(config=Config.load(cache_dir=str(there.path)))
    for buffers in ([], damaged(cache.copy_of(KEY))):
        (reply,) = worker.handle(encode(message, buffers))
        told = decode(reply, (Installed,))
        if buffers or message.key != KEY or message.toolchain != toolchain("cpu"):
            assert said in told.error
    assert not there.path.exists() or not list(there.path.iterdir())


def test_a_worker_that_takes_no_code_takes_none(
    cache: Cache, far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYGT_SHIP_CODE", "0")
    installs = installs_of(cache, far)
    assert not installs.ready([""])
    far.answer(installs)
    assert "takes no code (LAZYGT_SHIP_CODE=0)" in installs.error


def test_an_artifact_that_is_gone_is_not_sent(cache: Cache, far: Far) -> None:
    installs = installs_of(cache, far)
    installs.ready([KEY])
    (cache.path / f"{KEY}.json").unlink()
    assert far.answer(installs) == [(2, 0), (4, 0)]
    assert "worker 2: it could not be sent" in installs.error
    assert installs.pending == set()


def test_unrequested_install_reply_is_protocol_error() -> None:
    with lazygt.session(compile="off", launcher="inline") as session, pytest.raises(ProtocolError):
        session._client.handle((0, encode(Installed(KEY))))


# -- sessions --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's: one compile serves all tests."""
    return tmp_path_factory.mktemp("client")


@pytest.fixture
def far_cache(tmp_path: Path, near_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The other host's, which is empty."""
    monkeypatch.setenv("LAZYGT_CACHE_DIR", str(near_cache))
    return tmp_path / "far"


@pytest.fixture
def two_hosts(far_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Sessions with ``launcher="two-hosts"`` have a worker on either, each with its own cache."""

    def elsewhere(number: int) -> Callable[..., LinkSpec]:
        return lambda spec: replace(
            on_host(number)(spec),
            environment={**spec.environment, "LAZYGT_CACHE_DIR": str(far_cache)},
        )

    hosts = Hosts()
    monkeypatch.setattr(agents, "on_host", elsewhere)
    monkeypatch.setitem(opening.LAUNCHERS, "two-hosts", hosts.open([1, 1]))
    yield hosts
    hosts.close()


def step(x: torch.Tensor) -> torch.Tensor:
    return ((x + 0.25).abs() * 0.5 * torch.sin(x) + x.tanh()).sigmoid()


def compiled_run(launcher: str, midway: Callable[[], object] = int) -> tuple[torch.Tensor, int]:
    """What compiled code makes on two ranks, and how many bytes they were sent.

    Args:
        midway: is called when it is compiled.
    """
    start = torch.rand(200_000, generator=torch.Generator().manual_seed(0))
    with lazygt.session(
        compile="now", launcher=launcher, workers=lazygt.Workers(2, threads=1), mesh={"data": 2}
    ) as session:
        x = lazygt.distribute(start.to("lazygt"), {"data": lazygt.Shard(0)})
        for _ in range(6):
            x = step(x)
            session.flush()
        assert session.compiled(timeout=200)
        midway()
        x = step(x)
        assert {made.tier for made in session.compiles()} == {"compiled"}
        return x.cpu(), session._client.counts.bytes_sent


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_ranks_on_all_hosts_run_compiled_code(near_cache: Path, far_cache: Path) -> None:
    first, much = compiled_run("two-hosts")
    again, little = compiled_run("two-hosts")
    on_one_host, _ = compiled_run("process")
    assert torch.equal(first, again)
    assert torch.equal(first, on_one_host)
    artifacts = list(far_cache.glob("*.so"))
    assert artifacts
    assert all((near_cache / path.name).exists() for path in artifacts)
    assert much - little > sum(path.stat().st_size for path in artifacts)


@pytest.mark.slow
def test_where_a_host_is_lost_its_ranks_go_on_with_the_same_code(two_hosts: Hosts) -> None:
    found, _ = compiled_run("two-hosts", lambda: two_hosts.lose(0))
    expected, _ = compiled_run("process")
    assert torch.equal(found, expected)


def one_run() -> tuple[list[CompileRecord], int | None]:
    """What was compiled for a session on two hosts, and in which process."""
    with lazygt.session(
        compile="now", launcher="two-hosts", workers=2, mesh={"data": 2}
    ) as session:
        x = lazygt.distribute(torch.rand(20_000), {"data": lazygt.Shard(0)})
        assert step(x).sum().item() > 0
        return session.compiles(), session.compiler_pid


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_where_one_host_s_processor_is_another_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_group, "_instructions", lambda: "others")
    toolchain.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="can't run it: worker 1: .* is compiled for"):
            compiles, pid = one_run()
    finally:
        toolchain.cache_clear()
    assert (compiles, pid) == ([], None)


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_pending_installs_survive_failed_step() -> None:
    """All is undone, and what hosts were asked with it: they are asked again."""
    with lazygt.session(
        compile="auto", launcher="two-hosts", workers=2, mesh={"data": 2}
    ) as session:
        installs = session._client.installs
        assert installs is not None
        table = torch.ones(4, 4).to("lazygt")
        session.synchronize()
        installs.pending.add(("", 0))
        rows = torch.nn.functional.embedding(torch.tensor([9]).to("lazygt"), table)
        table.add_(1.0)
        with pytest.raises(IndexError):
            rows.sum().item()
        assert session.compiled(timeout=60)
        assert installs.pending == set()
        assert table.sum().item() == 16.0


@pytest.mark.slow
@pytest.mark.usefixtures("two_hosts")
def test_where_one_rank_can_not_swap_none_does(far_cache: Path) -> None:
    with lazygt.session(
        compile="now", launcher="two-hosts", workers=lazygt.Workers(2, threads=1), mesh={"data": 2}
    ) as session:
        x = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
        x = lazygt.distribute(x.to("lazygt"), {"data": lazygt.Shard(0)})
        for _ in range(4):
            x = step(x)
            session.flush()
        entry = next(each for each in session._client.entries if each.runs > 1)
        assert any(entry.swap)
        for path in far_cache.glob("*.so"):
            path.unlink()
        session._client.swap(entry, entry.swap)
        with pytest.warns(RuntimeWarning, match="stays on the eager tier: worker 1: "):
            assert session.compiled(timeout=60)
        assert entry.swap == ((),)
        assert torch.isfinite(step(x).cpu()).all()
