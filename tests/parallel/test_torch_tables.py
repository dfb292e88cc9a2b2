"""Torch's own tables, pasted: what they compute, what they send, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torchs
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazygt
from lazygt.graph import placement
from lazygt.parallel.styles import as_style
from tests.parallel.llama import Llama, first_table, tutorial
from tests.sharding.counting import Counts, all_gather, all_reduce, planned, reduce_scatter

S0, S1, R = Shard(0), Shard(1), Replicate()
BATCH, LENGTH = 4, 8


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2, "tp": 2}) as s:
        yield s


# -- numbers and collectives --------------------------------------------------------------------


def with_tutorial(model: Llama) -> Llama:
    tp_mesh = lazygt.current().mesh["tp"]
    return tutorial(model, tp_mesh, lazygt.parallelize_module)


def with_wildcards(model: Llama) -> Llama:
    lazygt.parallelize_module(model, "tp", first_table())
    return model


def batch(words: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(words, (2, BATCH, LENGTH), generator=generator, device="cpu")
    return x, y


def train(make: Callable[[], nn.Module], words: int, device: str) -> list[torch.Tensor]:
    """Losses and weights of two steps."""
    torch.manual_seed(0)
    model = make()
    x, y = (t.to(device) for t in batch(words))
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for _ in range(2):
        opt.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return [t.detach().cpu() for t in (*losses, *model.parameters())]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "sizes",
    [{}, {"heads": 4, "kv_heads": 2}, {"words": 37, "dim": 18, "heads": 3, "kv_heads": 3}],
    ids=["even", "grouped queries", "nothing divides"],
)
@pytest.mark.parametrize("lay", [with_tutorial, with_wildcards])
def test_tables_of_torch_give_the_numbers_of_one_device(
    lay: Callable[[Llama], Llama], sizes: dict[str, int]
) -> None:
    words = sizes.get("words", 40)
    expected = train(lambda: Llama(**sizes), words, "cpu")
    with lazygt.session(mesh={"tp": 2}, workers=lazygt.Workers(threads=1)) as s:
        computed = train(lambda: lay(Llama(**sizes)), words, "lazygt")
        kinds = {one.kind for one in s.last_plan.collectives} if s.last_plan else set()
    assert kinds  # it did run in blocks
    for got, want in zip(computed, expected, strict=True):
        torch.testing.assert_close(got, want)


WIDE, LONG, ROWS, WORDS = 256, 64, 4, 1024
ACTIVATION, LOGITS = ROWS * LONG * WIDE * 4, ROWS * LONG * WORDS * 4


def sent(lay: Callable[[Llama], Llama]) -> Counts:
    """The collectives of a step that carry as much as an activation, or more: as the gradient of a
    table would be."""

    def loss(model: nn.Module) -> torch.Tensor:
        x, y = torch.zeros(2, ROWS, LONG, dtype=torch.long)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def make() -> Llama:
        return lay(Llama(WORDS, WIDE, 8, 8, 512, depth=1, length=LONG))

    counted, _ = planned({"tp": 2}, make, loss)
    return Counts({meet: n for meet, n in counted.items() if meet.nbytes >= ACTIVATION})


def test_tutorial_gathers_shared_values_once_and_reduces_gradients_once() -> None:
    # forward: before attention, network and head; backward: the gradients of wo and w2, and that
    # of the embedding, a quarter of the gradient of its table, of which each has some words
    gathered = {all_gather(ACTIVATION, "tp"): 6, all_gather(LOGITS, "tp"): 1}
    # forward: after embedding, wo and w2; backward: before attention, network and head
    assert sent(with_tutorial) == gathered | {reduce_scatter(ACTIVATION, "tp"): 6}


def test_layers_without_sequence_parallelism_reduce_shared_values_once() -> None:
    # forward: wo and w2; backward: the inputs of attention and network
    assert sent(with_wildcards) == {all_reduce(ACTIVATION, "tp"): 4}


# -- torch's objects ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ColwiseParallel", {"input_layouts": S1, "output_layouts": R}),
        ("RowwiseParallel", {"input_layouts": R, "output_layouts": S1, "use_local_output": False}),
        ("SequenceParallel", {"sequence_dim": 0}),
        (
            "PrepareModuleInput",
            {
                "input_layouts": (S0, None),
                "desired_input_layouts": (R, None),
                "input_kwarg_layouts": {"mask": S0},
                "desired_input_kwarg_layouts": {"mask": R},
            },
        ),
        ("PrepareModuleOutput", {"output_layouts": (R,), "desired_output_layouts": (S0,)}),
        (
            "PrepareModuleInputOutput",
            {
                "input_layouts": (S1,),
                "desired_input_layouts": (R,),
                "input_kwarg_layouts": {"mask": S0},
                "desired_input_kwarg_layouts": {"mask": R},
                "output_layouts": (Partial(),),
                "desired_output_layouts": (S1,),
            },
        ),
    ],
)
def test_torch_styles_convert_to_lazygt_styles(name: str, arguments: dict[str, Any]) -> None:
    assert as_style(getattr(torchs, name)(**arguments)) == getattr(lazygt, name)(**arguments)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Embedding(2, 2)], ids=["lin", "emb"])
@pytest.mark.parametrize("name", ["ColwiseParallel", "RowwiseParallel"])
def test_styles_of_torch_have_torchs_defaults(name: str, module: nn.Module) -> None:
    given = as_style(getattr(torchs, name)())
    assert given is not None
    assert given.layouts(module) == getattr(lazygt, name)().layouts(module)


def test_a_style_of_somebody_elses_is_refused(session: lazygt.Session) -> None:
    class Own(torchs.ColwiseParallel):
        pass

    with pytest.raises(TypeError, match=r"Own is a style of its own.*lazygt knows ColwiseParallel"):
        lazygt.parallelize_module(nn.Linear(4, 4), "tp", {"": Own()})


def test_placements_are_torchs_own_and_ours_are_taken_as_well(session: lazygt.Session) -> None:
    assert (lazygt.Shard, lazygt.Replicate, lazygt.Partial) == (Shard, Replicate, Partial)
    x = lazygt.distribute(torch.zeros(4, 4), [placement.Shard(-1), placement.Replicate()])
    assert x.placements == (S1, R)


@pytest.mark.anew
def test_torch_placements_are_not_imported_unless_used() -> None:
    program = (
        "import sys, lazygt\n"
        "from lazygt.graph.placement import Shard, as_placement\n"
        "as_placement(Shard(0), 1)\n"
        "lazygt.ColwiseParallel(input_layouts=Shard(1))\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
        "assert repr(lazygt.Shard(0)) == 'Shard(dim=0)'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


# -- the mesh -----------------------------------------------------------------------------------


def column_axis(device_mesh: Any) -> str:
    """The axis along which a layer is cut for this mesh."""
    layer = nn.Linear(8, 8)
    lazygt.parallelize_module(layer, device_mesh, lazygt.ColwiseParallel())
    mesh = lazygt.current().mesh
    return mesh.names[layer.weight.placements.index(S0)]


def test_an_axis_is_named_or_given_as_a_mesh(session: lazygt.Session) -> None:
    assert column_axis("data") == "data"
    assert column_axis(session.mesh["data"]) == "data"
    assert column_axis(None) == "tp"
    for wrong in (session.mesh, 3, object()):
        with pytest.raises(ValueError, match=r"styles are for one axis .* data=2,tp=2; name it"):
            column_axis(wrong)
    with pytest.raises(ValueError, match="the mesh data=2,tp=2 has no axis 'model'"):
        column_axis("model")


def test_the_only_axis_is_meant_and_of_several_none_in_particular() -> None:
    with lazygt.session(launcher="dry", mesh={"ranks": 2}):
        assert column_axis(None) == "ranks"
    with (
        lazygt.session(launcher="dry", mesh={"a": 2, "b": 2}),
        pytest.raises(ValueError, match=r"name it, as in parallelize_module\(module, 'b', plan\)"),
    ):
        column_axis(None)


def test_a_device_mesh_of_torchs_names_an_axis(session: lazygt.Session) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        same = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        nameless, data = init_device_mesh("cpu", (4,)), same["data"]
    finally:
        dist.destroy_process_group()
    assert column_axis(data) == "data"
    for wrong in (same, other, nameless):
        with pytest.raises(ValueError, match="styles are for one axis of the session's mesh"):
            column_axis(wrong)


# -- what is refused ----------------------------------------------------------------------------


class Block(nn.Module):
    """Two layers, and what a call may look like."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.words = nn.Embedding(8, 8)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.second(self.first(x)), mask


