"""Parts that are packed and sent (broadcast) or lent (CUDA IPC): groups, buffers and accidents.

What all strategies have in common is in test_sharded.py; this is what only these two can get wrong.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.transfer import (
    ModuleExtractor,
    ReceiverDied,
    ReceiverFrozen,
    ReceiverRefused,
    Sender,
    TransferError,
)
from lazygt.transfer.transports import process_group
from lazygt.transfer.transports.process_group import GroupAddress, GroupMemory, marker
from lazygt.transfer.version import StagedVersion
from tests.transfer.child import GIB, KIB, RECEIVERS, Reader, checksums, send_signal, weights
from tests.transfer.conftest import Stage

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

MakeStage = Callable[[str], Stage]
NAMED_SECONDS = 0.5
DEADLINE = 1.0
ASKED_SECONDS = 1.0  # beyond a deadline: who is silent, and is it dead, perhaps?
#: bigger than what the kernel keeps of a socket, so that a sender must wait for who receives
BIG = 8 << 20
TENSOR_PARALLEL = {"*.weight": {"model": Shard(0)}}


@pytest.fixture(scope="module")
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        yield s


@pytest.fixture(params=["broadcast", "cuda-ipc"])
def here(
    stage: MakeStage, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Stage:
    monkeypatch.setattr(process_group, "REQUEST_BYTES", 8 * KIB)
    return stage(request.param)


def sender_of(here: Stage, request_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Sender:
    """A sender with requests of so many bytes."""
    monkeypatch.setattr(process_group, "REQUEST_BYTES", request_bytes)
    limit = {} if here.strategy == "broadcast" else {"threshold_gb": request_bytes / GIB}
    return here.sender(**limit)


def model_of(width: int, layers: int = 6) -> nn.Module:
    """FSDP."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    lazygt.parallelize_module(model, None, {"*": [Shard(0)]})
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu() for name, p in model.state_dict().items()}


