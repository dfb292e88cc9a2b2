"""Straight from sharded sessions: each worker writes its own blocks, to who holds them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.transfer import (
    ManifestMismatch,
    ModuleExtractor,
    ReceiverDied,
    ReceiverRefused,
    Sender,
    TransferError,
)
from lazygt.transfer.control import Deadline
from lazygt.transfer.data_stream import TransferStream
from lazygt.transfer.layout import route
from lazygt.transfer.transports import process_group
from tests.support.timeouts import patience
from tests.transfer.child import KIB, RECEIVERS, SENDERS, Clock, checksums, send_signal
from tests.transfer.conftest import Stage

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

MakeStage = Callable[[str], Stage]
R = Replicate()

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "FSDP": {"*.weight": {"data": Shard(0)}, "*.bias": {"data": Shard(0)}},
    "FSDP over both axes": {"*.weight": [Shard(0), Shard(0)]},
    "HSDP and TP": {"wide.weight": [Shard(0), Shard(1)], "*.weight": [R, Shard(0)]},
}
#: column parallel, row parallel, whole
TENSOR_PARALLEL = {"wide.*": {"model": Shard(0)}, "deep.weight": {"model": Shard(1)}}


class Model(nn.Module):
    """Uneven, empty, tied and 0-dim parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.wide = nn.Linear(61, 43)
        self.norm = nn.BatchNorm1d(43)
        self.deep = nn.Linear(43, 5, bias=False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.deep(self.norm(self.wide(x)))
        return y


def state(model: nn.Module) -> dict[str, Tensor]:
    """What the model has, fetched in the usual way."""
    return {name: p.detach().cpu() for name, p in model.state_dict().items()}


def block(params: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The block of one of two tensor parallel ranks, by plain indexing."""
    cuts = {"wide.weight": 0, "wide.bias": 0, "deep.weight": 1}
    return {name: p.chunk(2, cuts[name])[rank] if name in cuts else p for name, p in params.items()}


def train(model: Model) -> None:
    """One step, so that the weights are new values."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 61)).square().sum().backward()
    optimizer.step()


@pytest.fixture(scope="module")
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(mesh={"data": 2, "model": 2}, workers=lazygt.Workers(threads=1)) as s:
        yield s


@pytest.fixture(params=list(SENDERS))
def here(
    stage: MakeStage, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    """Each strategy, with requests of 8 KiB."""
    monkeypatch.setattr(process_group, "REQUEST_BYTES", 8 * KIB)
    return stage(request.param)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfer_to_full_and_tensor_parallel_receivers(
    session: lazygt.Session, here: Stage, layout: str
) -> None:
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS[layout])
    sender = here.sender()
    (whole,) = here.readers(sender)
    ranks = [
        here.readers(sender, mesh="model=2", rank=rank, placements=TENSOR_PARALLEL)[0]
        for rank in (0, 1)
    ]
    for version in (1, 2, 3):
        train(model)
        report = lazygt.transfer_weights(model, sender, timeout=20.0)
        expected = state(model)
        assert set(report.written) == {0, 1, 2, 3}
        assert whole.ask("checksums") == (version, checksums(expected))
        for rank, reader in enumerate(ranks):
            assert reader.ask("checksums") == (version, checksums(block(expected, rank)))
            assert reader.ask("shares", "embed.weight", "head.weight")


def test_the_client_sees_no_weights(
    session: lazygt.Session, here: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(512, 1024)
    lazygt.parallelize_module(model, None, {"weight": [Shard(0), Shard(1)]})
    monkeypatch.setattr(process_group, "REQUEST_BYTES", 1024 * KIB)
    sender = here.sender(**({} if here.strategy == "broadcast" else {"threshold_gb": 1 / 1024}))
    (reader,) = here.readers(sender)
    session.synchronize()
    before = session.stats()
    report = lazygt.transfer_weights(model, sender, timeout=20.0)
    after = session.stats()
    assert after["bytes_fetched"] == before["bytes_fetched"]
    assert after["bytes_uploaded"] == before["bytes_uploaded"]
    for way in ("bytes_sent", "bytes_received"):
        assert after[way] - before[way] < report.nbytes / 500
    assert sum(report.written.values()) == report.nbytes
    assert max(report.written.values()) - min(report.written.values()) <= 4 * 1024
    assert reader.ask("checksums") == (1, checksums(state(model)))


def test_the_same_layout_is_not_cut(session: lazygt.Session, here: Stage) -> None:
    model = nn.Linear(12, 8, bias=False)
    placements = {"weight": [Shard(0), Shard(1)]}
    lazygt.parallelize_module(model, None, placements)
    sender = here.sender()
    readers = [
        here.readers(sender, mesh="data=2,model=2", rank=rank, placements=placements)[0]
        for rank in range(4)
    ]
    report = lazygt.transfer_weights(model, sender, timeout=20.0)
    assert (report.requests, report.written) == (4, dict.fromkeys(range(4), 8 * 12 * 4 // 4))
    whole = state(model)["weight"]
    for rank, reader in enumerate(readers):
        mine = whole.chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2]
        assert reader.ask("checksums") == (1, checksums({"weight": mine}))


def test_copies_share_the_work(session: lazygt.Session, here: Stage) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    sender = here.sender()
    here.readers(sender)
    report = lazygt.transfer_weights(model, sender, timeout=20.0)
    assert report.written == dict.fromkeys(range(4), 2 * 16 * 16 * 4)


def test_a_layout_is_planned_once(session: lazygt.Session, here: Stage) -> None:
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS["FSDP"])
    sender = here.sender()
    here.readers(sender)
    route.cache_clear()
    for _ in range(3):
        train(model)
        lazygt.transfer_weights(model, sender, timeout=20.0)
    assert (route.cache_info().misses, route.cache_info().hits) == (1, 2)


def test_workers_cast_before_sending(session: lazygt.Session, here: Stage) -> None:
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS["HSDP and TP"])
    sender = here.sender()
    (reader,) = here.readers(sender)
    extractor = ModuleExtractor(model, cast={"*": torch.bfloat16})
    fetched = session.stats()["bytes_fetched"]
    lazygt.transfer_weights(extractor, sender, timeout=20.0)
    assert session.stats()["bytes_fetched"] == fetched
    narrow = {
        name: p.bfloat16() if p.is_floating_point() else p for name, p in state(model).items()
    }
    assert reader.ask("checksums") == (1, checksums(narrow))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cast", [{}, {"*": torch.bfloat16}], ids=["as it is", "cast"])
def test_unchanged_blocks_do_not_travel(
    session: lazygt.Session, here: Stage, cast: Mapping[str, torch.dtype]
) -> None:
    """Whoever has the blocks compares them; a newcomer gets all."""
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS["HSDP and TP"])
    extractor = ModuleExtractor(model, cast=cast)
    sender = here.sender(skip_unchanged=True)
    (whole,) = here.readers(sender)
    placed = {"mesh": "model=2", "rank": 1, "placements": TENSOR_PARALLEL}
    (rank,) = here.readers(sender, **placed)

    def expected() -> dict[str, Tensor]:
        wire = {name: cast.get("*", p.dtype) for name, p in state(model).items()}
        return {
            name: p.to(wire[name]) if p.is_floating_point() else p
            for name, p in state(model).items()
        }

    reports = []
    for version in range(1, 5):
        if version == 2:
            with torch.no_grad():
                model.deep.weight.add_(1)
        reports.append(lazygt.transfer_weights(extractor, sender, timeout=20.0))
        assert whole.ask("checksums") == (version, checksums(expected()))
        assert rank.ask("checksums") == (version, checksums(block(expected(), 1)))
    params = reports[0].params
    assert [report.unchanged for report in reports] == [0, params - 1, params, params]
    deep = model.deep.weight.numel() * (2 if cast else 4)
    if here.strategy != "shared-memory":  # its second slot has to be filled once
        assert sum(reports[1].written.values()) == deep + deep // model.deep.in_features * 21
    assert sum(reports[3].written.values()) == 0
    (newcomer,) = here.readers(sender)
    assert lazygt.transfer_weights(extractor, sender, timeout=20.0).unchanged == 0
    assert newcomer.ask("checksums") == (5, checksums(expected()))


def test_views_and_numbers_of_the_client_are_settled(session: lazygt.Session, here: Stage) -> None:
    base = lazygt.distribute(torch.randn(6, 4).to("lazygt"), [Shard(0), R])
    source = {"view": base.t()[1:3], "sum": base.sum(), "one": torch.tensor(1.5)}
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(source, sender, timeout=20.0)
    expected = {name: p.cpu() for name, p in source.items()}
    assert reader.ask("checksums") == (1, checksums(expected))


def test_a_plain_model_is_cut_for_its_receivers(here: Stage) -> None:
    with torch.device("cpu"):
        model = Model()
    sender = here.sender()
    placements = {**TENSOR_PARALLEL, "*": {"model": R}}
    reader, other = (
        here.readers(sender, mesh={"model": 2}, rank=rank, placements=placements)[0]
        for rank in (0, 1)
    )
    for version in (1, 2):
        report = lazygt.transfer_weights(model, sender, timeout=20.0)
        assert report.written == {}
        assert reader.ask("checksums") == (version, checksums(block(state(model), 0)))
        assert other.ask("checksums") == (version, checksums(block(state(model), 1)))


def test_workers_let_go_when_the_sender_closes(here: Stage) -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = nn.Linear(64, 64)
        lazygt.parallelize_module(model, None, {"*": [Shard(0)]})
        model.weight.sum().item()
        before = descriptors(s)
        sender = here.sender()
        here.readers(sender)
        for _ in range(2):
            lazygt.transfer_weights(model, sender, timeout=20.0)
        during = descriptors(s)
        for _ in range(10):
            lazygt.transfer_weights(model, sender, timeout=20.0)
        assert all(mine > theirs for mine, theirs in zip(during, before, strict=True))
        assert descriptors(s) == during
        sender.close()
        model.weight.sum().item()  # the workers have done what they were told before
        deadline = Deadline(patience(10.0))
        while descriptors(s) != before and not deadline.expired:
            os.sched_yield()  # groups are left in the background
        assert descriptors(s) == before


def descriptors(session: lazygt.Session) -> list[int]:
    """Open files, sockets and shared memory of each worker."""
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in session.worker_pids]


