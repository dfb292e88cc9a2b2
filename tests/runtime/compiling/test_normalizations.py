"""Reductions, normalizations and losses in fused groups: which groups there are, what they compute.

Each program is a stretch of a training step, forward and backward, as users write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lazygt
from lazygt.graph import Graph
from lazygt.graph.node import FUSED, Node
from lazygt.runtime import graph_codec
from lazygt.runtime.compiling.service import answer
from lazygt.runtime.executors.compiled import Cache, Compiled
from lazygt.runtime.executors.kernel_group import KernelGroup
from tests.passes.tools import CPU
from tests.runtime.compiling.lowering import lowered, one_by_one

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_norm(x: Tensor, t: Tensor, w: Tensor, training: bool = True) -> Tensor:
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    made = F.relu(F.batch_norm(x.transpose(1, 3), mean, var, w, w, training))
    return (made * t.transpose(1, 3)).sum() + mean.sum() + var.sum()


#: What is recorded.
PROGRAMS: dict[str, Program] = {
    "attention": lambda x, t, w: (F.softmax(x * 0.3 + t, -1) * t).sum(),
    "log_softmax": lambda x, t, w: F.log_softmax(x * 0.5, -1).mul(t).mean(),
    "layer_norm": lambda x, t, w: (F.layer_norm(x + t, [16], w, w) * t).sum(),
    "layer_norm_plain": lambda x, t, w: (F.layer_norm(x + t, [4, 16]) * t).sum(),
    "group_norm": lambda x, t, w: (F.relu(F.group_norm(x, 2, t.sum((0, 2, 3)), None)) * t).sum(),
    "batch_norm": batch_norm,
    "batch_norm_eval": lambda x, t, w: batch_norm(x, t, w, False),
    "mse": lambda x, t, w: F.mse_loss(x.tanh(), t),
    "bce": lambda x, t, w: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
    "var": lambda x, t, w: x.var(1).mul(2).sum() + (x * t).std(2, correction=0).sum(),
}
#: The members of the groups of each, group by group.
GROUPS = {
    "attention": ["mul add_ _softmax mul sum _softmax_backward_data mul_"],
    "log_softmax": ["mul _log_softmax mul mean", "div mul_ _log_softmax_backward_data mul_"],
    "layer_norm": ["add native_layer_norm mul_ sum native_layer_norm_backward add_"],
    "layer_norm_plain": ["add native_layer_norm mul_ sum native_layer_norm_backward"],
    "group_norm": [
        "sum native_group_norm relu_ mul sum threshold_backward native_group_norm_backward"
    ],
    "batch_norm": [
        "native_batch_norm relu_ mul sum sum add_ sum add_ threshold_backward "
        "native_batch_norm_backward add_"
    ],
    "batch_norm_eval": ["native_batch_norm relu_ mul sum sum add_ sum add_ threshold_backward"],
    "mse": ["tanh mse_loss", "mse_loss_backward tanh_backward"],
    "bce": ["sigmoid binary_cross_entropy_with_logits", "sigmoid sub_ mul_ div_"],
    "var": ["var mul_ sum mul std sum add_", "mul div eq masked_fill_",
            "mean sub_ mul mul_ mean sub mul add_"],
}  # fmt: skip


def recorded(program: Program) -> Graph:
    """The graph of a step, forward and backward, after the passes."""
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(flush_on_backward=False)
    ) as s:
        torch.manual_seed(0)
        x = torch.randn(64, 8, 4, 16, requires_grad=True)
        w = torch.rand(16, requires_grad=True)
        t = torch.randn(64, 8, 4, 16)
        s.flush()
        loss = program(x, t, w)
        loss.backward()
        s.flush()
        assert s.last_plan is not None
        return s.last_plan.graph


def fused(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == FUSED]


def names(node: Node) -> str:
    assert node.body is not None
    return " ".join(member.op.split(".")[1] for member in node.body.nodes)


def operands(group: KernelGroup) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    rooms = [(torch.rand(m.extent, generator=generator) - 0.3, m) for m in group.body.inputs]
    typed = [(r > 0 if m.dtype == torch.bool else r.to(m.dtype), m) for r, m in rooms]
    return [room.as_strided(m.shape, m.stride, m.offset) for room, m in typed]


def numbers(group: KernelGroup) -> tuple[float, ...]:
    return tuple(0.25 + which / 8 for which in range(len(group.body.params)))


def close(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Equal up to rounding, as large as it is in what is summed."""
    for one, other in zip(found, wanted, strict=True):
        atol = 1e-5 * max([1.0, *other.abs().flatten().tolist()])
        torch.testing.assert_close(one, other, rtol=1e-5, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_normalizations_are_fused_and_lowered_correctly(name: str) -> None:
    nodes = fused(recorded(PROGRAMS[name]))
    assert [names(node) for node in nodes] == GROUPS[name]
    for group in map(KernelGroup.of, nodes):
        given = operands(group)
        close(lowered(group, given, numbers(group)), one_by_one(group, given, numbers(group)))


def test_a_class_out_of_range_stays_an_index_error() -> None:
    with lazygt.session(launcher="inline", compile="off") as s:
        scores, classes = torch.randn(4, 3).log_softmax(1), torch.tensor([0, 1, 2, 3])
        loss = F.nll_loss(scores * 2, classes)
        with pytest.raises(IndexError):
            loss.item()
        assert all("nll_loss" not in names(node) for node in fused(s.plans()[-1].graph))


@pytest.mark.parametrize("launcher", ["process", "inline"])
def test_off_keeps_every_bit(launcher: str) -> None:
    def gradients(device: str, name: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, t = (torch.randn(8, 4, 4, 16, generator=generator) for _ in range(2))
        w = torch.rand(16, generator=generator).to(device).requires_grad_()
        x, t = x.to(device).requires_grad_(), t.to(device)
        loss = PROGRAMS[name](x, t, w)
        loss.backward()
        return [loss.detach().cpu(), *(p.grad.cpu() for p in (x, w) if p.grad is not None)]

    expected = {name: gradients("cpu", name) for name in PROGRAMS}
    with lazygt.session(
        compile="off", launcher=launcher, workers=lazygt.Workers(threads=torch.get_num_threads())
    ):
        for name, wanted in expected.items():
            for _ in range(3):
                for one, other in zip(gradients("lazygt", name), wanted, strict=True):
                    assert torch.equal(one, other), name


# -- really compiled -----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["attention", "layer_norm", "batch_norm"])
def test_compiled_normalizations_match_eager(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compile process answers for them; with operands that it has not seen."""
    cache = Cache(str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    (node,) = fused(recorded(PROGRAMS[name]))
    group = KernelGroup.of(node)
    key = group.key("cpu")
    told = answer({
        "key": key, "body": graph_codec.encode_graph(group.body), "writes": group.writes,
        "fresh": group.fresh, "flat": group.flat, "dynamic_dims": group.dynamic_dims,
        "device": "cpu", "lanes": group.lanes,
    }, cache)  # fmt: skip
    assert told == {"key": key, "error": ""}
    given = operands(group)
    wanted = one_by_one(group, given, numbers(group))
    mine = [operand.clone() for operand in given]
    made = Compiled(group, cache.code(key), CPU)(*mine, *numbers(group))
    fresh = [made] if group.fresh == 1 else list(made)
    close([*fresh, *(mine[operand] for operand, _ in group.writes)], wanted)
