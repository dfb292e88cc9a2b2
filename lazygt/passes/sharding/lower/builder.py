"""Builder of one rank's graph, node by node, with shape inference.

Ranks of an axis get graphs of their own, since their shards may differ in size. All ranks run the
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
    block_size,
    group_sizes,
    groups,
    outer_and_inner,
    shard_bounds,
    uneven,
    whole_groups,
)
from lazygt.graph.shapes import Shapes
from lazygt.graph.shapes.meta_run import run_on_metas
from lazygt.graph.shapes.rules import Results
from lazygt.passes.sharding.lower.halo import RowExchange, rows_between

# -- arguments of nodes ----------------------------------------------------------------------------


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
    """Return all arguments by name: the node's, in the order of ``refs()``, then the defaults."""
    arguments = schema(node.op)
    named = {name: arg for (name, _, _), arg in zip(arguments, node.args, strict=False)}
    named.update(node.kwargs)
    for name, _, default in arguments:
        named.setdefault(name, default)
    return named


def tuples(arg: Any) -> Arg:
    """Convert nested lists to tuples, as in nodes."""
    return tuple(map(tuples, arg)) if isinstance(arg, (list, tuple)) else arg


def numbers(arg: Arg) -> list[int]:
    """Return the value numbers in an argument, in order, with repeats."""
    if type(arg) is Ref:
        return [arg.index]
    return [n for item in arg for n in numbers(item)] if type(arg) is tuple else []


