"""Which plans make a worker give large tensors back to the kernel."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lazygt
from lazygt.graph.text import parse_graph
from lazygt.runtime.worker import shipped_plans


@pytest.mark.parametrize(
    ("kind", "rows", "turns"),
    [
        ("all_gather", 1 << 19, True),
        ("all_gather", 1 << 10, False),
        ("all_reduce", 1 << 19, False),
    ],
)
def test_large_blocks_take_turns(kind: str, rows: int, turns: bool) -> None:
    op = "'sum'" if kind == "all_reduce" else "None"
    moves = "[]" if kind == "all_reduce" else f"[[0, {rows}]]"
    graph = parse_graph(f"""graph {{
  %0: f32[{rows // 2}] = input
  %1: f32[{rows}] = lazygt.launch('{kind}', [%0], {moves}, {op}, 'data')
  %2: f32[{rows}] = lazygt.wait(%1, [%0], [], 'data')
  return %2
}}""")
    assert shipped_plans.gathers_or_scatters(graph) is turns


def resident(pid: int) -> int:
    """MiB at the peak so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) >> 10


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this malloc gives nothing back"
)
def test_workers_need_less_for_a_sharded_model_than_for_a_whole_one() -> None:
    def step_needs(whole: bool) -> int:
        with lazygt.session(
            mesh={"data": 2}, workers=lazygt.Workers(threads=1), compile="off"
        ) as s:
            pids = s.worker_pids
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
            (lazygt.data_parallel if whole else lazygt.fully_shard)(model)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            s.synchronize()
            before = {}
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # see proc(5)
                before[pid] = resident(pid)
            for _ in range(3):
                x = lazygt.distribute(torch.randn(32, 1024), {"data": lazygt.Shard(0)})
                opt.zero_grad()
                model(x).square().mean().backward()
                opt.step()
            s.synchronize()
            return max(resident(pid) - before[pid] for pid in pids)

    assert step_needs(whole=False) < step_needs(whole=True)