# -- refused ---------------------------------------------------------------------------------


def test_another_manifest_is_refused_before_a_byte_moves(
    session: lazygt.Session, here: Stage
) -> None:
    first, other = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(first, sender, timeout=20.0)
    session.synchronize()
    before = session.stats()["messages_sent"]
    with pytest.raises(ManifestMismatch, match=r"missing: weight, bias; unexpected: 0.weight"):
        lazygt.transfer_weights(other, sender, timeout=20.0)
    assert session.stats()["messages_sent"] == before
    assert reader.ask("checksums") == (1, checksums(state(first)))
    lazygt.transfer_weights(first, sender, timeout=20.0)
    assert reader.ask("version") == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("placements", "why"),
    [
        ({"weigth": {"model": Shard(0)}}, "no parameter fits 'weigth'"),
        ({"bias": {"model": Shard(1)}}, r"bias of shape \[8\] has no dim 1"),
    ],
)
def test_placements_that_the_model_lacks_are_refused(
    session: lazygt.Session, here: Stage, placements: Mapping[str, Any], why: str
) -> None:
    sender = here.sender()
    here.readers(sender, mesh="model=2", rank=1, placements=placements)
    with pytest.raises(ManifestMismatch, match=f"receiver 'reader 0' can't take.*{why}"):
        lazygt.transfer_weights(nn.Linear(8, 8), sender, timeout=20.0)


