"""What every strategy promises, between real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazygt
from lazygt.transfer import (
    ModuleExtractor,
    ReceiverRefused,
    TransferError,
)
from lazygt.transfer.control import ControlConnection
from lazygt.transfer.copier import Copier, as_bytes
from lazygt.transfer.peers import Receivers
from tests.transfer.child import Accident, checksums, weights
from tests.transfer.conftest import Stage

pytestmark = pytest.mark.timeout(60)

MakeStage = Callable[[str], Stage]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_receivers_get_every_bit(stage: MakeStage, strategy: str, count: int) -> None:
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, count)
    for version in (1, 2, 3):
        report = lazygt.transfer_weights(weights(version), sender, timeout=20.0)
        assert (report.version, report.params, report.aliases) == (version, 8, 1)
        assert set(report.pauses) == {reader.name for reader in readers}
        for reader in readers:
            assert reader.ask("wait", version) == version
            assert reader.ask("checksums") == (version, checksums(weights(version)))


def test_names_dtypes_shapes_order_and_ties_arrive(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    expected = [(name, str(p.dtype), tuple(p.shape)) for name, p in weights(1).items()]
    assert reader.ask("layout") == expected
    assert reader.ask("shares", "embed.weight", "head.weight")
    assert not reader.ask("shares", "embed.weight", "layer.0.weight")


def test_a_parameter_of_many_requests(stage: MakeStage, strategy: str) -> None:
    """More than fit unread into a socket."""
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, 2)
    model = {"w": torch.randn(1_500_000)}
    report = lazygt.transfer_weights(model, sender, timeout=20.0)
    assert report.requests == (1 if strategy == "broadcast" else -(-6_000_000 // 8192))
    for reader in readers:
        assert reader.ask("checksums") == (1, checksums(model))


def test_casts_happen_by_name(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    cast = {"layer.0.*": torch.float32, "*.weight": torch.bfloat16}
    lazygt.transfer_weights(ModuleExtractor(weights(1), cast=cast), sender, timeout=20.0)
    expected = {name: p.float() if name == "layer.0.bias" else p for name, p in weights(1).items()}
    for name in expected:
        if name.endswith(".weight") and not name.startswith("layer.0"):
            expected[name] = expected[name].to(torch.bfloat16)
    assert reader.ask("checksums") == (1, checksums(expected))


def test_a_newcomer_gets_the_next_version(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (first,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    (second,) = here.readers(sender)
    assert second.ask("version") == 0
    lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    for reader in (first, second):
        assert reader.ask("checksums") == (2, checksums(weights(2)))


def test_departed_receiver_is_not_reported_lost(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    stays, leaves = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    leaves.ask("leave")
    report = lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    assert (list(report.pauses), report.lost) == ([stays.name], ())
    assert stays.ask("checksums") == (2, checksums(weights(2)))


def test_unchanged_parameters_do_not_travel(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender(skip_unchanged=True)
    (reader,) = here.readers(sender)
    model = weights(1)
    assert lazygt.transfer_weights(model, sender, timeout=20.0).unchanged == 0
    model["layer.0.weight"].add_(1)
    for version in (2, 3, 4):
        report = lazygt.transfer_weights(model, sender, timeout=20.0)
        assert report.unchanged == (7 if version == 2 else 8)
        assert reader.ask("checksums") == (version, checksums(model))
    model["embed.weight"].mul_(2)
    assert lazygt.transfer_weights(model, sender, timeout=20.0).unchanged == 7
    assert reader.ask("checksums") == (5, checksums(model))


def test_everything_travels_to_a_newcomer(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender(skip_unchanged=True)
    here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    (second,) = here.readers(sender)
    assert lazygt.transfer_weights(weights(1), sender, timeout=20.0).unchanged == 0
    assert second.ask("checksums") == (2, checksums(weights(1)))


def test_poisoned_weights_are_replaced_to_the_bit(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    poison = {
        name: torch.full_like(p, float("nan")) if p.is_floating_point() else torch.ones_like(p)
        for name, p in weights(1).items()
    }
    poison["head.weight"] = poison["embed.weight"]
    for version, model in enumerate((weights(1), poison, poison, weights(1)), start=1):
        lazygt.transfer_weights(model, sender, timeout=20.0)
        assert reader.ask("checksums") == (version, checksums(model))


def test_an_extractor_may_fail(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)

    def fail() -> None:
        raise ZeroDivisionError("in the middle of a model")

    for at in range(6):
        with pytest.raises(ZeroDivisionError):
            sender.send(Accident(2, at, fail), timeout=20.0)
        assert {reader.ask("version") for reader in readers} == {1}
    lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    for reader in readers:
        assert reader.ask("checksums") == (2, checksums(weights(2)))


def test_a_transfer_within_a_transfer_is_refused(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    refused = []

    def again() -> None:
        with pytest.raises(TransferError, match="in the middle of a transfer") as caught:
            lazygt.transfer_weights(weights(9), sender, timeout=20.0)
        refused.append(caught.value)

    sender.send(Accident(1, 2, again), timeout=20.0)
    assert len(refused) == 1
    assert reader.ask("checksums") == (1, checksums(weights(1)))


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("told", [0, 1, 2])
def test_ctrl_c_in_the_middle_of_the_decision(
    stage: MakeStage, strategy: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not know of it joins again; its memory is not waited for."""
    here = stage(strategy)
    sender = here.sender()
    readers = here.readers(sender, 2)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    send, commits = Receivers.send, iter(range(3))

    def send_some(receivers: Receivers, receiver: Any, message: Any, *args: Any) -> None:
        if message["kind"] == "commit" and next(commits) == told:
            raise KeyboardInterrupt
        send(receivers, receiver, message, *args)
        if message["kind"] == "commit" and told == 2:
            patch.setattr(Receivers, "wait", interrupt)

    with monkeypatch.context() as patch:
        patch.setattr(Receivers, "send", send_some)
        with pytest.raises(KeyboardInterrupt):
            lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    for version in (3, 4):
        sender.wait_for_receivers(2, 20.0)
        assert lazygt.transfer_weights(weights(version), sender, timeout=20.0).version == version
        for reader in readers:
            assert reader.ask("checksums") == (version, checksums(weights(version)))