def test_a_star_is_for_one_name(session: lazygt.Session) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    with pytest.raises(NotImplementedError, match=r"'0': .* not for Sequential"):
        lazygt.parallelize_module(model, "tp", {"*": lazygt.ColwiseParallel()})
    lazygt.parallelize_module(model, "tp", {"*.*": lazygt.ColwiseParallel()})
    assert (model[0][0].weight.placements, model[1].weight.placements) == ((R, S0), (R, R))


@pytest.mark.parametrize(
    ("plan", "kind", "message"),
    [
        ({"frist": lazygt.ColwiseParallel()}, ValueError, "no module fits 'frist'; .*first"),
        ({"layers.*.wq": lazygt.ColwiseParallel()}, ValueError, "where . is for what stands betw"),
        (
            lazygt.ColwiseParallel(),
            NotImplementedError,
            "module '': ColwiseParallel is for nn.Linear and nn.Embedding, not for Block; give it",
        ),
        (
            {"first": lazygt.VocabParallel()},
            NotImplementedError,
            "nn.Embedding, not for Linear",
        ),
        ({"first": lazygt.ColwiseParallel}, TypeError, "nor a style, such as lazygt.ColwiseP"),
        ({"first": "colwise"}, TypeError, "'first': 'colwise' is neither placements"),
        (None, TypeError, "parallelize_plan=None: expected a style, or a dict"),
        (
            {"": lazygt.PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,))},
            ValueError,
            "module '': 2 input_layouts, but 1 desired_input_layouts",
        ),
        (
            {"": lazygt.PrepareModuleInput(input_kwarg_layouts={"mask": R})},
            ValueError,
            "input_kwarg_layouts are of mask, but desired_input_kwarg_layouts of nothing",
        ),
        (
            {"": lazygt.PrepareModuleOutput(output_layouts=R, desired_output_layouts=(R, R))},
            ValueError,
            "1 output_layouts, but 2 desired_output_layouts",
        ),
        (
            {"first": lazygt.ColwiseParallel(output_layouts=Partial())},
            ValueError,
            r"module 'first': Partial\(sum\): no value here waits for its sum",
        ),
        ({"first": lazygt.ColwiseParallel(input_layouts=1)}, ValueError, "1 is no placement"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    session: lazygt.Session, plan: Any, kind: type[Exception], message: str
) -> None:
    model = Block()
    with pytest.raises(kind, match=message):
        lazygt.parallelize_module(model, "tp", plan)
    assert model.first.weight.placements == (R, R)


