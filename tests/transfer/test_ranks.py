"""A torchrun trainer's ranks send their own blocks, and engines load what comes as pairs."""

from __future__ import annotations

import ast
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lazygt.transfer import Receiver
from lazygt.transfer.control import ControlConnection, ControlListener, Deadline, connect
from lazygt.transfer.ranks import check_tiles, meet
from lazygt.transfer.transfer_errors import TransferError
from tests.support.descriptors import descriptors_before, open_descriptors
from tests.transfer.child import RECEIVERS
from tests.transfer.trainer import weights

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
SHARED = "shared-memory"


class Trainer:
    """The processes of a trainer."""

    def __init__(
        self,
        place: Path,
        layout: str,
        ranks: int,
        transport: str = "shared-memory",
        fault: str = "none",
    ) -> None:
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.transfer.trainer", str(rank), str(ranks), str(place),
                 layout, transport, fault],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        self.address = self.said(0)

    def said(self, rank: int) -> str:
        """The next line of a rank."""
        out = self.ranks[rank].stdout
        assert out is not None
        return out.readline().strip()

    def go_on(self) -> None:
        """Let those that live make the next call, or end."""
        for rank in self.ranks:
            if rank.poll() is None and rank.stdin is not None:
                rank.stdin.write("\n")
                rank.stdin.flush()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.communicate("\n\n", timeout=60)


class Engine(nn.Module):
    """As vLLM's and SGLang's models load."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.values = {name: tensor.clone() for name, tensor in weights}
        return set(self.values)


def check(receiver: Receiver, version: int) -> None:
    """Whether a receiver has the weights of this version, names and ties as in the module."""
    receiver.wait_for_version(version)
    expected = weights()
    with torch.no_grad():
        for p in expected.parameters():
            p.mul_(2 ** (version - 1))
    engine = Engine()
    assert receiver.load_weights(engine.load_weights) == version
    state = expected.state_dict()
    assert list(engine.values) == [name for name in state if name != "head.weight"]
    for name, value in engine.values.items():
        assert torch.equal(value, state[name]), name
    receiver.load_weights(engine.load_weights, ties=True)
    assert list(engine.values) == list(state)
    assert torch.equal(engine.values["head.weight"], state["embed.weight"])


@pytest.mark.parametrize(
    ("layout", "ranks", "transport"),
    [("fsdp", 2, "shared-memory"), ("fsdp", 2, "broadcast"),
     pytest.param("hsdp", 4, "shared-memory", marks=pytest.mark.slow),
     pytest.param("fsdp_and_tp", 4, "shared-memory", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_rank_sends_its_own_blocks(
    tmp_path: Path, layout: str, ranks: int, transport: str
) -> None:
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(tmp_path, layout, ranks, transport))
        receiver = stack.enter_context(RECEIVERS[transport](trainer.address, name="engine"))
        for version in (1, 2):
            lines = {trainer.said(rank) for rank in range(ranks)}
            (line,) = lines  # all ranks have the one report
            assert line.startswith(f"sent {version} ")
            written = dict(ast.literal_eval(line.partition(f"sent {version} ")[2]))
            total = sum(t.nbytes for n, t in weights().state_dict().items() if n != "head.weight")
            assert sum(written.values()) == total
            assert len(written) == ranks
            assert max(written.values()) < total * 0.8  # nobody has gathered it
            check(receiver, version)
            trainer.go_on()


@pytest.mark.parametrize(
    ("fault", "leader", "other"),
    [
        ("other model", r"rank 1 of the trainer has other parameters", r"other parameters"),
        ("sparse", r"rank 1 .* can't send its part: TypeError: parameter 'extra' is sparse",
         r"TypeError parameter 'extra' is sparse"),
        ("two senders", r"ValueError .* here 2 of 2 ranks have one", r"here 2 of 2 ranks"),
    ],
)  # fmt: skip
def test_all_ranks_hear_of_a_failure(tmp_path: Path, fault: str, leader: str, other: str) -> None:
    with (
        Trainer(tmp_path, "fsdp", 2, fault=fault) as trainer,
        RECEIVERS["shared-memory"](trainer.address, name="engine") as receiver,
    ):
        for _ in range(2):
            for rank, said in ((0, leader), (1, other)):
                assert re.search(said, line := trainer.said(rank)), line
                assert line.startswith("failed")
            trainer.go_on()
        assert receiver.version == 0


def test_a_rank_that_is_killed_is_named_and_the_old_version_stays(tmp_path: Path) -> None:
    with (
        Trainer(tmp_path, "fsdp", 2, fault="killed") as trainer,
        RECEIVERS["shared-memory"](trainer.address, name="engine") as receiver,
    ):
        assert trainer.said(0) == trainer.said(1) != ""
        check(receiver, 1)
        trainer.go_on()
        line = trainer.said(0)
        assert line.startswith("failed TransferError rank 1 of the trainer (pid "), line
        assert f"(pid {trainer.ranks[1].pid}) went away" in line
        check(receiver, 1)


def send_without_rank(client: ControlConnection, patch: pytest.MonkeyPatch) -> None:
    client.send({"kind": "hello"}, Deadline(60))


def send_unreadable(client: ControlConnection, patch: pytest.MonkeyPatch) -> None:
    client._sock.send(b"\1\0\0\0\xc1")


def leave_no_descriptors(client: ControlConnection, patch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "no descriptors left")

    patch.setattr(os, "pidfd_open", fail)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(send_without_rank, "a hello without a rank"), (send_unreadable, "cannot be read"),
     (leave_no_descriptors, "no descriptors left")],
)  # fmt: skip
def test_rank_that_cannot_be_accepted_leaves_no_descriptors(
    spoil: Callable[[ControlConnection, pytest.MonkeyPatch], None],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    listener = ControlListener()
    client = connect(listener.address)
    before = descriptors_before()
    spoil(client, monkeypatch)
    with pytest.raises(TransferError, match=f"a rank of the trainer can't be accepted: .*{why}"):
        meet(listener, Deadline(60))
    assert open_descriptors() <= before
    client.close()
    listener.close()


def test_blocks_that_leave_something_out_or_overlap_are_refused() -> None:
    halves = (((0, 2),), ((2, 4),))
    check_tiles("x", (4,), (*halves, *halves, None, ((4, 4),)))
    for blocks in [halves[:1], (((0, 3),), ((2, 4),)), (((0, 2),), ((1, 3),))]:
        with pytest.raises(TransferError, match=r"'x' of shape \[4\] is laid out"):
            check_tiles("x", (4,), blocks)
