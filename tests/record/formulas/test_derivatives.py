"""Gradients for which torch has a formula for plain tensors and another for all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazygt
from tests.support.bits import drawn, same

pytestmark = pytest.mark.timeout(120)

Function = Callable[..., Any]

PRODUCTS: dict[str, Function] = {
    "all": torch.prod,
    "rows": lambda x: x.prod(1),
    "columns kept": lambda x: x.prod(0, keepdim=True),
    "float64": lambda x: x.prod(-1, dtype=torch.float64),
}
EXTREMES: dict[str, Function] = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "nanmedian": torch.nanmedian,
}


def matrix(zeros: int = 0) -> torch.Tensor:
    x = drawn(7, 9)
    for place in range(zeros):
        x[place % 2, place] = 0
    return x.requires_grad_()


@pytest.mark.parametrize("zeros", [0, 1, 3])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, zeros: int) -> None:
    stats = same(PRODUCTS[name], matrix(zeros))
    assert set(stats["flushes"]) == {"to cpu"}, "the workers choose the formula"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0,), (3, 0)])
def test_products_of_few(shape: tuple[int, ...]) -> None:
    same(torch.prod, drawn(*shape, grad=True))


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    """What is not the extreme has a gradient of 0.0, though the incoming one be negative."""
    same(EXTREMES[name], matrix())
    same(EXTREMES[name], torch.tensor([1.0, 3.0, 3.0, 1.0], requires_grad=True))
    same(EXTREMES[name], torch.tensor([1.0, torch.nan, 3.0, torch.nan], requires_grad=True))
    same(lambda x: EXTREMES[name](x) * torch.inf, matrix())


@pytest.mark.parametrize("zeros", [0, 1])
@pytest.mark.parametrize("f", [*PRODUCTS.values(), lambda x: x.max() ** 2])
def test_second_gradients(f: Function, zeros: int) -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return g.square()

    same(second, matrix(zeros))


def test_numbers_that_fill() -> None:
    mask = drawn(40, 50) > 0
    value, x = torch.tensor(2.0, requires_grad=True), drawn(40, 50, grad=True)
    same(lambda x, v: x.masked_fill(mask.to(x.device), v), x, value)
    same(lambda v: torch.ones_like(x, device=v.device).masked_fill_(mask.to(v.device), v), value)
    same(lambda x, v: (x * 1).t().masked_fill_(mask.t().to(x.device), v), x, value)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("f", [torch.prod, torch.max])
def test_function_transforms_take_torchs_own_formulas(f: Function) -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.tensor([2.0, -3.0, 5.0], device=device)
        made = [torch.func.grad(f)(x), torch.func.jacrev(f)(x), torch.func.jacfwd(f)(x)]
        return [t.cpu() for t in (*made, torch.func.vmap(f)(torch.stack([x, x + 1])))]

    expected = program("cpu")
    with lazygt.session(launcher="inline"):
        for ours, theirs in zip(program("lazygt"), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_session_that_computes_nothing_asks_for_no_value() -> None:
    with lazygt.session(launcher="dry"):
        value = torch.tensor(2.0, requires_grad=True)
        torch.ones(3).masked_fill(torch.tensor([True, False, True]), value).sum().backward()
        assert value.grad is not None
        assert value.grad.shape == ()


@pytest.mark.parametrize("zeros", [0, 1])
def test_products_of_complex_numbers(zeros: int) -> None:
    x = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    x[0, :zeros] = 0
    same(lambda x: x.prod(1).abs(), x.requires_grad_())


class Image(torch.Tensor):
    """A class of the user's."""


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_tensors_of_the_users_classes_take_them_too(zeros: int) -> None:
    same(lambda x: x.as_subclass(Image).prod(1), matrix(zeros))
    same(lambda x: torch.max(x.as_subclass(Image)), matrix())
