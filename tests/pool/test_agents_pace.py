"""An agent whose workers say much: who pumps it sees to others in between."""

from __future__ import annotations

import os
import select

import torch

from lazygt.graph.meta import TensorMeta
from lazygt.runtime.cluster.agent import Agent, HostPart
from lazygt.runtime.cluster.protocol import Kept, read
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.messages import Copied
from lazygt.runtime.shared_memory import Arena


class Connection:
    fd, closed = -1, None

    def __init__(self):
        self.sent = []

    def take(self):
        return None

    def send(self, frames):
        self.sent.append(frames)


def rings(fd):
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def test_a_snapshot_goes_piece_by_piece_and_keeps_nobody_waiting():
    """Copying a GiB takes seconds, in which the pool did not see that its client was gone."""
    connection = Connection()
    agent = Agent(connection)
    alarm = agent.descriptors[1]
    for number in range(10):
        agent._say(Kept(0, 0, number << 24), [bytes(16 << 20)])
    agent.pump()
    assert len(connection.sent) == 2
    assert rings(alarm)
    pumped = 1
    while rings(alarm):
        agent.pump()
        pumped += 1
    assert pumped == 5
    offsets = [read(frames, (Kept,)).offset >> 24 for frames in connection.sent]
    assert offsets == list(range(10))
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
    part._give(0, arena, Copied(1, meta, offset, 40 << 20))
    assert len(said) == 1
    arena.close()
    os.close(part._alarm)
