"""Builder: one rank's graph, written node by node; every result's meta is inferred.

Ranks of an axis get graphs of their own, since their blocks may differ in size. They meet in the
same collectives in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lazygt.errors import GraphError
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Arg, Graph, Node, Param, Ref, map_arg, ref
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, overload, writing_facts
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PUT_ROWS,
    REDUCE_SCATTER,
    REPLICATE_TO_PARTIAL,
    SEND_RECV,
    SHARD,
    TAKE_ROWS,
    Cut,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    around,
    block_size,
    group_sizes,
    groups,
    shard_bounds,
    uneven,
    whole_groups,
)
from lazygt.graph.shapes import Shapes
from lazygt.graph.shapes.meta_run import run_on_metas
from lazygt.graph.shapes.rules import Results
from lazygt.passes.sharding.halo import RowExchange, rows_between

# -- a node's arguments: by name, with other operands, with some changed ---------------------------


@lru_cache(maxsize=4096)
def schema(op: str) -> tuple[tuple[str, bool, Any], ...]:
    """Return (name, keyword only, default) of each argument of an overload."""
    return tuple(
        (a.name, a.kwarg_only, _frozen(a.default_value) if a.has_default_value() else None)
        for a in overload(op)._schema.arguments
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def bound(node: Node) -> dict[str, Arg]:
    """Return arguments by name, those given first and in the node's order, as in refs()."""
    arguments = schema(node.op)
    named = {name: arg for (name, _, _), arg in zip(arguments, node.args, strict=False)}
    named.update(node.kwargs)
    for name, _, default in arguments:
        named.setdefault(name, default)
    return named


def tuples(arg: Any) -> Arg:
    """Return lists as tuples, as nodes hold them."""
    return tuple(map(tuples, arg)) if isinstance(arg, (list, tuple)) else arg


def numbers(arg: Arg) -> list[int]:
    """Return the numbers of the values inside an argument, in order, with repeats."""
    if type(arg) is Ref:
        return [arg.index]
    return [n for item in arg for n in numbers(item)] if type(arg) is tuple else []


