"""Both sides killed and stopped before every chunk: named in time, nothing lost, life goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import lazygt
from lazygt.transfer import (
    ModuleExtractor,
    ReceiverDied,
    ReceiverFrozen,
    SenderGone,
    TransferError,
    VersionHeld,
)
from lazygt.transfer.transaction import Transfer
from tests.support.timeouts import patience
from tests.transfer.child import (
    CHUNKS,
    PROCESSES,
    RECEIVERS,
    SENDER_SECONDS,
    Accident,
    Clock,
    checksums,
    send_signal,
    send_with_accident,
    weights,
)
from tests.transfer.conftest import Stage

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]

MakeStage = Callable[[str], Stage]
EVERY_BOUNDARY = pytest.mark.parametrize("at", range(CHUNKS + 1))
NAMED_SECONDS = 0.5
DEADLINE = 1.0


def timed(moments: list[float], action: Callable[[], object]) -> Callable[[], None]:
    """The action, with the moment at which it was taken noted."""

    def act() -> None:
        action()
        moments.append(time.monotonic())

    return act


@pytest.mark.sampled(3)
@EVERY_BOUNDARY
@pytest.mark.timed
def test_a_receiver_is_killed(stage: MakeStage, strategy: str, at: int) -> None:
    here = stage(strategy)
    sender = here.sender()
    dies, lives = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    killed: list[float] = []
    accident = Accident(2, at, timed(killed, lambda: dies.signal(signal.SIGKILL)))
    with pytest.raises(ReceiverDied, match=f"'reader 0' .pid {dies.pid}. went away") as caught:
        sender.send(accident, timeout=20.0)
    assert time.monotonic() - killed[0] < NAMED_SECONDS
    assert (caught.value.receiver, caught.value.pid) == (dies.name, dies.pid)
    assert lives.ask("checksums") == (1, checksums(weights(1)))
    assert list(lazygt.transfer_weights(weights(2), sender, timeout=20.0).pauses) == [lives.name]
    assert lives.ask("checksums") == (2, checksums(weights(2)))


@pytest.mark.sampled(3)
@EVERY_BOUNDARY
@pytest.mark.timed
def test_a_receiver_is_stopped(stage: MakeStage, strategy: str, at: int) -> None:
    here = stage(strategy)
    sender = here.sender()
    freezes, lives = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    accident = Accident(2, at, lambda: freezes.signal(signal.SIGSTOP))
    clock = Clock()
    with pytest.raises(ReceiverFrozen, match=r"'reader 0' did not answer within 1 s") as caught:
        sender.send(accident, timeout=DEADLINE)
    took, late = clock.seconds, clock.late
    assert DEADLINE <= took < DEADLINE * 1.1 + 0.2 + late  # 0.2: is it dead, perhaps?
    assert caught.value.receivers == (freezes.name,)
    assert lives.ask("checksums") == (1, checksums(weights(1)))
    for version in (2, 3, 4):
        lazygt.transfer_weights(weights(version), sender, timeout=20.0)
        assert lives.ask("checksums") == (version, checksums(weights(version)))
    freezes.signal(signal.SIGCONT)
    # what it held all the time is untouched; then it comes back by itself
    assert freezes.ask("checksums") == (1, checksums(weights(1)))
    sender.wait_for_receivers(2, 10.0)
    lazygt.transfer_weights(weights(5), sender, timeout=20.0)
    for reader in (freezes, lives):
        assert reader.ask("checksums") == (5, checksums(weights(5)))


@pytest.mark.sampled(4)
@EVERY_BOUNDARY
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timed
def test_a_sender_is_killed_or_stopped(strategy: str, at: int, number: signal.Signals) -> None:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=send_with_accident, args=(theirs, strategy, at, int(number)))
    process.start()
    theirs.close()
    try:
        with RECEIVERS[strategy](ours.recv(), name="reader") as receiver:
            assert receiver.wait_for_version(1, 10.0) == 1
            assert ours.poll(10.0)
            accident = ours.recv()
            with pytest.raises(TransferError) as caught:
                receiver.wait_for_version(2, SENDER_SECONDS)
            assert isinstance(caught.value, SenderGone) == (number == signal.SIGKILL)
            with receiver.reading() as (version, params):
                assert (version, checksums(params)) == (1, checksums(weights(1)))
            if number == signal.SIGKILL:
                assert time.monotonic() - accident < NAMED_SECONDS
            else:
                # its deadline has passed meanwhile: that it wakes up must not make it succeed
                send_signal(process.pid, signal.SIGCONT)
                assert ours.poll(10.0)
                assert "failed" in ours.recv()
                assert receiver.version == 1
    finally:
        process.kill()
        process.join()
        ours.close()


def test_a_receiver_leaves_a_frozen_sender(strategy: str) -> None:
    ours, theirs = PROCESSES.Pipe()
    args = (theirs, strategy, 2, int(signal.SIGSTOP))
    process = PROCESSES.Process(target=send_with_accident, args=args)
    process.start()
    theirs.close()
    try:
        with RECEIVERS[strategy](ours.recv(), name="reader") as receiver:
            receiver.wait_for_version(1, 10.0)
            assert ours.poll(10.0)
            ours.recv()
            with pytest.raises(TransferError):
                receiver.wait_for_version(2, SENDER_SECONDS + 1.5)  # a second of grace
            late = Clock()
            while receiver._staging is not None:
                assert late.seconds < patience(1.0)
                os.sched_yield()
            send_signal(process.pid, signal.SIGCONT)
            assert ours.poll(10.0)
            assert "failed" in ours.recv()
            assert receiver.version == 1
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.timed
def test_a_receiver_closes_while_others_are_waited_for(stage: MakeStage) -> None:
    """It need not wait for a group that a frozen receiver does not join."""
    here = stage("broadcast")
    sender = here.sender()
    (freezes,) = here.readers(sender)
    with RECEIVERS["broadcast"](sender.address, name="mine") as receiver:
        sender.wait_for_receivers(2, 20.0)
        freezes.signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as other:
            sending = other.submit(sender.send, ModuleExtractor(weights(1)), timeout=10.0)
            while receiver._staging is None:
                os.sched_yield()
            begin = time.monotonic()
            receiver.close()
            assert time.monotonic() - begin < NAMED_SECONDS
            with pytest.raises(ReceiverDied, match="'mine'"):
                sending.result()
        freezes.signal(signal.SIGCONT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_goes_after_the_decision(
    stage: MakeStage, strategy: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once everyone is prepared, the others get the new version; the report says who is lost."""
    here = stage(strategy)
    sender = here.sender()
    goes, lives = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    commit = Transfer.commit

    def commit_late(self):
        goes.signal(number)
        return commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "commit", commit_late)
        report = lazygt.transfer_weights(weights(2), sender, timeout=patience(DEADLINE))
    assert report.lost == (goes.name,)
    assert list(report.pauses) == [lives.name]
    assert lives.ask("checksums") == (2, checksums(weights(2)))
    for version in (3, 4):
        assert lazygt.transfer_weights(weights(version), sender, timeout=20.0).lost == ()
        assert lives.ask("checksums") == (version, checksums(weights(version)))
    if number == signal.SIGSTOP:
        goes.signal(signal.SIGCONT)
        version, sums = goes.ask("checksums")
        assert sums == checksums(weights(version))


