"""What passes want to know of sizes they ask, and what they asked is asked again in other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazygt.graph import Graph
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node
from lazygt.graph.sizes import MIN_SYMBOLIC_SIZE, Resize, size_positions
from lazygt.passes import PIPELINE, Pass, cse, fold, foreach, fuse, guards, lifetime, run_passes
from lazygt.passes.guards import fits, guard, recorded_guards
from tests.passes.sized import SIZED, SIZES, layer, recorded
from tests.passes.tools import difference, graph_of
from tests.property.programs import Step

#: Those whose passes ask.
ASKING = (cse, fold, foreach, fuse, lifetime)


class Undeclared(AssertionError):
    """A pass has looked at a size without asking."""


class Veil:
    """Whether sizes may be looked at."""

    lifted = False

    @classmethod
    @contextmanager
    def lift(cls) -> Iterator[None]:
        before, cls.lifted = cls.lifted, True
        try:
            yield
        finally:
            cls.lifted = before


class VeiledSize(int):
    """A size that may be compared with another for equality, and with 0 and 1."""

    def __eq__(self, other: object) -> bool:
        literal = type(other) is int and other >= MIN_SYMBOLIC_SIZE
        return bool(_seen(self, other, "__eq__") if literal else int.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _seen(size: int, other: Any, name: str) -> Any:
    if not Veil.lifted:
        raise Undeclared(f"{name} of a size")
    return getattr(int, name)(size, other)


for _name in ("lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv",
              "rfloordiv", "mod", "rmod", "truediv", "rtruediv"):  # fmt: skip
    setattr(VeiledSize, f"__{_name}__",
            lambda size, other, name=f"__{_name}__": _seen(size, other, name))  # fmt: skip


def _veiled(name: str) -> Any:
    def get(meta: Any) -> Any:
        if not Veil.lifted:
            raise Undeclared(f"{name} of a tensor")
        return meta.__dict__[name]

    return property(get, lambda meta, value: meta.__dict__.__setitem__(name, value))


class VeiledMeta(TensorMeta):
    """A meta whose sizes, and what follows from them, may only be asked about."""

    numel = _veiled("numel")
    nbytes = _veiled("nbytes")
    plain = _veiled("plain")

    @property
    def extent(self) -> int:
        return TensorMeta.extent.fget(self)  # type: ignore[attr-defined]

    def is_contiguous(self) -> bool:
        if not Veil.lifted:
            raise Undeclared("strides of a tensor")
        return super().is_contiguous()


def size(number: int) -> int:
    return VeiledSize(number) if number >= MIN_SYMBOLIC_SIZE else number


def arg(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(arg, value))
    return size(value) if type(value) is int else value


def veil(graph: Graph) -> Graph:
    """The same graph, with every size veiled."""
    metas: dict[int, Any] = {}

    def meta(shown: TensorMeta | None) -> Any:
        if shown is not None and id(shown) not in metas:
            metas[id(shown)] = VeiledMeta(arg(shown.shape), arg(shown.stride), shown.dtype,
                                          size(shown.offset), shown.conj, shown.neg)  # fmt: skip
        return None if shown is None else metas[id(shown)]

    def node(shown: Node) -> Node:
        places = size_positions(shown.op)
        args = [arg(a) if place in places else a for place, a in enumerate(shown.args)]
        kwargs = [(name, arg(a) if name in places else a) for name, a in shown.kwargs]
        return Node(shown.op, tuple(args), tuple(kwargs), tuple(map(meta, shown.fresh)),
                    shown.writes, tuple(map(meta, shown.written)), shown.dynamic)  # fmt: skip

    with Veil.lift():
        return Graph(tuple(map(meta, graph.inputs)), graph.params, tuple(map(node, graph.nodes)),
                     graph.outputs, graph.lines, graph.origins)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def questions_lift_the_veil() -> Iterator[None]:
    def lifting(predicate: Any, *metas: TensorMeta, constants: tuple[Any, ...] = ()) -> Any:
        with Veil.lift():
            return guard(predicate, *metas, constants=constants)

    with pytest.MonkeyPatch.context() as patch:
        for module in ASKING:
            patch.setattr(module, "guard", lifting)
        yield


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(st.lists(SIZED, min_size=3, max_size=25), SIZES, SIZES)
def test_passes_look_at_no_size_unasked(program: list[Step], rows: int, columns: int) -> None:
    for graph in recorded(program, min(rows, 64), min(columns, 64)):
        shown = run_passes(veil(graph), PIPELINE)
        with Veil.lift():
            wanted = run_passes(graph, PIPELINE)
            assert str(shown) == str(wanted), difference(str(wanted), str(shown))


class Peeks:
    """A pass that breaks the rule."""

    name = "peeks"

    def __init__(self, look: Any) -> None:
        self.look = look

    def run(self, graph: Graph) -> Graph:
        return graph if self.look(graph.inputs[0]) else Graph((), (), (), ())


@pytest.mark.parametrize(
    "look",
    [
        lambda meta: meta.nbytes > 4096,
        lambda meta: meta.numel % 2,
        lambda meta: meta.shape[0] > 100,
        lambda meta: meta.shape[0] * 4,
        lambda meta: meta.shape[1] == 512,
        lambda meta: meta.is_contiguous(),
        lambda meta: meta.extent,
        lambda meta: 512 in meta.shape,
    ],
)
def test_a_pass_that_looks_without_asking_is_found(look: Any) -> None:
    one: Pass = Peeks(look)
    with pytest.raises(Undeclared):
        one.run(veil(layer(48)))


def test_comparisons_with_equal_zero_and_one_are_allowed() -> None:
    looks = (
        lambda meta: meta.shape[0] != meta.shape[1],
        lambda meta: 0 not in meta.shape,
        lambda meta: meta.shape[0] != 1 and meta.offset == 0,
        lambda meta: meta == meta,
    )
    for look in looks:
        Peeks(look).run(veil(layer(48)))


# -- notes -------------------------------------------------------------------------------------


def meta(text: str) -> TensorMeta:
    return graph_of(f"%0: {text} = input\nreturn %0").inputs[0]


def test_answers_hold_for_sizes_giving_same_answers() -> None:
    with recorded_guards() as asked:
        assert guard(fits, meta("f32[20, 30]"), constants=(4096,))
        assert guard(fits, meta("f32[20, 30]"), constants=(4096,))
        assert not guard(fits, meta("f32[200, 30]"), constants=(4096,))
    assert len(asked) == 2

    def resize(*sizes: int) -> Resize:
        return Resize(dict(zip((20, 30, 200), sizes, strict=True)))

    assert asked.hold(resize(34, 30, 200))
    assert not asked.hold(resize(35, 30, 200))
    assert not asked.hold(resize(20, 30, 34))


def test_an_answer_about_an_unknown_size_holds_nowhere() -> None:
    with recorded_guards() as asked:
        guard(fits, meta("f32[7, 30]"), constants=(4096,))
    assert not asked.hold(Resize({20: 20, 30: 31}))


def test_nobody_notes_outside_of_a_block() -> None:
    with recorded_guards() as asked:
        pass
    guard(fits, meta("f32[7]"), constants=(4096,))
    assert not asked
    assert guards._RECORDING.get() is None
