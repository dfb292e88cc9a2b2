"""The methods that FSDP2 gives a sharded module: what each does here, or why it is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

import lazygt
from lazygt.parallel.fsdp_module import _UNSUPPORTED, as_fsdp_module
from lazygt.record.tensor import storage_of

LAYERS, WIDTH = 3, 512
S0 = lazygt.Shard(0)


@pytest.fixture
def session() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="dry", mesh={"data": 2}, compile="off") as s:
        yield s


def sharded() -> nn.Module:
    return lazygt.fully_shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))


def gathered(session: lazygt.Session, model: nn.Module) -> int:
    """Weights that a step gathers."""
    x = lazygt.distribute(torch.randn(4, WIDTH), {"data": S0})
    model.zero_grad()
    model(x).square().mean().backward()
    session.flush()
    assert session.last_plan is not None
    sent = [one for one in session.last_plan.collectives if one.kind == "all_gather"]
    return sum(one.nbytes >= WIDTH * WIDTH * 4 for one in sent)


def test_fully_sharded_module_is_fsdp_module_of_same_class(session: lazygt.Session) -> None:
    model = sharded()
    assert isinstance(model, lazygt.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert lazygt.fully_shard(model) is model
    assert [type(model)] == [type(copy.deepcopy(model))]
    assert not isinstance(model[0], lazygt.FSDPModule)


def test_a_copy_of_a_sharded_module_can_be_pickled() -> None:
    layer = as_fsdp_module(nn.Linear(2, 3, device="cpu"))
    loaded = pickle.loads(pickle.dumps(layer))  # noqa: S301 - made here
    assert isinstance(loaded, lazygt.FSDPModule)
    assert torch.equal(loaded(torch.ones(2, device="cpu")), layer(torch.ones(2, device="cpu")))


def test_weights_are_kept_for_the_backward_from_when_it_is_said(session: lazygt.Session) -> None:
    model = sharded()
    session.flush()
    found = [gathered(session, model)]
    for again in (False, True):
        model.set_reshard_after_forward(again)
        found.append(gathered(session, model))
    # the first layer's weight is not read by a backward
    assert found == [2 * LAYERS - 1, LAYERS, 2 * LAYERS - 1]


def test_nonrecursive_setting_leaves_submodules_unchanged(session: lazygt.Session) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    lazygt.fully_shard(model[0], wrap="one")
    lazygt.fully_shard(model).set_reshard_after_forward(False, recurse=False)
    again = [storage_of(layer.weight).placed.unit.reshard_after_forward for layer in model]
    assert again == [True, False]


def test_scheduling_hints_do_not_change_plan(session: lazygt.Session) -> None:
    model = sharded()
    session.flush()
    before = gathered(session, model)
    model.set_requires_gradient_sync(False)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(True)
    model.set_unshard_in_backward(False)
    model.set_reshard_after_backward(True)
    model.set_modules_to_forward_prefetch([model])
    model.set_modules_to_backward_prefetch([model])
    model.unshard()
    model.reshard()
    model.reset_iter_state()
    model.unshard(async_op=True).wait()
    assert gathered(session, model) == before


def test_invalid_calls_are_refused(session: lazygt.Session) -> None:
    model = sharded()
    with pytest.raises(ValueError, match="set_reshard_after_forward\\(2\\): expected a bool"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="fully_shard was called on, not a Linear"):
        model.set_modules_to_forward_prefetch([model[0]])
    with pytest.raises(NotImplementedError, match="call set_reshard_after_forward\\(False\\)"):
        model.set_reshard_after_backward(False)
    for name, why in _UNSUPPORTED.items():
        with pytest.raises(NotImplementedError, match=f"{name}\\(\\) has no meaning") as error:
            getattr(model, name)(1)
        assert why in str(error.value)


def test_every_method_of_torch_has_an_answer() -> None:
    asked = {name for name in vars(TorchFSDPModule) if not name.startswith("_")}
    assert asked <= set(vars(lazygt.FSDPModule))