def halves(params: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What one of two `TENSOR_PARALLEL` ranks holds."""
    return {n: p.chunk(2)[rank] if n.endswith("weight") else p for n, p in params.items()}


def engine(here: Stage, sender: Sender) -> list[Reader]:
    """One reader of everything, and two that share it."""
    ranks = ({"mesh": "model=2", "rank": r, "placements": TENSOR_PARALLEL} for r in (0, 1))
    return [here.readers(sender, **options)[0] for options in ({}, *ranks)]


def has(readers: list[Reader], version: int, params: dict[str, Tensor]) -> bool:
    """Whether each reader of an `engine` has this version."""
    wanted = [params, halves(params, 0), halves(params, 1)]
    found = [reader.ask("checksums") for reader in readers]
    return found == [(version, checksums(each)) for each in wanted]


def send_and(
    happen: Callable[[], object], model: nn.Module, sender: Sender, seconds: float
) -> None:
    """Send a model; something happens after the third request."""
    steps = iter(range(1_000_000))
    sender.send(
        ModuleExtractor(model),
        timeout=seconds,
        progress=lambda _: happen() if next(steps) == 2 else None,
    )


# -- members ---------------------------------------------------------------------------------


def test_groups_and_handles_are_kept_and_newcomers_join(
    session: lazygt.Session, here: Stage
) -> None:
    model = model_of(64)
    sender = here.sender()
    readers = here.readers(sender)
    made = []
    for version in (1, 2, 3, 4):
        if version == 3:
            readers += here.readers(sender)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        made.append(number_of(sender))
        for reader in readers:
            assert reader.ask("checksums") == (version, checksums(state(model)))
    # a group has to be made anew for other members; a buffer only needs one more handle
    assert made == ([1, 1, 2, 2] if here.strategy == "broadcast" else [1, 1, 1, 1])


def number_of(sender: Any) -> int:
    """Of the set of groups or buffers."""
    number: int = sender.transport.number
    return number


def test_nobody_waits_for_workers_that_have_nothing_to_send(
    session: lazygt.Session, here: Stage
) -> None:
    sender = here.sender()
    with RECEIVERS[here.strategy](sender.address, name="mine") as receiver:
        sender.wait_for_receivers(1, 20.0)
        before = threading.enumerate()  # groups of earlier tests may still be let go
        report = lazygt.transfer_weights({"one": torch.ones(3)}, sender, timeout=20.0)
        assert report.written == {0: 12}
        new = [thread for thread in threading.enumerate() if thread not in before]
        assert not [thread for thread in new if thread.name == "lazygt-group"]
        assert receiver.version == 1


def test_one_sender_for_sessions_and_plain_models(here: Stage) -> None:
    sender = here.sender()
    readers = here.readers(sender, 2)
    version = 0
    for _ in range(2):
        with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
            model = nn.Linear(40, 40)
            lazygt.parallelize_module(model, None, {"*": [Shard(0)]})
            for source in (model, {n: p + 1 for n, p in state(model).items()}, model):
                version += 1
                lazygt.transfer_weights(source, sender, timeout=20.0)
                expected = source if isinstance(source, dict) else state(source)
                for reader in readers:
                    assert reader.ask("checksums") == (version, checksums(expected))


def test_a_plain_model_is_cut_for_one_and_whole_for_another(here: Stage) -> None:
    sender = here.sender()
    whole, rank = (
        here.readers(sender)[0],
        here.readers(sender, mesh="model=2", rank=1, placements={"layer.1.weight": [Shard(1)]})[0],
    )
    for version in (1, 2):
        report = lazygt.transfer_weights(weights(version), sender, timeout=20.0)
        assert report.written == {}
        cut = weights(version)
        assert whole.ask("checksums") == (version, checksums(cut))
        cut["layer.1.weight"] = cut["layer.1.weight"].chunk(2, 1)[1]
        assert rank.ask("checksums") == (version, checksums(cut))


def test_lent_buffers_are_no_bigger_than_the_threshold(
    session: lazygt.Session, stage: MakeStage
) -> None:
    sender: Any = stage("cuda-ipc").sender(threshold_gb=16 * KIB / GIB)
    stage("cuda-ipc").readers(sender)
    lazygt.transfer_weights(model_of(128), sender, timeout=20.0)
    assert 8 * KIB < sender.transport.extent <= 16 * KIB
    assert sender._local_source is None  # this process lends none


# -- accidents -------------------------------------------------------------------------------


def test_a_flipped_bit_is_refused(
    session: lazygt.Session, here: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(48)
    sender = here.sender()
    with RECEIVERS[here.strategy](sender.address, name="mine") as receiver:
        sender.wait_for_receivers(1, 20.0)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        verify, once = StagedVersion.verify_blocks, iter([True])

        def flip(staged: StagedVersion, pool: Any, blocks: Any, checks: Any) -> None:
            if next(once, False):
                block = staged.block(blocks[0])
                block[(0,) * block.dim()].view(torch.int32).bitwise_xor_(64)
            verify(staged, pool, blocks, checks)

        with monkeypatch.context() as patch:
            patch.setattr(StagedVersion, "verify_blocks", flip)
            with pytest.raises(ReceiverRefused, match=r"values .* are not what was sent \(crc32"):
                lazygt.transfer_weights(model, sender, timeout=20.0)
        assert receiver.version == 1
        lazygt.transfer_weights(model, sender, timeout=20.0)
        with receiver.reading() as (version, params):
            assert (version, checksums(params)) == (2, checksums(state(model)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("request_bytes", [8 * KIB, BIG])
@pytest.mark.timed
def test_a_worker_is_killed(
    here: Stage, request_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = sender_of(here, request_bytes, monkeypatch)
    readers = engine(here, sender)
    width = 64 if request_bytes < BIG else 1024
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1), recovery="off") as s:
        model = model_of(width)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        old = state(model)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(s.worker_pids[1], signal.SIGKILL)

        with pytest.raises(lazygt.WorkerDied, match="worker 1"):
            send_and(kill, model, sender, 20.0)
        assert time.monotonic() - killed[0] < NAMED_SECONDS
        s.close()
    assert has(readers, 1, old)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        model = model_of(width)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert has(readers, 2, state(model))


@pytest.mark.timed
def test_a_worker_is_stopped(here: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = sender_of(here, BIG, monkeypatch)
    readers = engine(here, sender)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        model = model_of(1024)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        expected = state(model)
        begin, pid = time.monotonic(), s.worker_pids[1]
        with pytest.raises(TransferError, match="worker 1 did not write its part within 1 s"):
            send_and(lambda: send_signal(pid, signal.SIGSTOP), model, sender, DEADLINE)
        assert time.monotonic() - begin < DEADLINE + ASKED_SECONDS
        assert has(readers, 1, expected)
        send_signal(pid, signal.SIGCONT)
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert has(readers, 2, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("request_bytes", [8 * KIB, BIG])
@pytest.mark.timed
def test_a_receiver_is_killed(
    session: lazygt.Session, here: Stage, request_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(64 if request_bytes < BIG else 1024)
    sender = sender_of(here, request_bytes, monkeypatch)
    dies, *others = here.readers(sender, 3)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        dies.signal(signal.SIGKILL)

    with pytest.raises(ReceiverDied, match=f"'{dies.name}'"):
        send_and(kill, model, sender, 20.0)
    assert time.monotonic() - killed[0] < NAMED_SECONDS
    for version in (1, 2):
        for reader in others:
            assert reader.ask("checksums") == (version, checksums(state(model)))
        lazygt.transfer_weights(model, sender, timeout=20.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("request_bytes", [8 * KIB, BIG])
@pytest.mark.timed
def test_a_receiver_is_stopped(
    session: lazygt.Session, here: Stage, request_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, not the worker that waits for it; and the worker is free again at once."""
    model = model_of(64 if request_bytes < BIG else 1024)
    sender = sender_of(here, request_bytes, monkeypatch)
    freezes, lives = here.readers(sender, 2)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    expected = checksums(state(model))
    begin = time.monotonic()
    with pytest.raises(ReceiverFrozen, match=f"'{freezes.name}' did not answer within 1 s"):
        send_and(lambda: freezes.signal(signal.SIGSTOP), model, sender, DEADLINE)
    assert time.monotonic() - begin < DEADLINE + ASKED_SECONDS
    assert lives.ask("checksums") == (1, expected)
    for version in (2, 3):
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert lives.ask("checksums") == (version, expected)
    freezes.signal(signal.SIGCONT)
    assert freezes.ask("checksums") == (1, expected)
    sender.wait_for_receivers(2, 10.0)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    assert freezes.ask("checksums") == (4, expected)


@pytest.mark.parametrize("look", [1e-3, 1.0], ids=["it looks first", "a thread says it first"])
@pytest.mark.timed
def test_a_worker_does_not_wait_in_groups_that_were_given_up(
    look: float, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazygt.transfer.transports.process_group._LOOK_SECONDS", look)
    place = GroupAddress(str(tmp_path), 3, "3-0-0", 2, "host", 0.2, BIG)
    end = GroupMemory(torch.device("cpu"), place)
    packed = end.view(place, 0, BIG).zero_()
    with pytest.raises(TransferError, match="given the transfer up"):
        end.deliver(place, [packed])
    marker(str(tmp_path), 3).touch()
    packed = end.view(place, 0, BIG).zero_()
    begin = time.monotonic()
    with pytest.raises(TransferError, match=r"did not take it within 0.2 s"):
        end.deliver(place, [packed])  # nobody else comes
    assert time.monotonic() - begin < 1.0
    end.close()
