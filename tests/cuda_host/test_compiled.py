"""Groups of ops that Inductor compiles for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config

import lazygt
from lazygt.graph.node import FUSED
from lazygt.runtime.compiling import service
from lazygt.runtime.executors.kernel_group import KernelGroup
from lazygt.settings import grouped
from tests.cuda_host.control import Control

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory for compiled code."""
    return tmp_path_factory.mktemp("compiled")


def agreeing_and_faster(gpu: Control) -> None:
    """Have compiled code compute what its ops do, and gain by fewer kernels."""
    gpu.reads_zeros, gpu.busy_us = 1, 300


def compute(session: lazygt.Session, runs: int) -> None:
    """Run a plan of one fused group and some ops that are none, each time with a value read."""
    weight = torch.ones(64, 64)
    for _ in range(runs):
        x = ((torch.randn(64, 64).sin() * 2 + 1).exp().tanh() @ weight).cumsum(0)
        ((x @ weight).cumsum(1) @ weight).sum().item()
    assert session.compiled(timeout=200)


def test_a_compiled_group_is_a_part_of_cuda_graphs(gpu: Control, cache: Path) -> None:
    agreeing_and_faster(gpu)
    settings = {"compile": "now", "cache_dir": str(cache), "cuda_graphs": "now"}
    with lazygt.session(**grouped({"device": "cuda", **settings})) as session:  # type: ignore[arg-type]
        compute(session, 3)
        (made,) = session.compiles()
        assert (made.status, made.gain > 0) == ("compiled", True), made
        met = gpu.compiled
        compute(session, 12)
        assert gpu.compiled > met
        (captured,) = (told for _, _, told in session.cuda_graphs() if told.graphs)
        assert not captured.failed
        (plan,) = {entry.plan for entry, _, told in session.cuda_graphs() if told.graphs}
        assert captured.steps >= len(plan.steps.graph.nodes) - 2
    assert gpu.replays > 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_groups_are_timed_until_the_gpu_has_run_them(gpu: Control) -> None:
    with lazygt.session(device="cuda", launcher="dry", compile="off") as session:
        total = torch.randn(64, 64).sin().exp().tanh().sum()
        session.flush()
        del total
        (node,) = (n for n in session.last_plan.graph.nodes if n.op == FUSED)
    group, device = KernelGroup.of(node), torch.device("cuda", 0)
    with config.patch(compile_threads=1):  # Inductor's pool of processes would stay
        code = service.compile_group(group, device)
    agreeing_and_faster(gpu)
    ((_, op_by_op, as_one),) = service.times(group, code, device)
    kernel = gpu.busy_us / 1e6
    assert op_by_op > 4 * kernel
    assert kernel < as_one < op_by_op
