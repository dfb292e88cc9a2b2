"""Ops that torch alone does not have: the workers learn them, from a module or from their code."""

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lazygt
from lazygt.record.custom import registry
from lazygt.runtime import custom_ops, wire

SETTINGS: list[dict[str, Any]] = [{"launcher": "inline"}, {"workers": 1}, {"workers": 2}]
FACTOR = 2.0


# Without a spec no worker is thought to be able to import this: what it defines travels as code.
__spec__ = None


@torch.library.custom_op("lazygt_tests::scale", mutates_args=())
def scale(x: Tensor, by: float, how: str = "up") -> Tensor:
    values = x.numpy() * by if how == "up" else x.numpy() / by
    return torch.from_numpy(values.astype(np.float32)) * FACTOR


@scale.register_fake
def _(x: Tensor, by: float, how: str = "up") -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by, ctx.how = inputs[1], inputs[2]


scale.register_autograd(
    lambda ctx, grad: (torch.ops.lazygt_tests.scale(grad, ctx.by, ctx.how), None, None),
    setup_context=_keep,
)


@torch.library.custom_op("lazygt_tests::distinct", mutates_args=())
def distinct(x: Tensor) -> Tensor:
    return torch.from_numpy(np.unique(x.numpy()))


@torch.library.custom_op("lazygt_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    return x.new_ones(int((x > 0).sum()))


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("lazygt_tests::add_all_", mutates_args={"targets"})
def add_all_(targets: list[Tensor], by: Tensor, times: float) -> None:
    for target in targets:
        target.add_(by * times)


@torch.library.custom_op("lazygt_tests::pair", mutates_args={"seen"})
def pair(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    seen.add_(1)
    return x + seen, (x * FACTOR).to(torch.int64)


@pair.register_fake
def _(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape, dtype=torch.int64)


@torch.library.custom_op("lazygt_tests::parts", mutates_args=())
def parts(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [part.clone() for part in x.split(sizes)]


@parts.register_fake
def _(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [x.new_empty(size, *x.shape[1:]) for size in sizes]


@torch.library.custom_op("lazygt_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


LIBRARY = torch.library.Library("lazygt_tests", "FRAGMENT")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: torch.ops.lazygt_tests.scale(x, 1.0), "CPU")
LIBRARY.define("head(Tensor(a) x, int n) -> Tensor(a)")
LIBRARY.impl("head", lambda x, n: x[:n], "CompositeExplicitAutograd")
torch.library.register_fake("lazygt_tests::head", lambda x, n: x[:n], lib=LIBRARY)
LIBRARY.define("fill_(Tensor(a!) x, Scalar value) -> Tensor(a!)")
LIBRARY.impl("fill_", lambda x, value: x.fill_(value), "CPU")
LIBRARY.define("same(Tensor x) -> Tensor")
LIBRARY.impl("same", lambda x: x, "CPU")
LIBRARY.define("count(Tensor x) -> int")
LIBRARY.impl("count", lambda x: int(x.sum()), "CPU")
LIBRARY.define("both(Tensor x) -> Tensor")
LIBRARY.impl("both", lambda x: x.sin() + x.cos(), "CompositeImplicitAutograd")
ops = torch.ops.lazygt_tests


@pytest.fixture(params=SETTINGS, ids=["inline", "worker", "workers"], scope="module")
def s(request: pytest.FixtureRequest) -> Iterator[lazygt.Session]:
    with lazygt.session(**request.param) as session:
        yield session


def values() -> Tensor:
    return torch.tensor([1.0, -2.0, 2.0, 2.0])


def _mutated() -> list[Tensor]:
    one, other = values(), values()
    add_all_([one, other[1:3]], values()[0], 2.0)
    return [one, other]


def _written() -> list[Tensor]:
    x, seen = values(), torch.zeros(4)
    first, second = pair(x, seen)
    third, _ = pair(first, seen)
    return [first, second, third, seen]


def _viewed() -> list[Tensor]:
    x = values()
    top = ops.head(x, 2)
    top.mul_(3)
    x.add_(1)
    return [x, top, top + 1]


def _filled() -> list[Tensor]:
    x = values()
    out = ops.fill_(x[1:], 7)
    return [x, out]


def _not_the_same() -> list[Tensor]:
    x = values()
    same = ops.same(x) * 1
    x.add_(1)
    return [x, same]


def _trained() -> list[Tensor]:
    x = values().requires_grad_()
    (scale(x, 3.0).pow(2).sum() + scale(x, 2.0, "down").sum()).backward()
    assert x.grad is not None
    return [x.grad]


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    "fresh": lambda: [scale(values(), 1.5), scale(values(), 2.0, "down")],
    "autograd": _trained,
    "no fake kernel": lambda: [distinct(values()), distinct(values() + 1).cumsum(0)],
    "data-dependent": lambda: [counted(values()) * 3],
    "writes a list": _mutated,
    "writes and returns": _written,
    "list": lambda: [part * 2 for part in parts(values(), [1, 3])],
    "one op in another": lambda: [ops.twice(values())],
    "view": _viewed,
    "in place": _filled,
    "its own input": _not_the_same,
    "number": lambda: [torch.tensor(ops.count(values()) + 1)],
    "composite": lambda: [ops.both(values())],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_custom_op_matches_eager_torch(s: lazygt.Session, name: str) -> None:
    program = PROGRAMS[name]
    with torch.device("cpu"):
        expected = program()
    for _ in range(3):  # the interpreter, generated code, and that again
        found = program()
        assert all(t.device.type == "lazygt" or t.dim() == 0 for t in found)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


def test_replays_build_no_plan_and_a_changed_global_is_seen(
    s: lazygt.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> list[float]:
        found: list[float] = scale(torch.ones(2), 1.0).tolist()
        return found

    for _ in range(3):
        assert step() == [2, 2]
    built = s.stats()["plans_built"]
    for _ in range(5):
        assert step() == [2, 2]
    assert s.stats()["plans_built"] == built
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    first = scale(torch.ones(2), 1.0)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2.0)
    assert (step(), first.tolist()) == ([2, 2], [5, 5])


def test_every_call_is_run_and_draws_from_the_one_stream(s: lazygt.Session) -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(3)
        noise(values())  # nobody reads it, and it draws all the same
        return [noise(values()), noise(values()), torch.rand(2)]

    found = [t.cpu() for t in program()]
    with torch.device("cpu"):
        expected = program()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_numbers_that_differ_in_type_or_bits_are_other_calls(s: lazygt.Session) -> None:
    zero = torch.zeros(1)
    found = [scale(zero + 1, by).tolist()[0] for by in (0.0, -0.0, 1.0, float("nan"), 0.0)]
    assert [str(x) for x in found] == ["0.0", "-0.0", "2.0", "nan", "0.0"]


def test_an_op_defined_anew_is_the_new_one_and_the_old_one_goes(s: lazygt.Session) -> None:
    def define(by: int) -> Any:
        @torch.library.custom_op("lazygt_tests::anew", mutates_args=())
        def anew(x: Tensor) -> Tensor:
            return x * by

        anew.register_fake(lambda x: torch.empty_like(x))
        return anew

    first = define(2)(torch.ones(2))
    second = define(3)(torch.ones(2))
    third = define(2)(torch.ones(2))
    assert (second.tolist(), first.tolist(), third.tolist()) == ([3, 3], [2, 2], [2, 2])


def test_a_fake_kernel_that_comes_later_is_used(s: lazygt.Session) -> None:
    @torch.library.custom_op("lazygt_tests::later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        return x + 1

    def asks() -> int:
        before = s.stats()["flushes"].get("data-dependent", 0)
        later(torch.ones(2))
        return s.stats()["flushes"].get("data-dependent", 0) - before

    assert [asks(), asks()] == [1, 1]
    later.register_fake(lambda x: torch.empty_like(x))
    assert [asks(), asks()] == [0, 0]


# -- what goes wrong -------------------------------------------------------------------------


def test_exception_of_custom_op_keeps_its_type(s: lazygt.Session) -> None:
    @torch.library.custom_op("lazygt_tests::fails", mutates_args=())
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError("not by this")

    with pytest.raises(ZeroDivisionError, match="not by this") as caught:  # no fake kernel: at once
        fails(torch.ones(2))
    assert isinstance(caught.value, lazygt.ExecutionError)
    assert caught.value.op == "lazygt_tests.fails.default"
    fails.register_fake(lambda x: torch.empty_like(x))
    made = fails(torch.ones(2))
    with pytest.raises(ZeroDivisionError, match="not by this"):
        made.tolist()
    assert torch.ones(2).tolist() == [1, 1]


def test_a_wrong_fake_kernel_is_said(s: lazygt.Session) -> None:
    @torch.library.custom_op("lazygt_tests::wrong", mutates_args=())
    def wrong(x: Tensor) -> Tensor:
        return x[:1].clone()

    wrong.register_fake(lambda x: torch.empty_like(x))
    made = wrong(torch.ones(2))
    with pytest.raises(lazygt.GraphError, match=r"its fake kernel promised f32\[2\].*f32\[1\]"):
        made.tolist()
    assert torch.ones(2).tolist() == [1, 1]


def test_fake_kernel_error_is_raised_at_call(s: lazygt.Session) -> None:
    def check(x: Tensor) -> Tensor:
        torch._check(x.dim() == 2, lambda: "give me a matrix")
        return torch.empty_like(x)

    @torch.library.custom_op("lazygt_tests::matrix", mutates_args=())
    def matrix(x: Tensor) -> Tensor:
        return x.clone()

    matrix.register_fake(check)
    with pytest.raises(RuntimeError, match="give me a matrix") as caught:
        matrix(torch.ones(2))
    assert not isinstance(caught.value, lazygt.ExecutionError)


def test_unpicklable_op_is_refused_at_call(s: lazygt.Session) -> None:
    held = open(__file__)  # noqa: SIM115 - closed below
    tensor = torch.ones(3)

    @torch.library.custom_op("lazygt_tests::holds", mutates_args=())
    def holds(x: Tensor) -> Tensor:
        return x * len(held.read()) if x.sum() > 3 else x + tensor

    with held, pytest.raises(lazygt.CodeError, match="can't be brought to the workers") as caught:
        holds(torch.ones(2))
    assert caught.value.name == "lazygt_tests.holds.default"
    assert __name__ in caught.value.module
    assert torch.ones(2).tolist() == [1, 1]


def test_no_code_is_sent_where_that_is_forbidden() -> None:
    with lazygt.session(launcher="inline", workers=lazygt.Workers(ship_code=False)):
        with pytest.raises(lazygt.CodeError, match=r"lazygt_tests\.scale\.default \(defined in "):
            scale(torch.ones(2), 1.0)
        with pytest.raises(lazygt.CodeError, match=r"ship_code=False"):
            lazygt.apply(torch.sin, torch.ones(2))
        assert torch.ones(2).tolist() == [1, 1]


def test_a_worker_takes_no_code_where_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    data = custom_ops.encode([made("f.g.default", b"pickled")])
    with pytest.raises(lazygt.ProtocolError, match="ship_code=False"):
        custom_ops.load_ops(data, torch.device("cpu"), takes_code=False)


# -- modules ---------------------------------------------------------------------------------


MODULE = """
    import os
    import torch

    if os.environ.get("LAZYGT_WORKER") == "1" and {breaks}:
        raise OSError("only the client has this")

    KEPT = [0]

    @torch.library.custom_op("{name}::f", mutates_args=())
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * int(os.environ.get("LAZYGT_WORKER", "0") + "{by}") + KEPT[0]

    f.register_fake(lambda x: torch.empty_like(x))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes a module, only where this process looks for modules, and imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def write(name: str, text: str = MODULE, **given: Any) -> Any:
        text = text.format(**{"name": name, "by": 3, "breaks": False} | given)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_a_worker_imports_the_module_that_defines_an_op(module: Callable[..., Any]) -> None:
    found = module("lazygt_test_module")
    with lazygt.session(workers=lazygt.Workers(1, ship_code=False)) as s:
        assert found.f(torch.ones(2)).tolist() == [13, 13]  # the worker's module: "1" + "3"
        assert s.last_plan is not None
        assert "lazygt_test_module.f.default@lazygt_test_module" in str(s.last_plan)
        y = torch.ops.lazygt_test_module.f(torch.ones(2)) + 1
        assert y.tolist() == [14, 14]


def test_a_module_that_fails_on_the_worker_is_said_and_the_session_goes_on(
    module: Callable[..., Any],
) -> None:
    found = module("lazygt_broken_module", breaks=True)
    with lazygt.session(workers=1):
        made, other = found.f(torch.ones(2)), torch.ones(2) + 1
        for _ in range(2):
            with pytest.raises(lazygt.CodeError) as caught:
                made.tolist()
        for word in ("lazygt_broken_module.f.default", "importing lazygt_broken_module failed",
                     "OSError: only the client has this", __file__):  # fmt: skip
            assert word in str(caught.value)
        assert other.tolist() == [2, 2]
        with pytest.raises(lazygt.CodeError):
            found.f(torch.ones(3)).tolist()
        assert (other + 1).tolist() == [3, 3]


EXITING = """
    import os, sys

    if os.environ.get("LAZYGT_WORKER") == "1":
        sys.exit(3)

    def doubled(x):
        return x * 2
"""


def test_exit_during_import_on_worker_is_code_error(
    module: Callable[..., Any],
) -> None:
    found = module("lazygt_exiting_module", EXITING)
    with lazygt.session(workers=1):
        with pytest.raises(lazygt.CodeError, match="SystemExit: 3"):
            lazygt.apply(lambda x: found.doubled(x), torch.ones(2)).tolist()
        assert (torch.ones(2) + 1).tolist() == [2, 2]


def test_a_module_loaded_again_is_sent_as_it_is_now(
    module: Callable[..., Any], tmp_path: Path
) -> None:
    found = module("lazygt_again_module")
    with lazygt.session(workers=1):
        assert found.f(torch.ones(2)).tolist() == [13, 13]
        path = tmp_path / "lazygt_again_module.py"
        path.write_text(path.read_text().replace('"3"', '"44"'))
        importlib.reload(found)
        assert found.f(torch.ones(2)).tolist() == [144, 144]
        found.KEPT[0] = 6
        assert found.f(torch.ones(2)).tolist() == [150, 150]


LIBRARY_SOURCE = """
    #include <torch/library.h>
    at::Tensor copied(const at::Tensor& x) { return x.clone(); }
    TORCH_LIBRARY(lazygt_cpp, m) { m.def("copied(Tensor x) -> Tensor"); }
    TORCH_LIBRARY_IMPL(lazygt_cpp, CPU, m) { m.impl("copied", &copied); }
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_worker_loads_the_library_that_defines_an_op(tmp_path: Path) -> None:
    source, library = tmp_path / "op.cpp", tmp_path / "libop.so"
    source.write_text(LIBRARY_SOURCE)
    torch_at = Path(torch.__file__).parent
    subprocess.run(
        ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library),
         f"-I{torch_at}/include", f"-L{torch_at}/lib", "-ltorch_cpu", "-lc10"],
        check=True,
    )  # fmt: skip
    torch.ops.load_library(str(library))
    with lazygt.session(workers=1):
        x = values()
        assert torch.ops.lazygt_cpp.copied(x).tolist() == [1, -2, 2, 2]
        assert lazygt.apply(lambda x: torch.ops.lazygt_cpp.copied(x), x).tolist() == [1, -2, 2, 2]
    with lazygt.session(workers=lazygt.Workers(1, ship_code=False)):
        assert torch.ops.lazygt_cpp.copied(values()).tolist() == [1, -2, 2, 2]


TRITON = """
    import torch, lazygt, triton
    import triton.language as tl

    @triton.jit
    def kernel(p, o, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(o + i, tl.load(p + i, mask=i < n) * 2, mask=i < n)

    @torch.library.triton_op("lazygt_triton::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[(1,)](x, out, x.numel(), 16)
        return out

    def outcome():
        try:
            return double(torch.arange(4.0, device=device)).tolist()
        except RuntimeError as error:
            return getattr(error, "detail", str(error))  # without a GPU: there is no driver

    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = outcome()
    with lazygt.session(workers=1) as s:
        device = None
        assert outcome() == eager, (outcome(), eager)
        assert torch.ones(2).tolist() == [1, 1]
        assert s.stats()["flushes"].get("data-dependent", 0) == 0
"""


@pytest.mark.slow
def test_a_triton_kernel_of_a_script_is_made_anew_on_the_worker(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(TRITON))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- the message -----------------------------------------------------------------------------


def made(title: str, text: bytes = b"", **given: Any) -> Any:
    name = f"{title}@{custom_ops.code_name(text) if text else 'm'}"
    schema = f"{title.split('.')[0]}::{title.split('.')[1]}(Tensor x) -> Tensor"
    return custom_ops.Definition(name, schema, code=text, **given).op()


def test_definitions_travel_as_they_are() -> None:
    sent = [made("f.g.default", b"text"), made("f.h.default", modules=("m",), tags=())]
    found = custom_ops.decode(custom_ops.encode(sent))
    assert list(found.ops) == [op.definition for op in sent]
    assert set(found.path) >= {p for p in sys.path if p.startswith("/")}
    assert custom_ops.encode([]) == b""


@pytest.mark.parametrize(
    "value",
    [
        3, (), ((), 3), (("p",), [()]), ((3,), []),
        ((), [("f.g.default@m", "no schema", (), (), (), b"")]),
        ((), [("f.g.default@m", "f::g(Tensor x) -> Tensor", ("no tag",), (), (), b"")]),
        ((), [("f.g.default@m", "f::g(Tensor x) -> Tensor", (), (3,), (), b"")]),
        ((), [("f.g.default@0123456789abcdef", "f::g(Tensor x) -> Tensor", (), (), (), b"other")]),
        ((), [(3, "f::g(Tensor x) -> Tensor", (), (), (), b"")]),
    ],
)  # fmt: skip
def test_nonsense_is_one_error(value: Any) -> None:
    with pytest.raises(lazygt.ProtocolError):
        custom_ops.load_ops(wire.pack(value), torch.device("cpu"), takes_code=True)


def test_torchs_libraries_are_its_own_behind_a_symbolic_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a linked virtual environment: the kernel lists libraries by their true paths."""
    link = tmp_path / "torch"
    link.symlink_to(os.path.dirname(torch.__file__))
    monkeypatch.setattr(registry, "_TORCH", f"{link}{os.sep}")
    registry._torchs_libraries.cache_clear()
    try:
        assert registry.libraries_with("_c10d_functional", "all_reduce") == ()
    finally:
        registry._torchs_libraries.cache_clear()
