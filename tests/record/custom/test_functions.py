"""``lazygt.apply``: a plain Python function as one op of the graph."""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import lazygt

SETTINGS: list[dict[str, Any]] = [{"launcher": "inline"}, {"workers": 1}]
SCALE = 2.0


class Point(NamedTuple):
    """What a function may return."""

    x: Tensor
    y: Tensor


def test_without_a_session_there_is_no_worker() -> None:
    with pytest.raises(lazygt.NoSession):
        lazygt.apply(torch.sin, torch.ones(2))


@pytest.fixture(params=SETTINGS, ids=["inline", "worker"], scope="module")
def s(request: pytest.FixtureRequest) -> Iterator[lazygt.Session]:
    with lazygt.session(**request.param) as session:
        yield session


def values() -> Tensor:
    return torch.tensor([1.0, -2.0, 2.0, 2.0])


def sorted_by_numpy(x: Tensor, times: float = 1.0) -> Tensor:
    """NumPy has no values to sort where shapes are learnt, so it is run for real."""
    return torch.from_numpy(np.sort(x.detach().numpy()) * np.float32(times))


def nested(given: dict[str, Any], *, more: list[Tensor]) -> Any:
    return {"sum": given["a"] + more[0], "rest": (given["n"], [more[1] * given["n"]], None)}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "plain": (lambda x: x * 2 + x.sum(), lambda: ((values(),), {})),
    "several": (lambda x, y: (x + y, [x, y[::2]]), lambda: ((values(), values()), {})),
    "nested": (nested, lambda: (({"a": values(), "n": 3},),
                                {"more": [values(), values()]})),
    "for real": (sorted_by_numpy, lambda: ((values(), 2.0), {})),
    "shape of values": (lambda x: [x[x > 0], int(x.sum()), "text"], lambda: ((values(),), {})),
    "global": (lambda x: x * SCALE, lambda: ((values(),), {})),
    "torch's own": (torch.cumsum, lambda: ((values(), 0), {})),
    "a named tuple": (lambda x: Point(x + 1, x), lambda: ((values(),), {})),
    "no tensor": (lambda n: torch.arange(float(n), device="cpu"), lambda: ((3,), {})),
    "none": (lambda x: None, lambda: ((values(),), {})),
}  # fmt: skip


def assert_same(one: Any, other: Any) -> None:
    a, a_spec = torch.utils._pytree.tree_flatten(one)
    b, b_spec = torch.utils._pytree.tree_flatten(other)
    assert a_spec == b_spec
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            assert x.device.type == "lazygt"
            torch.testing.assert_close(x.cpu(), y, rtol=0, atol=0)
        else:
            assert (x, type(x)) == (y, type(y))


@pytest.mark.parametrize("name", CALLS)
def test_applied_function_matches_local_call(s: lazygt.Session, name: str) -> None:
    fn, given = CALLS[name]
    with torch.device("cpu"):
        args, kwargs = given()
        expected = fn(*args, **kwargs)
    for _ in range(3):
        args, kwargs = given()
        assert_same(lazygt.apply(fn, *args, **kwargs), expected)


def test_applied_function_is_one_op_and_replays(s: lazygt.Session) -> None:
    def step() -> list[float]:
        x = values() + 1
        found: list[float] = lazygt.apply(lambda x: (x * 2 - 1).clamp(min=0), x).tolist()
        return found

    for _ in range(3):
        expected = step()
    built, asked = s.stats()["plans_built"], s.stats()["flushes"].get("data-dependent", 0)
    assert [step(), step()] == [expected, expected]
    assert s.stats()["plans_built"] == built
    assert s.stats()["flushes"].get("data-dependent", 0) == asked
    assert s.last_plan is not None
    ops = [node.op for node in s.last_plan.graph.nodes]
    assert sum(op.startswith("function.lambda.default@") for op in ops) == 1


def test_changed_closure_and_globals_are_seen(
    s: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [1.0]
    number = 1.0

    def around(x: Tensor) -> Tensor:
        return x * number + kept[0] + SCALE

    found = [lazygt.apply(around, torch.ones(1)) for _ in range(2)]
    number = 10.0
    found.append(lazygt.apply(around, torch.ones(1)))
    kept[0] = 100.0
    found.append(lazygt.apply(around, torch.ones(1)))
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1000.0)
    found.append(lazygt.apply(around, torch.ones(1)))
    number = 1.0
    found.append(lazygt.apply(around, torch.ones(1)))
    assert [x.item() for x in found] == [4.0, 4.0, 13.0, 112.0, 1110.0, 1101.0]


