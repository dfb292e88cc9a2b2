"""An agent whose workers say much: who pumps it sees to others meanwhile."""

from __future__ import annotations

import os
import threading

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.arenas import Arena
from lazygt.runtime.cluster.agent import Agent, HostPart
from lazygt.runtime.cluster.protocol import Kept
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.messages import Copied
from lazygt.runtime.wire import decode


class Connection:
    """Keeps who sends waiting, as a slow network would, until ``go`` is set."""

    fd, closed = -1, None

    def __init__(self):
        self.sent = []
        self.busy, self.go = threading.Event(), threading.Event()

    def take(self):
        return None

    def send(self, frames):
        self.busy.set()
        assert self.go.wait(60)
        self.sent.append(frames)


def test_a_snapshot_on_its_way_keeps_nobody_waiting():
    """Copying a GiB takes seconds, in which the pool did not see that its client was gone."""
    connection = Connection()
    agent = Agent(connection)
    part = threading.Thread(target=agent._send, args=(Kept(0, 0, 0), [bytes(16 << 20)]))
    part.start()
    assert connection.busy.wait(60)
    agent.pump()
    assert connection.sent == []
    connection.go.set()
    part.join()
    assert decode(connection.sent[0], (Kept,)) == Kept(0, 0, 0)
    agent.close()


def test_a_part_that_is_ended_copies_no_further():
    said = []

    def say(message, frames):
        said.append(message)
        part.end()

    part = HostPart(0, LinkSpec(), say, None, [])
    arena = Arena.create(64 << 20)
    offset = arena.allocate(40 << 20).offset
    meta = TensorMeta.of(torch.empty(40 << 20, dtype=torch.uint8))
    part._send_copy(0, arena, Copied(1, meta, offset, 40 << 20))
    assert len(said) == 1
    arena.close()
    os.close(part._eventfd)
