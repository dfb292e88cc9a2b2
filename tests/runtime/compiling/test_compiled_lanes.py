"""Groups of horizontal ops: one artifact for a few lanes serves groups of any number of tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazygt
from lazygt import native
from lazygt.graph import Graph
from lazygt.graph.node import FUSED, Node
from lazygt.graph.per_tensor import LANES
from lazygt.runtime import graph_codec
from lazygt.runtime.compiling import service
from lazygt.runtime.executors import compiled as compiled_executor
from lazygt.runtime.executors.compiled import Cache, compiled
from lazygt.runtime.executors.eager import EagerExecutor
from lazygt.runtime.executors.kernel_group import KernelGroup, Members
from lazygt.runtime.plan import Plan
from tests.passes.overloads import inputs_for
from tests.passes.tools import CPU
from tests.runtime.compiling.lowering import agree

SIZES = [(4, 4), (4,), (4, 3), (3,), (3, 1), (1,), (7,), (9,), (11,), (13,), (5, 5)]


def stepped(
    device: str, flush: Callable[[], object] = lambda: None, steps: int = 4
) -> list[torch.Tensor]:
    """Parameters after some steps of AdamW with a schedule."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.rand(size, device="cpu").to(device)) for size in SIZES]
    optimizer = torch.optim.AdamW(parameters, 0.1, foreach=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        for p in parameters:  # made elsewhere, so that nothing else is compiled
            p.grad = (torch.rand(p.shape, device="cpu") - 0.4).to(device)
        flush()
        optimizer.step()
        flush()
    return [p.detach().cpu() for p in parameters]


def plan_of_a_step() -> Plan:
    with lazygt.session(launcher="inline", compile="off") as s:
        stepped("lazygt", s.flush)
        return [plan for plan in s.plans() if "_foreach_sqrt" in str(plan.graph)][-1]


def fused(graph: Graph) -> Node:
    (node,) = [n for n in graph.nodes if n.op == FUSED and "_foreach_sqrt" in str(n.body)]
    return node


def test_one_artifact_serves_any_number_of_tensors() -> None:
    node = fused(plan_of_a_step().graph)
    group = KernelGroup.of(node)
    assert (group.lanes, group.flat, len(group.body.nodes)) == (LANES, True, LANES * 8)
    assert len(group.writes) == LANES * 3
    assert group.fresh == 0


def test_lanes_are_lowered_to_the_same_arithmetic() -> None:
    group = KernelGroup.of(fused(plan_of_a_step().graph))
    numbers = [0.5 + n / 64 for n in range(len(group.body.params))]
    agree(group, inputs_for(group.body), numbers)


def test_code_compiled_under_other_flags_has_another_name() -> None:
    group = KernelGroup.of(fused(plan_of_a_step().graph))
    flags = (("deterministic_algorithms", "on"),)
    assert len({group.key("cpu"), group.key("cpu", ()), group.key("cpu", flags)}) == 2


def test_calls_take_the_tensors_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Members in the place of what they are compiled to."""
    plan = plan_of_a_step()
    node = fused(plan.graph)
    number = plan.graph.nodes.index(node)
    group = KernelGroup.of(node)
    calls: list[int] = []

    def runner(code: str, device: torch.device) -> Any:
        members = Members(group.body, group.writes, group.fresh)

        def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
            calls.append(len(operands))
            return list(members(*operands))

        return run

    monkeypatch.setattr(compiled_executor, "load", runner)
    monkeypatch.setattr(Cache, "code", lambda cache, key: tmp_path / key)
    executor = compiled(plan, CPU, [(number, group.key("cpu"))], Cache(str(tmp_path)))
    numbers = tuple(0.3 + n / 128 for n in range(len(plan.graph.params)))
    for factor in (1.0, 2.0):
        given = [torch.rand(m.shape) * factor for m in plan.graph.inputs]
        both = [
            one.run([t.clone() for t in given], numbers).outputs
            for one in (EagerExecutor(plan, CPU), executor)
        ]
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    operands = 4 * LANES + 1  # parameters, gradients, two moments; the numbers
    assert set(calls) == {operands}
    assert len(calls) == 2 * 2  # eleven tensors
    assert executor.interpreter.compiled.keys() == {0}  # one step, not its members


# -- really compiled -----------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_lanes_match_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    cache, plan = Cache(str(tmp_path)), plan_of_a_step()
    node = fused(plan.graph)
    group = KernelGroup.of(node)
    key = group.key("cpu")
    told = service.answer({
        "key": key, "body": graph_codec.encode_graph(group.body), "writes": group.writes,
        "fresh": group.fresh, "flat": group.flat, "dynamic_dims": group.dynamic_dims,
        "lanes": group.lanes, "device": "cpu",
    }, cache)  # fmt: skip
    assert told == {"key": key, "error": ""}
    executor = compiled(plan, CPU, [(plan.graph.nodes.index(node), key)], cache)
    numbers = tuple(0.3 + n / 128 for n in range(len(plan.graph.params)))
    given = [torch.rand(m.shape) for m in plan.graph.inputs]
    for _ in range(3):  # checked, then as code; numbers are kept
        wanted = EagerExecutor(plan, CPU).run([t.clone() for t in given], numbers).outputs
        for one, other in zip(
            executor.run([t.clone() for t in given], numbers).outputs, wanted, strict=True
        ):
            torch.testing.assert_close(one, other)


def test_off_keeps_every_bit() -> None:
    expected = stepped("cpu")
    with lazygt.session(compile="off") as s:
        found = stepped("lazygt", s.flush)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_session_compiles_lanes(tmp_path: Path) -> None:
    expected = stepped("cpu", steps=8)
    with lazygt.session(compile=lazygt.Compile("now", cache_dir=str(tmp_path))) as s:
        found = stepped("lazygt", s.flush, steps=8)
        lanes = [made for made in s.compiles() if made.ops == LANES * 8]
        assert [made.status for made in lanes] == ["compiled"]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_without_the_extension_no_code_is_loaded_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = native.Loaded(None, None, "none was built")
    monkeypatch.setattr(native, "load", lambda: loaded)
    with pytest.raises(lazygt.LazyGTError, match="none was built; run `lazygt build-native`"):
        compiled_executor.load(tmp_path / "some.so", torch.device("cuda", 1))
