"""A node's arguments: by name, with other operands, with some changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lazygt.graph.node import Arg, Node, Ref, map_arg
from lazygt.graph.ops import OpFacts, overload


@lru_cache(maxsize=4096)
def schema(op: str) -> tuple[tuple[str, bool, Any], ...]:
    """(name, keyword only, default) of each argument of an overload."""
    return tuple(
        (a.name, a.kwarg_only, _frozen(a.default_value) if a.has_default_value() else None)
        for a in overload(op)._schema.arguments
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def bound(node: Node) -> dict[str, Arg]:
    """Arguments by name, those given first and in the node's order, so that refs() agrees."""
    arguments = schema(node.op)
    named = {name: arg for (name, _, _), arg in zip(arguments, node.args, strict=False)}
    named.update(node.kwargs)
    for name, _, default in arguments:
        named.setdefault(name, default)
    return named


def tuples(arg: Any) -> Arg:
    """Lists as tuples, as nodes hold them."""
    return tuple(map(tuples, arg)) if isinstance(arg, (list, tuple)) else arg


def numbers(arg: Arg) -> list[int]:
    """The numbers of the values inside an argument, in order, with repeats."""
    if type(arg) is Ref:
        return [arg.index]
    return [n for item in arg for n in numbers(item)] if type(arg) is tuple else []


def written_by(
    f: OpFacts, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> tuple[int, ...]:
    """The numbers of the values that a call writes."""
    named = dict(kwargs)
    targets = [args[i] for i in f.writes if i < len(args)]
    targets += [named[name] for name in f.writes_named if name in named]
    return tuple(numbers(tuple(targets)))


def with_operands(
    node: Node, operands: Sequence[Ref]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The arguments and keywords of ``node`` with other values, in order of refs()."""
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
    """Arguments with some replaced by name; those left out before them get their defaults."""
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
