"""Session whose tensors a forked child offers to other processes."""

from __future__ import annotations

import io
import multiprocessing
import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn

import lazygt

FORK = multiprocessing.get_context("fork")

SECONDS = 60


def offer(x: torch.Tensor, queue: Any) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()  # asks no worker for anything
    for send in (queue.put, ForkingPickler.dumps, lambda x: torch.save(x, io.BytesIO())):
        try:
            send(x)
        except lazygt.NoSession as error:
            queue.put(str(error))


def fork_in_session(settings: dict[str, Any]) -> None:
    queue: Any = FORK.Queue()
    with lazygt.session(**settings), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        x = torch.ones(2) + 1
        child = FORK.Process(target=offer, args=(x, queue))
        child.start()
        for _ in range(3):
            assert "process that this one was forked from" in queue.get(timeout=SECONDS)
        child.join(SECONDS)
        assert x.sum().item() == 4
    assert child.exitcode == 0
