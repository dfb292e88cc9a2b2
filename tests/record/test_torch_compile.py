"""Compiled functions and modules run in a session as if they were not compiled: eager's bits."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import lazygt
from lazygt.record import torch_compile

pytestmark = [
    pytest.mark.timeout(300),
    # torch._inductor, when it is loaded
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is dep:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "_warned", True)


def gelu_of_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ y).softmax(-1) * torch.rand(3)


OPTIONS: list[dict[str, Any]] = [
    {}, {"fullgraph": True}, {"dynamic": True}, {"mode": "reduce-overhead"},
    {"mode": "max-autotune"}, {"backend": "eager"}, {"backend": "aot_eager"},
    {"backend": "inductor", "options": {"epilogue_fusion": True}}, {"disable": True},
]  # fmt: skip
before_any_session = torch.compile(gelu_of_product, backend="eager")


def step(function: Callable[..., torch.Tensor], *more: Any) -> list[torch.Tensor]:
    """Result and gradients of a function with drawn operands, on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(4, 5, requires_grad=True)
    y = torch.randn(5, 3, requires_grad=True)
    result = function(x, y, *more)
    result.square().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    return [t.detach().cpu() for t in (result, x.grad, y.grad)]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compiled_function_has_eager_bits(options: dict[str, Any]) -> None:
    expected = step(gelu_of_product)
    early = torch.compile(gelu_of_product, **options)
    with lazygt.session(launcher="inline"):
        assert_same(step(early), expected)
        assert_same(step(torch.compile(gelu_of_product, **options)), expected)
        assert_same(step(torch.compile(**options)(gelu_of_product)), expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise AssertionError("traced")
        result: torch.Tensor = self.second(self.first(x).relu())
        return result


def trained(compiled: Callable[[nn.Module], nn.Module], early: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Block()
    x = torch.randn(8, 5)
    if early:
        model = compiled(model)  # type: ignore[assignment]
    if torch.lazygt.device_count():  # type: ignore[attr-defined]
        model, x = model.to("lazygt"), x.to("lazygt")
    step_of = model if early else compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step_of(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True)
    return model


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("compiled", [torch.compile, in_place])
def test_compiled_module_trains_to_eager_bits(compiled: Any, early: bool) -> None:
    expected = trained(lambda model: model, early)
    with lazygt.session(launcher="inline"):
        assert_same(trained(compiled, early), expected)


def test_nested_and_disabled_functions_run_as_they_are() -> None:
    inner = torch.compile(gelu_of_product, fullgraph=True)

    @torch.compiler.disable
    def aside(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(3)

    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return aside(inner(x, y)) * inner(x, y)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (gelu_of_product(x, y) + torch.ones(3)) * gelu_of_product(x, y)

    expected = step(plain)
    with lazygt.session(launcher="inline"):
        assert_same(step(torch.compile(outer, backend="eager")), expected)


def test_cpu_and_lazy_operands_mix_in_a_compiled_function() -> None:
    def scaled(x: torch.Tensor, number: torch.Tensor, table: torch.Tensor) -> Any:
        return x * number, table.cumsum(0)

    number, table = torch.tensor(0.3), torch.randn(7)
    with lazygt.session(launcher="inline"):
        x = torch.ones(3)
        ours, sums = torch.compile(scaled, fullgraph=True)(x, number, table)
        assert (ours.device.type, sums.device.type) == ("lazygt", "cpu")
        assert torch.equal(ours.cpu(), torch.ones(3, device="cpu") * number)
        assert torch.equal(sums, table.cumsum(0))
        with pytest.raises(RuntimeError, match="two devices"):
            torch.compile(scaled)(x[:1], table, table)


@pytest.mark.parametrize("own", ["default", "force_eager", "eager_on_recompile"])
def test_stance_of_the_user_is_kept_for_afterwards(own: Any) -> None:
    expected = step(gelu_of_product)
    with lazygt.session(launcher="inline"):
        torch.compiler.set_stance(own)
        assert_same(step(before_any_session), expected)
    try:
        assert eval_frame._stance.stance == own
    finally:
        torch.compiler.set_stance("default")


def test_cpu_functions_are_compiled_before_and_after() -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=counter)
    x = torch.ones(3)
    for frames in (1, 1):
        compiled(x)
        assert counter.frame_count == frames
        with lazygt.session(launcher="inline"):
            assert torch.equal(compiled(torch.ones(3)).cpu(), x.sin() + 1)
            assert torch.equal(compiled(x), x.sin() + 1)
        assert counter.frame_count == frames


def test_session_opened_in_a_compiled_function() -> None:
    def program() -> torch.Tensor:
        with lazygt.session(launcher="inline"):
            x = torch.arange(3.0)
            return square_and_add(x, x).cpu()

    assert torch.equal(torch.compile(program)(), torch.tensor([0.0, 2.0, 6.0]))


def square_and_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * x + y


def test_one_warning_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile, "_warned", False)
    compiled = torch.compile(square_and_add)
    with lazygt.session(launcher="inline"):
        x = torch.ones(3)
        optimizer = torch.optim.SGD([x.requires_grad_()], lr=0.1)  # calls a disabled function
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.zero_grad()
            torch.compiler.disable(square_and_add)(x, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(x, x)
            compiled(x, x)
    (said,) = caught
    assert said.category is lazygt.CompileWarning
    assert "torch.compile is left out in a lazygt session" in str(said.message)
    assert f"{__file__}:" in str(said.message)
    assert said.filename == __file__


LATE = """
from torch import compile
import sys, lazygt
assert "torch._dynamo" not in sys.modules
with lazygt.session(launcher="inline"):
    import torch
    x = torch.ones(3)
    assert compile(lambda x: x + 1, fullgraph=True)(x).tolist() == [2.0, 2.0, 2.0]
    import torch._dynamo
    assert torch._dynamo.optimize()(lambda x: x + 2)(x).tolist() == [3.0, 3.0, 3.0]
calls = []
def backend(graph, operands):
    calls.append(graph)
    return graph.forward
assert compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2.0, 2.0]
assert len(calls) == 1
"""


@pytest.mark.deep
@pytest.mark.anew
def test_dynamo_loaded_in_the_session() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LATE], check=True, timeout=200)


# -- torch's own use of tracing --------------------------------------------------------------


def attended(query: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(
        lambda b, h, q, k: q >= k, 1, 1, 128, 128, device=str(query.device).partition(":")[0]
    )
    result: Any = flex_attention(query, query, query, lambda s, b, h, q, k: s + bias[h], mask)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention(compiled: bool) -> None:
    torch.manual_seed(0)
    query, bias = torch.randn(1, 2, 128, 16), torch.randn(2)
    expected = attended(query, bias)
    with lazygt.session(launcher="inline"):
        attend = torch.compile(attended) if compiled else attended
        assert_same([attend(query.to("lazygt"), bias.to("lazygt")).cpu()], [expected])
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            attend(query.to("lazygt").requires_grad_(), bias.to("lazygt"))


def test_fake_tensors_of_lazy_tensors() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.randn(4, 6, requires_grad=True)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            result = (fake.exp() @ fake.t().relu()).softmax(0)
        assert (result.shape, result.device) == ((4, 4), x.device)
        assert result.requires_grad