@pytest.mark.parametrize("by_values", [False, True])
def test_gradients_flow_through_applied_function(s: lazygt.Session, by_values: bool) -> None:
    def noisy(x: Tensor, w: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        if by_values:
            assert x.sum().item() < 100  # refused where shapes are learnt
        return (x * w * torch.rand(4)).sin(), (w > 0)

    def run(apply: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(7)
        x, w, unused = (values().requires_grad_(), values().requires_grad_(),
                        values().requires_grad_())  # fmt: skip
        out, flags = apply(noisy, x * 1, w, unused)
        assert not flags.requires_grad
        ((out * 3).sum() + torch.rand(()) * x.sum()).backward()
        assert x.grad is not None
        assert w.grad is not None
        return [out.detach(), flags, x.grad, w.grad, torch.rand(2)]

    found = [t.cpu() for t in run(lazygt.apply)]
    with torch.device("cpu"):
        expected = run(lambda fn, *args: fn(*args))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_exception_of_function_names_its_line(s: lazygt.Session) -> None:
    def fails(x: Tensor) -> Tensor:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there") as caught:
        lazygt.apply(fails, values())
    assert isinstance(caught.value, lazygt.ExecutionError)
    assert (caught.value.op, caught.value.where.rpartition(":")[0]) == (
        "function.fails.default", __file__)  # fmt: skip
    assert values().sum().item() == 3


def test_write_to_argument_is_refused(s: lazygt.Session) -> None:
    x = values()
    made = lazygt.apply(lambda x: x.add_(1), x)
    with pytest.raises(RuntimeError, match="has written into its tensor argument 0"):
        made.tolist()
    assert x.tolist() == [1, -2, 2, 2]


def doubled_in_place(x: Tensor) -> Tensor:
    x.numpy().__imul__(2)  # torch does not see it
    return x.sum()


def emptied_when_large(x: Tensor) -> Tensor:
    return x.zero_() if x.sum() > 10 else x + 1


def test_in_place_writes_of_function_stay_local(s: lazygt.Session) -> None:
    x, large = values(), values() + 5
    for _ in range(3):
        assert lazygt.apply(doubled_in_place, x).tolist() == 6
    assert x.tolist() == [1, -2, 2, 2]
    assert lazygt.apply(emptied_when_large, x).tolist() == [2, -1, 3, 3]
    with pytest.raises(RuntimeError, match="has written into its tensor argument 0"):
        lazygt.apply(emptied_when_large, large).tolist()
    assert large.tolist() == [6, 3, 7, 7]


def test_a_lazy_tensor_is_an_argument_and_no_part_of_the_code(s: lazygt.Session) -> None:
    w = values()
    with pytest.raises(lazygt.CodeError, match=r"lazygt tensor \(\[4\], torch.float32\)"):
        lazygt.apply(lambda x: x + w, values())
    with pytest.raises(RuntimeError, match=r"move it with .to\('lazygt'\)"):
        lazygt.apply(torch.add, values(), torch.ones(4, device="cpu"))


def test_unserializable_result_is_refused(s: lazygt.Session) -> None:
    with pytest.raises(TypeError, match="returned a set; what workers return are"):
        lazygt.apply(lambda x: {1, int(x.sum())}, values())
    assert values().sum().item() == 3


def test_function_takes_full_value_of_sharded_tensor() -> None:
    from torch.distributed.tensor import Shard

    with lazygt.session(workers=2):
        x = lazygt.distribute(torch.arange(6.0), [Shard(0)])
        with pytest.warns(
            lazygt.GatherWarning, match=r"^function\.lambda\.default has no sharding"
        ):
            assert lazygt.apply(lambda x: x.cumsum(0), x).tolist() == [0, 1, 3, 6, 10, 15]


def test_dry_session_does_not_run_function() -> None:
    def never(x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise AssertionError("it has values")
        return x[:2]

    with lazygt.session(launcher="dry"):
        assert lazygt.apply(never, values()).shape == (2,)
        assert lazygt.apply(never, values()).sum().item() == 0


def test_changed_function_attributes_are_seen(s: lazygt.Session) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * vars(scaled)["factor"]

    found = []
    for factor in (2.0, 3.0):
        vars(scaled)["factor"] = factor
        found.append(lazygt.apply(scaled, torch.ones(1)).item())
    assert found == [2.0, 3.0]


def test_none_in_the_place_of_a_tensor_is_another_call(s: lazygt.Session) -> None:
    def either(a: Tensor | None, b: Tensor | None) -> Tensor:
        if a is None or b is None:
            return b - 1 if b is not None else a + 1
        return a * 10 + b

    one, five = torch.ones(1), torch.full((1,), 5.0)
    calls = [(one, None), (one, five), (None, five)]
    assert [lazygt.apply(either, *call).item() for call in calls] == [2.0, 15.0, 4.0]


def test_a_name_that_is_bound_later_may_stand_in_it(s: lazygt.Session) -> None:
    def first(x: Tensor) -> Tensor:
        return second(x) if x.dim() > 1 else x + 1

    assert lazygt.apply(first, torch.ones(1)).item() == 2

    def second(x: Tensor) -> Tensor:
        return x.sum()

    assert lazygt.apply(first, torch.ones(1, 1)).item() == 1
