"""Sessions whose workers are on other hosts, for tests: agents on threads of this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import lazygt
from lazygt.config import Config
from lazygt.graph.mesh import Mesh
from lazygt.net.channel import new_token
from lazygt.runtime.cluster import opening
from lazygt.runtime.cluster.agent import AgentThread
from lazygt.runtime.cluster.cluster_link import ClusterLink
from lazygt.runtime.cluster.remote import RemoteHost
from lazygt.runtime.collectives.rendezvous_store import StoreServer
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.link import Link

STEPS = 40


class Hosts:
    """Agents in threads, of which each has a connection of its own to the client.

    Args:
        address: at which agents reach each other; "": they don't.
    """

    def __init__(self, address: str = "") -> None:
        self.agents: list[AgentThread] = []
        self.address = address

    def open(self, workers: list[int]) -> Callable[[Config, Mesh, str], Link]:
        """A launcher for so many workers on each host; the first is the client's own. Agents that
        are there already serve the next session, too."""

        def launch(config: Config, mesh: Mesh, copier: str) -> Link:
            remote = []
            for number, count in enumerate(workers[1:], 1):
                if len(self.agents) < number:
                    self.agents.append(AgentThread(on_host(number), self.address))
                remote.append((RemoteHost(f"host{number}", self.agents[number - 1].end), count))
            token = new_token()
            store = StoreServer("127.0.0.1", token)
            spec = replace(
                opening.link_spec(config, mesh, copier), token=token, store=store.endpoint,
                host="host0", address="127.0.0.1",
            )  # fmt: skip
            return ClusterLink(spec, workers[0], remote, store)

        return launch

    def lose(self, which: int) -> None:
        """A host is gone, with all that runs there."""
        for part in self.agents[which].agent.parts.values():
            assert part._link is not None
            for pid in part._link.pids:
                os.kill(pid, signal.SIGKILL)
        self.agents[which].end.close("its network is gone")

    def close(self) -> None:
        for agent in self.agents:
            agent.end.close("the test is over")
            agent.join(60)
            assert not agent.is_alive()


def on_host(number: int) -> Callable[[LinkSpec], LinkSpec]:
    """What workers are to be, on a host of this number."""
    return lambda spec: replace(spec, host=f"host{number}")


def train(session: lazygt.Session, at: int = -1, act: Callable[[], object] | None = None) -> bytes:
    """Steps of Adam; all bits of what they made. ``act`` is done before step ``at``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(16, 32, device="cpu").to("lazygt")
    large = torch.arange(1 << 18, dtype=torch.float32, device="cpu").to("lazygt")
    losses = []
    for step in range(STEPS):
        if step == STEPS // 2:
            session._client.snap(lambda snapshot: None)
            session._client.wait_snapped()
        if step == at and act is not None:
            act()
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = [torch.tensor(losses, device="cpu"), (large * 2).cpu()]
    values += [parameter.detach().cpu() for parameter in model.parameters()]
    return b"".join(value.numpy().tobytes() for value in values)


def wait_for(look: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``look`` says, once that is something."""
    until = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < until
        threading.Event().wait(0.01)
    return seen