def test_plan_passed_as_mesh_is_refused(session: lazygt.Session) -> None:
    with pytest.raises(TypeError, match="the plan is the third argument"):
        lazygt.parallelize_module(Block(), {"first": lazygt.ColwiseParallel()})


@pytest.mark.parametrize(
    ("style", "arguments", "kind", "message"),
    [
        (
            lazygt.PrepareModuleInput(input_layouts=S0, desired_input_layouts=R),
            2,
            ValueError,
            "2 arguments of Block, but 1 layouts: say one of each",
        ),
        (
            lazygt.PrepareModuleInput(input_layouts=(S0, S0), desired_input_layouts=(R, R)),
            1,
            TypeError,
            "argument 1 has the layout Shard(dim=0), but is a NoneType",
        ),
        (
            lazygt.PrepareModuleOutput(output_layouts=R, desired_output_layouts=S0),
            2,
            ValueError,
            "2 results of Block, but 1 layouts",
        ),
        (
            lazygt.PrepareModuleOutput(output_layouts=(R,) * 3, desired_output_layouts=(S0,) * 3),
            2,
            ValueError,
            "Block returned 2 results, but the style has 3 layouts",
        ),
        (lazygt.SequenceParallel(sequence_dim=5), 1, ValueError, "a tensor of 2 dims has no dim 5"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(
    session: lazygt.Session,
    style: lazygt.ParallelStyle,
    arguments: int,
    kind: type[Exception],
    message: str,
) -> None:
    model = Block()
    lazygt.parallelize_module(model, "tp", style)
    given = (torch.ones(4, 8), torch.ones(4, 8))[:arguments]
    with pytest.raises(kind) as caught:
        model(*given, *(None,) * (2 - len(given)))
    assert message in str(caught.value)


def test_styles_of_inputs_and_of_outputs_stand_beside_each_other(session: lazygt.Session) -> None:
    model, x = Block(), torch.ones(4, 8)
    before = lazygt.PrepareModuleInput(
        input_layouts=(S0, None), desired_input_layouts=(S0, None),
        input_kwarg_layouts={"mask": S1}, desired_input_kwarg_layouts={"mask": R},
    )  # fmt: skip
    after = lazygt.PrepareModuleOutput(output_layouts=(R, None), desired_output_layouts=(S1, None))
    lazygt.parallelize_module(model, "tp", before)
    lazygt.parallelize_module(model, "tp", after)
    y, mask = model(x, mask=x)
    assert mask is not None
    assert (y.placements, mask.placements) == ((R, S1), (R, R))
    lazygt.parallelize_module(model, "tp", {"first": lazygt.RowwiseParallel(output_layouts=S0)})
    lazygt.parallelize_module(model, "tp", {"first": lazygt.ColwiseParallel()})
    assert len(model.first._forward_hooks) == 0  # the later style is the only one
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