def test_a_flipped_bit_is_refused(
    session: lazygt.Session, stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stage("shared-memory")  # for the others see test_packed.py
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS["FSDP over both axes"])
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    old = checksums(state(model))
    train(model)
    announce, once = TransferStream._announce, iter([True])

    def flip(stream: TransferStream, request: Any, reply: Any) -> None:
        if next(once, False):
            sender.transport.target.flat.bitwise_xor_(1)  # type: ignore[attr-defined]
        announce(stream, request, reply)

    with monkeypatch.context() as patch:
        patch.setattr(TransferStream, "_announce", flip)
        with pytest.raises(ReceiverRefused, match=r"values .* are not what was sent \(crc32"):
            lazygt.transfer_weights(model, sender, timeout=20.0)
    assert reader.ask("checksums") == (1, old)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    assert reader.ask("checksums") == (2, checksums(state(model)))


def test_no_reading_is_torn(session: lazygt.Session, here: Stage) -> None:
    sender = here.sender()
    (reader,) = here.readers(sender)
    params = {
        f"m{k}.weight": lazygt.distribute(torch.ones(4_000), [Shard(0), Shard(0)]) for k in range(6)
    }
    last = 60
    lazygt.transfer_weights(params, sender, timeout=20.0)
    reader._pipe.send(("hammer", (last,)))
    for _ in range(last - 1):
        params = {name: p + 1 for name, p in params.items()}
        lazygt.transfer_weights(params, sender, timeout=20.0)
    assert reader._pipe.poll(20.0)
    readings, versions, torn = reader._pipe.recv()
    assert torn == []
    assert readings > last
    assert versions > last // 4


