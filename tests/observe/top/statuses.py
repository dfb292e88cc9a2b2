"""Statuses of sessions for the tests of the screen."""

from __future__ import annotations

from msgspec.structs import replace

from lazygt.net.status_file import ClientPage
from lazygt.observe.top.status import RankStatus, SessionStatus, blocks

CLIENT = ClientPage(
    "lazygt-0123456789abcdef", 4242, 64, "cpu", "data=16,model=4", 1_000.0,
    "/home/somebody/a/very/long/path/to/some/project/with/many/folders/train.py:1234", "backward",
    120_345, 12, (5,), 60_000, 812.5, 406.2, 120_300, 45, 3,
    "aten.mm.default with other arguments or shapes than before",
    "/home/somebody/a/very/long/path/to/some/project/with/many/folders/model.py:77",
    3, 12, 1, 9, 2, "Worker 3 (process 99) has died: signal SIGKILL; back after 0.8 s, 12 runs",
)  # fmt: skip


def status(count: int, **states: tuple[int, ...]) -> SessionStatus:
    """A session of so many busy ranks, but for those named by state."""
    of = {rank: state for state, ranks in states.items() for rank in ranks}
    waits = dict.fromkeys(states.get("waiting", ()), (5,))
    blocked = blocks(waits)
    ranks = tuple(
        RankStatus(
            rank, 1000 + rank, of.get(rank, "busy"), 120_345, "00ff" * 8, 12, "", 1.5 + rank,
            waits.get(rank, ()), blocked.get(rank, ()), 99, 2**31, 2**32, 2**33, 2**34, 0.4,
        )
        for rank in range(count)
    )  # fmt: skip
    memory = {"parameters": 10**9, "gradients": 10**9, "optimizer": 2 * 10**9, "other": 10**8}
    stuck = tuple(rank.rank for rank in ranks if rank.state == "frozen")
    return SessionStatus(
        1_100.0, "running", 0.1, replace(CLIENT, workers=count), memory, ranks, stuck
    )
