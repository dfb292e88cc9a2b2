"""How receivers and senders find each other, and what either says when they do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lazygt
from lazygt.transfer import Sender, SenderGone, TransferError
from lazygt.transfer.control import Deadline
from tests.transfer.child import RECEIVERS, SENDERS, weights
from tests.transfer.conftest import Stage

pytestmark = pytest.mark.timeout(60)

MakeStage = Callable[[str], Stage]


def refusal(sender: Sender, count: int) -> str:
    """What a sender says that waits for so many receivers, once it has turned one away."""
    deadline = Deadline(20.0)
    while True:
        with pytest.raises(TransferError) as caught:
            sender.wait_for_receivers(count, 0.1)
        if "turned away" in str(caught.value) or deadline.expired:
            return str(caught.value)


def test_a_receiver_of_another_strategy_is_turned_away(stage: MakeStage, strategy: str) -> None:
    sender = stage(strategy).sender()
    other = next(name for name in RECEIVERS if name != strategy)
    why = f"this is a {strategy} sender, not a {other} one"
    with RECEIVERS[other](sender.address, name="lost") as receiver:
        said = refusal(sender, 1)
        assert f"connected: none; turned away: 'lost' ({why}). Start" in said
        with pytest.raises(SenderGone, match=why):
            receiver.wait_for_version(1, 5.0)


def test_two_receivers_cannot_have_one_name(stage: MakeStage, strategy: str) -> None:
    here = stage(strategy)
    sender = here.sender()
    (reader,) = here.readers(sender)
    why = "there is a receiver named 'reader 0' already; give this one another name"
    with RECEIVERS[strategy](sender.address, name=reader.name) as twin:
        assert f"connected: reader 0; turned away: 'reader 0' ({why})." in refusal(sender, 2)
        with pytest.raises(SenderGone, match=why):
            twin.wait_for_version(1, 5.0)
    here.readers(sender)  # it has come to nothing, so it is named no more
    with pytest.raises(TransferError, match=r"connected: reader 0, reader 1\. Start"):
        sender.wait_for_receivers(3, 0.1)


def test_sender_without_receivers_is_error(stage: MakeStage, strategy: str) -> None:
    sender = stage(strategy).sender()
    with pytest.raises(TransferError, match=r"no receiver is connected to .*wait_for_receivers"):
        lazygt.transfer_weights(weights(1), sender)


def test_closed_sender_is_error(stage: MakeStage, strategy: str) -> None:
    sender = stage(strategy).sender()
    sender.close()
    sender.close()
    with pytest.raises(TransferError, match="closed"):
        lazygt.transfer_weights(weights(1), sender)


def test_readers_of_nothing_are_told(stage: MakeStage, strategy: str) -> None:
    sender = stage(strategy).sender()
    with RECEIVERS[strategy](sender.address, name="early") as receiver:
        with pytest.raises(TransferError, match="'early' has no weights yet"), receiver.reading():
            pytest.fail("there was something to read")
        with pytest.raises(TransferError, match=r"waited 0.1 s for version 1"):
            receiver.wait_for_version(1, 0.1)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), 1e12, None, "5"])
def test_a_timeout_is_a_number_of_seconds(wrong: Any) -> None:
    says = f"timeout={wrong!r}: expected seconds, 0 to"
    with (
        SENDERS["shared-memory"]() as sender,
        RECEIVERS["shared-memory"](sender.address, name="mine") as receiver,
    ):
        sender.wait_for_receivers(1, 20.0)
        with pytest.raises(ValueError, match=re.escape(says)):
            lazygt.transfer_weights(weights(1), sender, timeout=wrong)
        with pytest.raises(ValueError, match=re.escape(says)):
            sender.wait_for_receivers(2, wrong)
        with pytest.raises(ValueError, match=re.escape(says)):
            receiver.wait_for_version(1, wrong)
        assert lazygt.transfer_weights(weights(1), sender, timeout=20.0).version == 1


def test_a_name_is_a_text() -> None:
    with (
        SENDERS["shared-memory"]() as sender,
        RECEIVERS["shared-memory"](sender.address, name=5) as receiver,
    ):
        assert "turned away: 5 (a receiver's name is a str, not 5)." in refusal(sender, 1)
        with pytest.raises(SenderGone, match="a receiver's name is a str, not 5"):
            receiver.wait_for_version(1, 5.0)


def test_waiting_for_failed_receiver_raises() -> None:
    with (
        SENDERS["shared-memory"]() as sender,
        RECEIVERS["shared-memory"](sender.address, name="\udc80") as receiver,
        pytest.raises(SenderGone, match="it failed with UnicodeEncodeError"),
    ):
        receiver.wait_for_version(1, 20.0)


def test_an_address_without_a_sender(tmp_path: Path) -> None:
    with (
        RECEIVERS["shared-memory"](tmp_path / "nobody") as receiver,
        pytest.raises(SenderGone, match=r"there is no sender at .*/nobody"),
    ):
        receiver.wait_for_version(1, 20.0)