# -- accidents -------------------------------------------------------------------------------


def large() -> nn.Module:
    """A model of many requests."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    lazygt.parallelize_module(model, None, {"*": [Shard(0)]})
    return model


def send_and(
    happen: Callable[[], object], model: nn.Module, sender: Sender, seconds: float
) -> None:
    """Send a model; something happens after the third request."""
    steps = iter(range(1_000))
    sender.send(
        ModuleExtractor(model),
        timeout=seconds,
        progress=lambda _: happen() if next(steps) == 2 else None,
    )


def test_a_worker_is_killed(here: Stage) -> None:
    sender = here.sender()
    (reader,) = here.readers(sender)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = large()
        lazygt.transfer_weights(model, sender, timeout=20.0)
        old = checksums(state(model))
        pid = s.worker_pids[1]
        with pytest.raises(lazygt.WorkerDied):
            send_and(lambda: os.kill(pid, signal.SIGKILL), model, sender, 20.0)
        assert reader.ask("checksums") == (1, old)
        # the transfer has failed, and nothing else
        assert [each.ranks for each in s.recoveries] == [(1,)]
        assert checksums(state(model)) == old
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert reader.ask("checksums") == (2, old)


def test_a_worker_is_stopped_and_wakes_up_later(here: Stage) -> None:
    sender = here.sender()
    (reader,) = here.readers(sender)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = large()
        lazygt.transfer_weights(model, sender, timeout=20.0)
        expected = checksums(state(model))
        pid = s.worker_pids[1]
        clock = Clock()
        with pytest.raises(TransferError, match=r"worker 1 did not write its part within 1 s"):
            send_and(lambda: send_signal(pid, signal.SIGSTOP), model, sender, 1.0)
        assert clock.seconds < patience(1.5)
        assert reader.ask("checksums") == (1, expected)
        plain = state_of_another(model)
        lazygt.transfer_weights(plain, sender, timeout=20.0)
        send_signal(pid, signal.SIGCONT)
        s.synchronize()  # the worker has done what it was told before it was stopped
        assert reader.ask("checksums") == (2, checksums(plain))
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert reader.ask("checksums") == (3, expected)


def state_of_another(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of this process with the model's names and shapes."""
    return {n: torch.randn(p.shape, device="cpu") for n, p in model.state_dict().items()}


def test_a_receiver_is_killed(session: lazygt.Session, here: Stage) -> None:
    sender = here.sender()
    dies, lives = here.readers(sender, 2)
    model = Model()
    lazygt.parallelize_module(model, None, LAYOUTS["FSDP"])
    lazygt.transfer_weights(model, sender, timeout=20.0)
    old = checksums(state(model))
    train(model)
    with pytest.raises(ReceiverDied, match=f"'{dies.name}'"):
        send_and(lambda: dies.signal(signal.SIGKILL), model, sender, 20.0)
    assert lives.ask("checksums") == (1, old)
    report = lazygt.transfer_weights(model, sender, timeout=20.0)
    assert list(report.pauses) == [lives.name]
    assert lives.ask("checksums") == (2, checksums(state(model)))


def test_a_failed_op_is_raised_and_nothing_is_sent(here: Stage) -> None:
    sender = here.sender()
    (reader,) = here.readers(sender)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        good = torch.ones(4, 4)
        lazygt.transfer_weights({"x": good}, sender, timeout=20.0)
        bad = torch.linalg.cholesky(-good)
        with pytest.raises(lazygt.ExecutionError, match="cholesky"):
            lazygt.transfer_weights({"x": bad}, sender, timeout=20.0)
        assert reader.ask("version") == 1
        lazygt.transfer_weights({"x": good + 1}, sender, timeout=20.0)
    assert reader.ask("checksums") == (2, checksums({"x": torch.full((4, 4), 2.0)}))


def test_blocks_need_both_a_mesh_and_placements(here: Stage) -> None:
    sender = here.sender()
    with pytest.raises(ValueError, match="needs both mesh= and placements="):
        RECEIVERS[here.strategy](sender.address, mesh="model=2", rank=1)
