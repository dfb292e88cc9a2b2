"""Every optimizer of torch gives the bits that it gives on CPU tensors, with few ops recorded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import lazygt

pytestmark = [
    pytest.mark.timeout(120),
    # LBFGS and Adagrad with unusual flags warn about themselves
    pytest.mark.filterwarnings("ignore"),
]

#: SparseAdam takes sparse gradients only, which lazygt refuses.
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")
)

#: What is tried of each optimizer that takes it. ``capturable`` is refused by torch on CPUs, and
#: ``differentiable`` on leaves that are stepped in place.
FLAGS: dict[str, Any] = {
    "weight_decay": 0.1,
    "maximize": True,
    "amsgrad": True,
    "momentum": 0.9,
    "centered": True,
    "decoupled_weight_decay": True,
    "foreach": True,
    "lr_decay": 0.1,
    "lambd": 0.1,
    "t0": 2,
    "line_search_fn": "strong_wolfe",
}


def parameters(device: str, matrices: bool) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = ((7, 5), (4, 4)) if matrices else ((7, 5), (33,), (3, 4, 5), ())
    return [nn.Parameter(torch.randn(shape, device="cpu").to(device)) for shape in shapes]


def loss(params: list[nn.Parameter], step: int) -> torch.Tensor:
    parts = [((p * (1 + 0.1 * i) + 0.3 * step).sin() * p).sum() for i, p in enumerate(params)]
    return torch.stack(parts).sum()


def trained(name: str, options: dict[str, Any], device: str) -> list[torch.Tensor]:
    """Parameters and the optimizer's state after five steps."""
    params = parameters(device, matrices=name == "Muon")
    options = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
    optimizer = getattr(torch.optim, name)(params, **options)
    for step in range(5):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(params, step)
            value.backward()
            return value

        optimizer.step(closure)
    kept = [v for p in params for _, v in sorted(optimizer.state[p].items())]
    kept = [v for v in kept if isinstance(v, torch.Tensor)]
    return [t.detach().cpu() for t in (*params, *kept)]


def cases() -> Iterator[Any]:
    for name in OPTIMIZERS:
        known = inspect.signature(getattr(torch.optim, name)).parameters
        taken = {flag: value for flag, value in FLAGS.items() if flag in known}
        together = {k: v for k, v in taken.items() if k not in ("maximize", "foreach")}
        chosen = [{}, *({k: v} for k, v in taken.items()), together]
        if name == "SGD":
            chosen += [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}]
        for options in chosen:
            yield pytest.param(name, options, id=f"{name}-{'-'.join(options)}")
        if name not in ("LBFGS", "Muon"):
            yield pytest.param(name, {"lr": torch.tensor(0.01)}, id=f"{name}-lr tensor")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "options"), list(cases()))
def test_five_steps_have_the_bits_of_eager_torch(name: str, options: dict[str, Any]) -> None:
    expected = trained(name, options, "cpu")
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ):
        ours = trained(name, options, "lazygt")
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad"])
def test_foreach_formulas_of_the_same_bits_are_kept(name: str) -> None:
    """A step then records as many ops for 50 parameters as for 5."""
    counts = []
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ) as session:
        for number in (5, 50):
            params = [nn.Parameter(torch.ones(3).to("lazygt")) for _ in range(number)]
            optimizer = getattr(torch.optim, name)(params)
            for p in params:
                p.grad = torch.ones(3).to("lazygt")
            optimizer.step()
            before = session.stats()["ops_recorded"]
            optimizer.step()
            counts.append(session.stats()["ops_recorded"] - before)
    assert counts[0] == counts[1], counts


@pytest.mark.parametrize("options", [{}, {"use_buffers": True}])
def test_averaged_models_and_clipped_gradients(options: dict[str, Any]) -> None:
    def averaged(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(device)
        average = swa_utils.AveragedModel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 40).reshape(8, 5).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.2)
            optimizer.step()
            average.update_parameters(model)
        return [value.detach().cpu() for value in average.state_dict().values()]

    expected = averaged("cpu")
    with lazygt.session(
        launcher="inline", compile="off", tracing=lazygt.Tracing(default_device=False)
    ):
        ours = averaged("lazygt")
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)