def test_a_receiver_that_dies_between_transfers_is_forgotten(
    stage: MakeStage, strategy: str
) -> None:
    here = stage(strategy)
    sender = here.sender()
    dies, lives = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    dies.close()
    assert list(lazygt.transfer_weights(weights(2), sender, timeout=20.0).pauses) == [lives.name]


@pytest.mark.timed
def test_tensors_that_are_kept_stay_as_they_are(stage: MakeStage) -> None:
    here = stage("shared-memory")
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    reader.ask("hold", "layer.1.weight")
    before = reader.ask("held")
    lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    clock = Clock()
    with pytest.raises(VersionHeld, match=r"'reader 0' have held tensors.*clone\(\)"):
        lazygt.transfer_weights(weights(3), sender, timeout=DEADLINE)
    took, late = clock.seconds, clock.late
    assert DEADLINE <= took < DEADLINE * 1.1 + late
    assert reader.ask("held") == before
    assert reader.ask("checksums") == (2, checksums(weights(2)))
    assert sender.receivers == (reader.name,)
    reader.ask("let_go")
    lazygt.transfer_weights(weights(3), sender, timeout=20.0)
    assert reader.ask("checksums") == (3, checksums(weights(3)))


def test_kept_tensors_hold_nothing_back_where_memory_is_the_readers_own(
    stage: MakeStage, strategy: str
) -> None:
    if strategy == "shared-memory":
        pytest.skip("there the memory is the sender's; see above")
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    reader.ask("hold", "layer.1.weight")
    before = reader.ask("held")
    for version in (2, 3, 4):
        lazygt.transfer_weights(weights(version), sender, timeout=20.0)
    assert reader.ask("held") == before


def test_a_sender_goes_away_and_the_weights_stay(strategy: str, stage: MakeStage) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    sender.send(ModuleExtractor(weights(1)), timeout=20.0)
    sender.close()
    with pytest.raises(SenderGone, match="has gone"):
        reader.ask("wait", 2, 5.0)
    assert reader.ask("checksums") == (1, checksums(weights(1)))