def written_by(
    f: OpFacts, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> tuple[int, ...]:
    """Return the value numbers of the operands that a call writes."""
    named = dict(kwargs)
    targets = [args[i] for i in f.writes if i < len(args)]
    targets += [named[name] for name in f.writes_named if name in named]
    return tuple(numbers(tuple(targets)))


def with_operands(
    node: Node, operands: Sequence[Ref]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Return the arguments and keywords of ``node`` with other operands, in order of ``refs()``."""
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
    """Replace arguments by name; omitted positional arguments before them get their defaults."""
    positional, named = list(args), dict(kwargs)
    for number, (name, keyword_only, default) in enumerate(schema(op)):
        if keyword_only:
            if name in changes:
                named[name] = tuples(changes[name])
        elif number < len(positional):
            positional[number] = tuples(changes.get(name, positional[number]))
        elif any(later in changes for later, only, _ in schema(op)[number:] if not only):
            positional.append(tuples(changes.get(name, default)))
    return tuple(positional), tuple(named.items())


# -- one rank's graph ------------------------------------------------------------------------------

#: A run-time number of each kind: metas depend on the kind alone.
_SAMPLES: dict[str, Any] = {"float": 1.0, "int": 1, "bool": True, "complex": 1j}
_MAX_INFERRED = 20_000
_inferred: OrderedDict[Any, Results | None] = OrderedDict()
_shapes = Shapes()


class Builder:
    """Graph of rank ``index`` of ``parts`` ranks on mesh axis ``axis``.

    Args:
        inputs: local metas of the graph's inputs.
        params: kinds of its run-time numbers.

    Attributes:
        nodes: written so far.
        metas: the meta of every value so far.
        differs: whether another rank of the axis may have another graph, because shard sizes differ
            or ``index`` was read.
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
        """Cache key of the rank: (axis, number of ranks, index of the rank)."""
        return self.axis, self.parts, self._index

    def empty_builder(self, inputs: Sequence[TensorMeta], params: Sequence[str] = ()) -> Builder:
        """Return an empty builder for the same rank."""
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
        """Return the length of this rank's block of a dim of global ``size``."""
        return block_size(size, self.parts, self.index if size % self.parts else 0)

    def local(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        """Return the local shape on this rank of a value of global ``shape``."""
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
        """Add a node; return its result, or a tuple of several results.

        Raises:
            Exception: torch's own, for invalid arguments.
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
        """Return 0 of the type of a number: a literal or a run-time parameter."""
        kind = self.params[number.index] if type(number) is Param else type(number).__name__
        zero: bool | int | float | complex = type(_SAMPLES[kind])(0)
        return zero

    def reshape(self, value: Ref, shape: Sequence[int]) -> Ref:
        """Return ``value`` in another shape: a view where its strides allow one."""
        try:
            viewed: Ref = self.op("aten.view.default", value, tuple(shape))
        except (RuntimeError, ValueError):  # the strides allow no view
            viewed = self.op("aten._unsafe_view.default", self.contiguous(value), tuple(shape))
        return viewed

    def contiguous(self, value: Ref) -> Ref:
        """Return ``value`` in row-major memory."""
        if self.meta(value).plain:
            return value
        meta = self.meta(value)
        return self.restrided(value, contiguous_stride(meta.shape))

    def restrided(self, value: Ref, stride: Sequence[int]) -> Ref:
        """Return a copy of ``value`` with these strides."""
        meta = self.meta(value)
        memory = self.op("aten.empty_strided.default", meta.shape, tuple(stride),
                       dtype=meta.dtype, device=DEVICE)  # fmt: skip
        copy: Ref = self.op("aten.copy_.default", memory, value)
        return copy

    # collectives; see graph.placement

    def all_reduce(self, value: Ref, op: str = "sum") -> Ref:
        """All-reduce: return the reduction of the values of all ranks."""
        return self._collective(ALL_REDUCE, (value, op), self._resized(value, {}))

    def all_gather(self, value: Ref, dim: int, size: int) -> Ref:
        """All-gather the blocks of all ranks along ``dim``, of global ``size``."""
        return self._collective(ALL_GATHER, (value, dim, size), self._resized(value, {dim: size}))

    def reduce_scatter(self, value: Ref, dim: int, op: str = "sum") -> Ref:
        """Reduce-scatter: return this rank's block along ``dim`` of the reduced values."""
        meta = self._resized(value, {dim: self.block(self.shape(value)[dim])})
        return self._collective(REDUCE_SCATTER, (value, dim, op), meta)

    def all_to_all(self, value: Ref, split: int, concat: int, size: int) -> Ref:
        """All-to-all: trade blocks along ``concat``, of global ``size``, for ``split`` blocks."""
        sizes = {split: self.block(self.shape(value)[split]), concat: size}
        meta = self._resized(value, sizes)
        return self._collective(ALL_TO_ALL, (value, split, concat, size), meta)

    def send_recv(self, value: Ref, dim: int, sent: tuple[tuple[int, int, int], ...]) -> Ref:
        """Send rows along ``dim`` to other ranks; return the received rows.

        Args:
            value: the rows that this rank sends, in the order of ``sent``.
            sent: (source, target, number of rows) of all sends on the axis.
        """
        received = sum(count for _, target, count in sent if target == self.index)
        return self._collective(
            SEND_RECV, (value, dim, sent), self._resized(value, {dim: received})
        )

    def rows(self, value: Ref, move: RowExchange) -> Ref:
        """Halo exchange: return the rows that this rank wants, both local and received ones."""
        dim, received = move.dim, value
        if move.sent:
            outgoing = [
                self.slice(value, dim, *range_) for range_ in move.outgoing(self.index) or [(0, 0)]
            ]
            received = self.send_recv(self.joined(outgoing, dim), dim, move.sent)
        pieces = [
            self.slice(value if is_local else received, dim, start, count)
            for is_local, start, count in move.wanted_pieces(self.index)
        ]
        return self.joined(pieces or [self.slice(value, dim, 0, 0)], dim)

    def slice(self, value: Ref, dim: int, start: int, count: int) -> Ref:
        """Return ``count`` rows of this rank's value along ``dim``, from ``start``."""
        if (start, count) == (0, self.shape(value)[dim]):
            return value
        rows: Ref = self.op("aten.slice.Tensor", value, dim, start, start + count)
        return rows

    def joined(self, pieces: Sequence[Ref], dim: int) -> Ref:
        """Concatenate pieces along ``dim``; return a single piece as it is."""
        if len(pieces) == 1:
            return pieces[0]
        concatenated: Ref = self.op("aten.cat.default", tuple(pieces), dim)
        return concatenated

    def take_rows(self, value: Ref, index: Ref, rows: int, size: int) -> Ref:
        """Index-select rows of a value sharded along dim 0; see ``TAKE_ROWS``.

        Args:
            index: row numbers in the global value.
            rows: number of rows of the first rank's block.
            size: global number of rows.
        """
        meta = self.meta(value)
        shape = (self.meta(index).numel, *meta.shape[1:])
        meta_of_rows = intern(shape, contiguous_stride(shape), meta.dtype)
        return self._collective(TAKE_ROWS, (value, index, rows, size), meta_of_rows)

    def put_rows(
        self, value: Ref, index: Ref, given: Ref, rows: int, size: int, added: bool
    ) -> Ref:
        """Index-put, or add, all ranks' rows into a value sharded along dim 0; see ``PUT_ROWS``.

        Args:
            index: row numbers in the global value.
            given: the rows of this rank.
        """
        args = value, index, given, rows, size, added
        return self._collective(PUT_ROWS, args, self._resized(value, {}))

    def shard(self, value: Ref, dim: int) -> Ref:
        """Return this rank's block along ``dim`` of a replicated value."""
        meta = self._resized(value, {dim: self.block(self.shape(value)[dim])})
        return self._collective(SHARD, (value, dim), meta)

    def first(self, value: Ref) -> Ref:
        """Return ``value`` on rank 0 of the axis, zeros elsewhere."""
        return self._collective(REPLICATE_TO_PARTIAL, (value,), self._resized(value, {}))

    def convert(self, value: Ref, shape: Sequence[int], have: Placement, want: Placement) -> Ref:
        """Redistribute ``value`` of global ``shape`` from placement ``have`` to ``want``.

        Raises:
            GraphError: no conversion exists.
        """
        if have == want:
            return value
        if uneven(have) or uneven(want):
            return self._convert_uneven(value, tuple(shape), have, want)
        match have, want:
            case (StridedShard(), Replicate()) | (Replicate() | Partial(), StridedShard()):
                return self._convert_grouped(value, tuple(shape), have, want)
            case Shard(dim), Shard(split):
                return self.all_to_all(value, split, dim, shape[dim])
            case ((Shard() | StridedShard()) as source, (Shard() | StridedShard()) as target):
                return self._exchange_strided(value, tuple(shape), source, target)
            case StridedShard(), _:
                return self.convert(self.convert(value, shape, have, Replicate()), shape,
                                    Replicate(), want)  # fmt: skip
            case Replicate(), Shard(dim):
                return self.shard(value, dim)
            case Replicate(), Partial(op) if op in ("max", "min"):
                return value
            case Replicate(), Partial("sum"):
                return self.first(value)
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

        Each group is converted on its own, unless both placements shard the same dim.
        """
        if isinstance(have, Cut) and isinstance(want, Cut) and have.dim == want.dim:
            return self._exchange_strided(value, shape, have, want)
        interleaved = have if uneven(have) else want
        assert isinstance(interleaved, StridedShard)
        source, target = (
            Shard(interleaved.dim) if placement == interleaved else placement
            for placement in (have, want)
        )
        pieces, offset = [], 0
        for size in group_sizes(interleaved, shape[interleaved.dim]):
            group_shape = (*shape[: interleaved.dim], size, *shape[interleaved.dim + 1 :])
            count = self.local(group_shape, source)[interleaved.dim]
            piece = self.slice(value, interleaved.dim, offset, count)
            pieces.append(self.convert(piece, group_shape, source, target))
            offset += count
        return self.joined(pieces, interleaved.dim)

    def _convert_grouped(
        self, value: Ref, shape: tuple[int, ...], have: Placement, want: Placement
    ) -> Ref:
        """Convert by one collective where either placement is interleaved.

        The interleaved dim is viewed as three dims, of which the middle one is sharded.
        """
        interleaved = have if isinstance(have, StridedShard) else want
        assert isinstance(interleaved, StridedShard)
        dim, (outer, inner) = interleaved.dim, outer_and_inner(interleaved)
        grouped = (*shape[:dim], outer, shape[dim] // (outer * inner), inner, *shape[dim + 1 :])

        def in_groups(placement: Placement) -> Placement:
            if placement == interleaved:
                return Shard(dim + 1)
            if isinstance(placement, Shard):
                return Shard(placement.dim + 2 * (placement.dim > dim))
            return placement

        source, target = in_groups(have), in_groups(want)
        viewed = self.reshape(value, self.local(grouped, source))
        moved = self.convert(viewed, grouped, source, target)
        return self.reshape(moved, self.local(shape, want))

    def _exchange_strided(self, value: Ref, shape: tuple[int, ...], have: Cut, want: Cut) -> Ref:
        """Convert between two sharded placements, at least one of them interleaved.

        Each rank receives the rows that it lacks. Where those are in many pieces, the value is
        converted through a shard of another dim, or replicated if there is none.
        """
        strided = [placement for placement in (have, want) if isinstance(placement, StridedShard)]
        if len(strided) == 1 and (have.dim != want.dim or whole_groups(strided[0], self.parts)):
            return self._convert_grouped(value, shape, have, want)
        if have.dim == want.dim:
            move = rows_between(have, want, shape[have.dim], self.parts)
            if move is not None:
                return self.rows(value, move)
        others = [
            other_dim
            for other_dim, size in enumerate(shape)
            if size > 1 and other_dim not in (have.dim, want.dim)
        ]
        if not others:
            replicated = self.convert(value, shape, have, Replicate())
            return self.convert(replicated, shape, Replicate(), want)
        between = Shard(max(others, key=lambda dim: shape[dim]))
        value = self.convert(value, shape, have, between)
        return self.convert(value, shape, between, want)

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
        """Add a complete node; return all its results."""
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
        """Infer the metas of a call's results, by rule or by a run on meta tensors (LRU cache).

        None where shapes depend on values.
        """
        key = (f, self._device_type, self._signature(args), self._signature(kwargs))
        if key in _inferred:
            _inferred.move_to_end(key)
            return _inferred[key]
        metas = {n: self.meta(ref(n)) for n in numbers((args, kwargs))}
        results = _shapes.results(f, args, kwargs, metas, self._samples)
        if results is None:
            results = run_on_metas(f, args, kwargs, metas, self._samples, self._device_type)
            if results is not None:
                _shapes.learn(f, args, kwargs, metas, self._samples, results)
        _inferred[key] = results
        if len(_inferred) > _MAX_INFERRED:
            _inferred.popitem(last=False)
        return results

    def _signature(self, arg: Arg) -> Any:
        """Return the cache key of an argument: metas of tensors, types of run-time numbers."""
        kind = type(arg)
        if kind is Ref:
            return self.metas[arg.index]
        if kind is Param:
            return kind, self.params[arg.index]
        if kind is tuple:
            return tuple([self._signature(item) for item in arg])
        return kind, arg