def written_by(
    f: OpFacts, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> tuple[int, ...]:
    """Return the numbers of the values that a call writes."""
    named = dict(kwargs)
    targets = [args[i] for i in f.writes if i < len(args)]
    targets += [named[name] for name in f.writes_named if name in named]
    return tuple(numbers(tuple(targets)))


def with_operands(
    node: Node, operands: Sequence[Ref]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Return the arguments and keywords of ``node`` with other values, in order of refs()."""
    rest = iter(operands)

    def leaf(arg: Arg) -> Arg:
        return next(rest) if type(arg) is Ref else arg

    args = map_arg(node.args, leaf)
    return args, tuple([(name, map_arg(arg, leaf)) for name, arg in node.kwargs])


def changed(
    op: str,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    changes: Mapping[str, Any],
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Replace arguments by name; those left out before them get their defaults."""
    places, named = list(args), dict(kwargs)
    for number, (name, keyword_only, default) in enumerate(schema(op)):
        if keyword_only:
            if name in changes:
                named[name] = tuples(changes[name])
        elif number < len(places):
            places[number] = tuples(changes.get(name, places[number]))
        elif any(later in changes for later, only, _ in schema(op)[number:] if not only):
            places.append(tuples(changes.get(name, default)))
    return tuple(places), tuple(named.items())


# -- one rank's graph ------------------------------------------------------------------------------

#: A run-time number of each kind: metas depend on the kind alone.
_SAMPLES: dict[str, Any] = {"float": 1.0, "int": 1, "bool": True, "complex": 1j}
_LIMIT = 20_000
_seen: OrderedDict[Any, Results | None] = OrderedDict()
_shapes = Shapes()


class Builder:
    """Graph of rank ``index`` of ``parts`` on mesh axis ``axis``.

    Attributes:
        nodes: written so far.
        metas: the meta of every value so far.
        differs: whether another rank of the axis may get another graph: it has a block of another
            size, or ``index`` was read.
    """

    def __init__(
        self,
        inputs: Sequence[TensorMeta],
        params: Sequence[str] = (),
        *,
        axis: str,
        parts: int,
        index: int,
        device_type: str = "cpu",
    ) -> None:
        self.inputs, self.params = tuple(inputs), tuple(params)
        self.axis, self.parts, self._index = axis, parts, index
        self.differs = False
        self.nodes: list[Node] = []
        self.metas: list[TensorMeta | None] = list(inputs)
        self._device_type = device_type
        self._samples = [_SAMPLES[kind] for kind in self.params]

    @property
    def index(self) -> int:
        """The rank's number on the axis."""
        self.differs = True
        return self._index

    @index.setter
    def index(self, index: int) -> None:
        self._index = index

    @property
    def rank(self) -> tuple[str, int, int]:
        """(axis, ranks of it, number of this rank): a cache key."""
        return self.axis, self.parts, self._index

    def beside(self, inputs: Sequence[TensorMeta], params: Sequence[str] = ()) -> Builder:
        """Return another graph of the same rank, with nothing in it."""
        return Builder(inputs, params, axis=self.axis, parts=self.parts, index=self._index,
                       device_type=self._device_type)  # fmt: skip

    def graph(self, outputs: Sequence[Ref]) -> Graph:
        """Return the graph that was written."""
        return Graph(self.inputs, self.params, tuple(self.nodes), tuple(o.index for o in outputs))

    def meta(self, value: Ref) -> TensorMeta:
        """Return the local meta of a value."""
        meta = self.metas[value.index]
        assert meta is not None, f"%{value.index} is an undefined tensor"
        return meta

    def shape(self, value: Ref) -> tuple[int, ...]:
        """Return the local shape of a value."""
        return self.meta(value).shape

    def bounds(self, size: int) -> tuple[int, int]:
        """Return start and stop of this rank's block of a dim of global ``size``."""
        return shard_bounds(size, self.parts, self.index)

    def rank_offset(self, size: int) -> int:
        """Return the start of this rank's block of a dim of global ``size``."""
        return self.bounds(size)[0]

    def block(self, size: int) -> int:
        """Return the number of elements of this rank's block of a dim of global ``size``."""
        return block_size(size, self.parts, self.index if size % self.parts else 0)

    def local(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """Return the shape of this rank's part of a value of global ``shape``."""
        if not isinstance(placement, Cut):
            return shape
        size = shape[placement.dim]
        if uneven(placement):
            block = sum([self.block(group) for group in group_sizes(placement, size)])
        else:
            count = groups(placement)
            block = count * self.block(size // count)
        return (*shape[: placement.dim], block, *shape[placement.dim + 1 :])

    # aten ops

    def op(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Add a node; return its result, or a tuple of them when the op gives several.

        Raises:
            Exception: torch's own, when the op does not take such arguments.
        """
        values = self.node(name, tuples(args), tuple((k, tuples(v)) for k, v in kwargs.items()))
        return values[0] if len(values) == 1 else values

    def node(
        self,
        name: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        writing: bool = False,
    ) -> tuple[Ref | None, ...]:
        """Add a node; return all its results, the new versions of written values last.

        Args:
            writing: the op writes although its schema does not say so (``UNDECLARED_WRITES``).
        """
        function = overload(name)
        f = writing_facts(function) if writing else facts(function)
        results = self._infer(f, args, kwargs)
        if results is None:
            raise GraphError(f"{name}: its results' shapes depend on values; run it on whole ones")
        targets = written_by(f, args, kwargs)
        return self.add(Node(name, args, kwargs, results.fresh, targets, results.written))

    def rerun(self, node: Node, operands: Sequence[Ref], **changes: Any) -> tuple[Ref | None, ...]:
        """Add ``node``'s op on other operands, with some arguments changed by name."""
        if node.op.startswith("lazygt."):
            raise GraphError(f"{node.op} has no schema: its rule says how it runs on blocks")
        args, kwargs = with_operands(node, operands)
        if changes:
            args, kwargs = changed(node.op, args, kwargs, changes)
        writing = node.op in UNDECLARED_WRITES and bool(node.writes)
        return self.node(node.op, args, kwargs, writing)

    def bind(self, node: Node, operands: Sequence[Ref]) -> dict[str, Arg]:
        """Return ``node``'s arguments by name, with the local operands and defaults."""
        args, kwargs = with_operands(node, operands)
        arguments = schema(node.op)
        named = {name: default for name, _, default in arguments}
        named.update(zip(named, args, strict=False))
        named.update(kwargs)
        return named

    def full(self, shape: Sequence[int], value: Arg, like: Ref) -> Ref:
        """Add a new tensor with the dtype of ``like``."""
        dtype = self.meta(like).dtype
        filled: Ref = self.op("aten.full.default", tuple(shape), value, dtype=dtype, device=DEVICE)
        return filled

    def zero_like(self, number: Arg) -> bool | int | float | complex:
        """Return 0 of the kind of a number, written down or given at run time."""
        kind = self.params[number.index] if type(number) is Param else type(number).__name__
        zero: bool | int | float | complex = type(_SAMPLES[kind])(0)
        return zero

    def reshape(self, value: Ref, shape: Sequence[int]) -> Ref:
        """Return ``value`` in another shape: a view where its strides allow one."""
        try:
            viewed: Ref = self.op("aten.view.default", value, tuple(shape))
        except (RuntimeError, ValueError):  # torch's way to say that the strides do not fit
            viewed = self.op("aten._unsafe_view.default", self.contiguous(value), tuple(shape))
        return viewed

    def contiguous(self, value: Ref) -> Ref:
        """Return ``value`` in row-major memory."""
        if self.meta(value).plain:
            return value
        meta = self.meta(value)
        return self.restrided(value, contiguous_stride(meta.shape))

    def restrided(self, value: Ref, stride: Sequence[int]) -> Ref:
        """Return a copy of ``value`` in memory laid out as ``stride`` says."""
        meta = self.meta(value)
        memory = self.op("aten.empty_strided.default", meta.shape, tuple(stride),
                       dtype=meta.dtype, device=DEVICE)  # fmt: skip
        copy: Ref = self.op("aten.copy_.default", memory, value)
        return copy

    # collectives; see graph.placement

    def all_reduce(self, value: Ref, op: str = "sum") -> Ref:
        """Reduce the values of all ranks."""
        return self._collective(ALL_REDUCE, (value, op), self._resized(value, {}))

    def all_gather(self, value: Ref, dim: int, size: int) -> Ref:
        """Gather the blocks of all ranks, of ``size`` together along ``dim``."""
        return self._collective(ALL_GATHER, (value, dim, size), self._resized(value, {dim: size}))

    def reduce_scatter(self, value: Ref, dim: int, op: str = "sum") -> Ref:
        """Return this rank's block along ``dim`` of the reduced values."""
        meta = self._resized(value, {dim: self.block(self.shape(value)[dim])})
        return self._collective(REDUCE_SCATTER, (value, dim, op), meta)

    def all_to_all(self, value: Ref, split: int, concat: int, size: int) -> Ref:
        """Exchange blocks along ``concat``, of ``size`` together, for blocks along ``split``."""
        sizes = {split: self.block(self.shape(value)[split]), concat: size}
        meta = self._resized(value, sizes)
        return self._collective(ALL_TO_ALL, (value, split, concat, size), meta)

    def send_recv(self, value: Ref, dim: int, sent: tuple[tuple[int, int, int], ...]) -> Ref:
        """Exchange rows along ``dim`` with other ranks; return the received ones."""
        got = sum(count for _, target, count in sent if target == self.index)
        return self._collective(SEND_RECV, (value, dim, sent), self._resized(value, {dim: got}))

    def rows(self, value: Ref, move: RowExchange) -> Ref:
        """Return the rows that this rank is to have, of its own and of those that others send."""
        dim, come = move.dim, value
        if move.sent:
            given = [self.slice(value, dim, *rows) for rows in move.given(self.index) or [(0, 0)]]
            come = self.send_recv(self.joined(given, dim), dim, move.sent)
        pieces = [
            self.slice(value if is_here else come, dim, start, count)
            for is_here, start, count in move.places(self.index)
        ]
        return self.joined(pieces or [self.slice(value, dim, 0, 0)], dim)

    def slice(self, value: Ref, dim: int, start: int, count: int) -> Ref:
        """Return some rows of this rank's value."""
        if (start, count) == (0, self.shape(value)[dim]):
            return value
        rows: Ref = self.op("aten.slice.Tensor", value, dim, start, start + count)
        return rows

    def joined(self, pieces: Sequence[Ref], dim: int) -> Ref:
        """Concatenate pieces; return a single one as it is."""
        if len(pieces) == 1:
            return pieces[0]
        whole: Ref = self.op("aten.cat.default", tuple(pieces), dim)
        return whole

    def take_rows(self, value: Ref, index: Ref, rows: int, size: int) -> Ref:
        """Take rows of all blocks of a value, by a flat index; see ``graph.placement``."""
        meta = self.meta(value)
        shape = (self.meta(index).numel, *meta.shape[1:])
        picked = intern(shape, contiguous_stride(shape), meta.dtype)
        return self._collective(TAKE_ROWS, (value, index, rows, size), picked)

    def put_rows(
        self, value: Ref, index: Ref, given: Ref, rows: int, size: int, added: bool
    ) -> Ref:
        """Put, or add, all ranks' rows where a flat index says, into a value in blocks."""
        args = value, index, given, rows, size, added
        return self._collective(PUT_ROWS, args, self._resized(value, {}))

    def shard(self, value: Ref, dim: int) -> Ref:
        """Return this rank's block along ``dim`` of a value that every rank has."""
        meta = self._resized(value, {dim: self.block(self.shape(value)[dim])})
        return self._collective(SHARD, (value, dim), meta)

    def first(self, value: Ref) -> Ref:
        """Return ``value`` on rank 0 of the axis, zeros elsewhere."""
        return self._collective(REPLICATE_TO_PARTIAL, (value,), self._resized(value, {}))

    def convert(self, value: Ref, shape: Sequence[int], have: Placement, want: Placement) -> Ref:
        """Return ``value`` of global ``shape`` with another placement.

        Raises:
            GraphError: there is no way from the one to the other.
        """
        if have == want:
            return value
        if uneven(have) or uneven(want):
            return self._convert_uneven(value, tuple(shape), have, want)
        match have, want:
            case (StridedShard(), Replicate()) | (Replicate() | Partial(), StridedShard()):
                return self._reshard_strided(value, tuple(shape), have, want)
            case (StridedShard() as cut, (Shard() | StridedShard()) as wanted):
                return self._exchange_strided(value, tuple(shape), cut, wanted)
            case (Shard() as cut, StridedShard() as wanted):
                return self._exchange_strided(value, tuple(shape), cut, wanted)
            case StridedShard(), _:
                return self.convert(self.convert(value, shape, have, Replicate()), shape,
                                    Replicate(), want)  # fmt: skip
            case Replicate(), Shard(dim):
                return self.shard(value, dim)
            case Replicate(), Partial(op) if op in ("max", "min"):
                return value
            case Replicate(), Partial("sum"):
                return self.first(value)
            case Shard(dim), Shard(split):
                return self.all_to_all(value, split, dim, shape[dim])
            case Partial(op), Shard(dim):
                return self.reduce_scatter(value, dim, op)
            case Shard(dim), _:
                return self.convert(self.all_gather(value, dim, shape[dim]), shape,
                                    Replicate(), want)  # fmt: skip
            case Partial(op), _:
                return self.convert(self.all_reduce(value, op), shape, Replicate(), want)
        raise GraphError(f"no way from {have} to {want}")

    def _convert_uneven(
        self, value: Ref, shape: tuple[int, ...], have: Placement, want: Placement
    ) -> Ref:
        """Convert where either placement has groups of several sizes.

        Group by group, unless both cut the same dim.
        """
        if isinstance(have, Cut) and isinstance(want, Cut) and have.dim == want.dim:
            return self._exchange_strided(value, shape, have, want)
        cut = have if uneven(have) else want
        assert isinstance(cut, StridedShard)
        source, target = (Shard(cut.dim) if one == cut else one for one in (have, want))
        pieces, at = [], 0
        for size in group_sizes(cut, shape[cut.dim]):
            whole = (*shape[: cut.dim], size, *shape[cut.dim + 1 :])
            count = self.local(whole, source)[cut.dim]
            piece = self.slice(value, cut.dim, at, count)
            pieces.append(self.convert(piece, whole, source, target))
            at += count
        return self.joined(pieces, cut.dim)

    def _reshard_strided(
        self, value: Ref, shape: tuple[int, ...], have: Placement, want: Placement
    ) -> Ref:
        """Convert where either placement is interleaved.

        Its dim is viewed as three, one of them in blocks.
        """
        placement = have if isinstance(have, StridedShard) else want
        assert isinstance(placement, StridedShard)
        dim, (outer, inner) = placement.dim, around(placement)
        size = shape[dim] // groups(placement)
        grouped = (*shape[:dim], outer, size, inner, *shape[dim + 1 :])
        source, target = (Shard(dim + 1) if one == placement else one for one in (have, want))
        seen = self.reshape(value, self.local(grouped, source))
        moved = self.convert(seen, grouped, source, target)
        return self.reshape(moved, self.local(shape, want))

    def _exchange_strided(self, value: Ref, shape: tuple[int, ...], have: Cut, want: Cut) -> Ref:
        """Convert between two cuts, one of them interleaved.

        Each rank is sent the rows that it lacks. Where those are in many pieces, it goes by way of
        another dim, or of the whole if there is none.
        """
        strided = [cut for cut in (have, want) if isinstance(cut, StridedShard)]
        if len(strided) == 1 and (have.dim != want.dim or whole_groups(strided[0], self.parts)):
            return self._exchanged(value, shape, have, want)
        if have.dim == want.dim:
            move = rows_between(have, want, shape[have.dim], self.parts)
            if move is not None:
                return self.rows(value, move)
        others = [d for d, size in enumerate(shape) if size > 1 and d not in (have.dim, want.dim)]
        if not others:
            whole = self.convert(value, shape, have, Replicate())
            return self.convert(whole, shape, Replicate(), want)
        between = Shard(max(others, key=lambda dim: shape[dim]))
        value = self.convert(value, shape, have, between)
        return self.convert(value, shape, between, want)

    def _exchanged(self, value: Ref, shape: tuple[int, ...], have: Cut, want: Cut) -> Ref:
        """Convert by one all-to-all, of an interleaved dim viewed as three."""
        placement = have if isinstance(have, StridedShard) else want
        dim, (outer, inner) = placement.dim, around(placement)
        grouped = (*shape[:dim], outer, shape[dim] // (outer * inner), inner, *shape[dim + 1 :])
        source, target = (
            Shard(dim + 1) if one == placement else Shard(one.dim + 2 * (one.dim > dim))
            for one in (have, want)
        )
        seen = self.reshape(value, self.local(grouped, source))
        moved = self.convert(seen, grouped, source, target)
        return self.reshape(moved, self.local(shape, want))

    def _resized(self, value: Ref, sizes: Mapping[int, int]) -> TensorMeta:
        """Return the row-major meta of ``value`` with other sizes for some dims."""
        meta = self.meta(value)
        shape = tuple(sizes.get(dim, size) for dim, size in enumerate(meta.shape))
        return intern(shape, contiguous_stride(shape), meta.dtype)

    def _collective(self, name: str, args: tuple[Arg, ...], meta: TensorMeta) -> Ref:
        (result,) = self.add(Node(name, (*args, self.axis), (), (meta,)))
        assert result is not None
        return result

    def add(self, node: Node) -> tuple[Ref | None, ...]:
        """Add a node as it stands; return all its results."""
        start = len(self.metas)
        self.nodes.append(node)
        self.metas.extend(node.results)
        return tuple(
            None if meta is None else ref(start + number)
            for number, meta in enumerate(node.results)
        )

    def _infer(
        self, f: OpFacts, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
    ) -> Results | None:
        key = (f, self._device_type, self._signature(args), self._signature(kwargs))
        if key in _seen:
            _seen.move_to_end(key)
            return _seen[key]
        metas = {n: self.meta(ref(n)) for n in numbers((args, kwargs))}
        results = _shapes.results(f, args, kwargs, metas, self._samples)
        if results is None:
            results = run_on_metas(f, args, kwargs, metas, self._samples, self._device_type)
            if results is not None:
                _shapes.learn(f, args, kwargs, metas, self._samples, results)
        _seen[key] = results
        if len(_seen) > _LIMIT:
            _seen.popitem(last=False)
        return results

    def _signature(self, arg: Arg) -> Any:
        kind = type(arg)
        if kind is Ref:
            return self.metas[arg.index]
        if kind is Param:
            return kind, self.params[arg.index]
        if kind is tuple:
            return tuple([self._signature(item) for item in arg])
        return kind, arg