def test_ctrl_c_in_the_middle_of_a_message(
    stage: MakeStage, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    model = {f"layer.{'long' * 2_000}.{number}": torch.ones(2) for number in range(100)}
    reader.signal(signal.SIGSTOP)  # so that it does not read its manifest
    with monkeypatch.context() as patch:
        patch.setattr(ControlConnection, "_wait_for_room", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lazygt.transfer_weights(model, sender, timeout=20.0)
    reader.signal(signal.SIGCONT)
    sender.wait_for_receivers(1, 20.0)
    lazygt.transfer_weights(model, sender, timeout=20.0)
    assert reader.ask("checksums") == (1, checksums(model))


@pytest.mark.parametrize("verify", ["crc32", "xor64"])
def test_a_flipped_byte_is_noticed(
    stage: MakeStage, strategy: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = stage(strategy)
    sender = here.sender(verify=verify)
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    copy_all = Copier._copy_all
    number = list(weights(1)).index("layer.1.weight")

    def flip(copier: Copier, request: Any, copies: Any) -> Any:
        """Change one byte of a parameter that has been summed and is on its way."""
        checks = copy_all(copier, request, copies)
        for item, copy in zip(request.items, copies, strict=True):
            if item.key == number and item.source[0][0] == 0:
                as_bytes(copy.target)[5] ^= 64
        return checks

    with monkeypatch.context() as patch:
        patch.setattr(Copier, "_copy_all", flip)
        with pytest.raises(ReceiverRefused, match=rf"of layer.1.weight are not.*\({verify} 0x"):
            lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    assert reader.ask("checksums") == (1, checksums(weights(1)))
    lazygt.transfer_weights(weights(2), sender, timeout=20.0)
    assert reader.ask("checksums") == (2, checksums(weights(2)))


def test_transfer_without_verification(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender(verify="none")
    (reader,) = here.readers(sender)
    lazygt.transfer_weights(weights(1), sender, timeout=20.0)
    assert reader.ask("checksums") == (1, checksums(weights(1)))
