"""What explain says that ranks send, by kind of parallelism, and what workers do send."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazygt
from lazygt.net.sockets import PeerSocket
from lazygt.observe.report import CollectiveRow, ExchangedRow, exchanged

pytestmark = pytest.mark.timeout(120)


def sent(start: torch.Tensor) -> torch.Tensor:
    """Bytes of values that this worker has sent to others since the first call."""
    if os.environ.get("LAZYGT_WORKER") == "1" and not hasattr(PeerSocket, "counted"):
        send, send_text = PeerSocket.send, PeerSocket.send_text

        def counting(self: PeerSocket, data: memoryview, *, given: bool = False) -> None:
            PeerSocket.counted += len(data)  # type: ignore[attr-defined]
            send(self, data, given=given)

        def not_counting(self: PeerSocket, text: str) -> None:
            """Of the names of their collectives, which workers compare."""
            before = PeerSocket.counted  # type: ignore[attr-defined]
            send_text(self, text)
            PeerSocket.counted = before  # type: ignore[attr-defined]

        PeerSocket.counted = 0  # type: ignore[attr-defined]
        PeerSocket.send = counting  # type: ignore[method-assign]
        PeerSocket.send_text = not_counting  # type: ignore[method-assign]
    return start + getattr(PeerSocket, "counted", 0)


def fsdp(x: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    lazygt.fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    return model


def replicated(x: torch.Tensor) -> nn.Module:
    model = lazygt.data_parallel(nn.Linear(64, 64))
    for _ in range(2):
        model(x).square().mean().backward()
    return model


def turned(x: torch.Tensor) -> torch.Tensor:
    """An all-to-all, an all-gather, and an all-reduce of a maximum."""
    across = lazygt.redistribute(x, [lazygt.Shard(1)])
    whole = lazygt.redistribute(across * 2, [lazygt.Replicate()])
    assert x.amax().item() > 0
    return whole


@pytest.mark.parametrize("program", [fsdp, replicated, turned])
def test_workers_send_explained_bytes(program: Callable[[torch.Tensor], object]) -> None:
    """Two workers, and all of it small enough for sockets, which count the payload."""
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        x = lazygt.distribute(torch.randn(32, 64), [lazygt.Shard(0)])
        zero = torch.zeros((), dtype=torch.int64)
        assert lazygt.apply(sent, zero).item() == 0
        kept = program(x)
        s.flush()
        counted = lazygt.apply(sent, zero).item()
        rows = exchanged(lazygt.explain(s).collectives)
    assert {(row.parallelism, row.axis, row.ranks) for row in rows} == {("data", "data", 2)}
    assert kept is not None
    assert counted == sum(row.ring for row in rows) > 0


def test_rows_are_added_up_by_axis_and_kind() -> None:
    def row(axis: str, kind: str, nbytes: int, runs: int = 1) -> CollectiveRow:
        return CollectiveRow(runs, 2, kind, None, nbytes, nbytes // 2, axis, 2, 0.0, "a.py:1", "")

    rows = exchanged([
        row("model", "all_reduce", 100), row("data", "all_reduce", 10, runs=5),
        row("model", "all_gather", 6), row("rows", "all_gather", 8),
        row("model", "all_reduce", 20, runs=3),
    ])  # fmt: skip
    assert rows == [
        ExchangedRow("tensor", "model", 2, "all_reduce", 8, 160, 80),
        ExchangedRow("tensor", "model", 2, "all_gather", 2, 6, 3),
        ExchangedRow("data", "data", 2, "all_reduce", 10, 50, 25),
        ExchangedRow("", "rows", 2, "all_gather", 2, 8, 4),
    ]


def test_explain_prints_exchanged_bytes() -> None:
    with lazygt.session(launcher="dry", mesh={"data": 4, "tp": 2}) as s:
        x = lazygt.distribute(torch.randn(64, 64), {"data": lazygt.Shard(0)})
        w = lazygt.distribute(torch.randn(64, 64), {"tp": lazygt.Shard(0)}, fixed=True)
        s.flush()
        ((x @ w).relu().sum(0)).tolist()
        text = str(lazygt.explain(s))
    table = text.partition("sent in all runs, by kind of parallelism\n")[2].splitlines()
    rows = [line.split() for line in table if line]
    assert rows[0] == ["parallelism", "axis", "ranks", "collective", "count", "logical", "ring",
                       "a", "rank"]  # fmt: skip
    assert {(row[0], row[1], row[2]) for row in rows[1:]} == {
        ("tensor", "tp", "2"), ("data", "data", "4"),
    }  # fmt: skip
