"""Facts about an op, read once from its schema.

torch's schemas say nearly all: the arguments that an op writes, the aliases of its results, the
arguments that may be Python numbers. The few facts that they omit stand in the tables at the top.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from functools import cache, lru_cache
from typing import Any

import torch

Overload = torch._ops.OpOverload

#: The dispatcher's state outside any op.
_INCLUDED = torch._C._dispatch_tls_local_include_set()
_EXCLUDED = torch._C._dispatch_tls_local_exclude_set()


def undispatched() -> Any:
    """Return a guard under which ops run as they do outside any other op.

    While torch dispatches an op to Python, every dispatch key above Python is off: autograd, and
    also the resolution of conjugate and negative bits.
    """
    return torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)


#: Writes that the schema does not declare: op -> positions of the tensors, and of the flag that
#: turns the write on.
UNDECLARED_WRITES: dict[str, tuple[tuple[int, ...], int]] = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
}

#: Ops with results that may share memory with an input, which the schema does not declare.
UNDECLARED_ALIASES = frozenset(
    {
        "aten._unsafe_view.default",
        "aten._reshape_alias.default",
        "aten._reshape_copy.default",
        "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default",
        "aten.unsafe_chunk.default",
        "aten.native_dropout.default",
        "aten._to_copy.default",
        "aten.lift.default",
        "aten.lift_fresh.default",
        "aten._spdiags.default",
    }
)

#: Ops of UNDECLARED_ALIASES with results that never overlap each other.
DISJOINT = frozenset(
    {
        "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default",
        "aten.unsafe_chunk.default",
    }
)

#: Ops with results of dtypes, shapes or strides that depend on the workers' device type, so meta
#: tensors do not suffice.
BY_DEVICE = frozenset(
    {
        "aten._batch_norm_with_update.default",
        "aten._fft_c2c.default",
        "aten._fft_c2r.default",
        "aten._fft_r2c.default",
        "aten._linalg_svd.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.linalg_eig.default",
        "aten.native_batch_norm.default",
        "aten.native_group_norm.default",
        "aten.native_layer_norm.default",
    }
)

#: Results of a size that only the kernel knows, or that torch's meta kernels get wrong: workspaces
#: that only the op's own backward reads.
OPAQUE_RESULTS: dict[str, tuple[int, ...]] = {
    "aten._embedding_bag.default": (1, 2, 3),
    "aten._embedding_bag_forward_only.default": (1, 2, 3),
    "aten.mkldnn_rnn_layer.default": (3,),
    "aten._cudnn_rnn.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3,),
    "aten._scaled_dot_product_flash_attention.default": (4, 5, 6),
    "aten._scaled_dot_product_efficient_attention.default": (2, 3),
    "aten._scaled_dot_product_cudnn_attention.default": (4, 5, 6),
    "aten._scaled_dot_product_fused_attention_overrideable.default": (4, 5, 6),
}

#: Ops with results of sizes that depend on values only if an index is a mask.
MASKABLE = frozenset({"aten.index.Tensor", "aten._unsafe_index.Tensor"})

#: Ops in which a Python number shapes the result, so it is a constant of the graph, not data.
SHAPED_BY_SCALARS = frozenset({"arange", "range"})

#: Arguments with a number that selects the computation (random or not, the kind of norm), so it is
#: part of the program too.
DECIDING_NUMBERS = frozenset({"dropout", "dropout_p", "ord"})

#: Op -> position of the argument that is an index: an int that shapes no result. Such a number may
#: be a run-time number (``record.positions``).
POSITIONS = {
    "aten.narrow.default": 2,
    "aten.roll.default": 1,
    "aten.select.int": 2,
    "aten.select_backward.default": 3,
    "aten.select_scatter.default": 3,
    "aten.slice.Tensor": 2,
}

#: Views whose validity or meta depends on the storage offset of their operand.
BEGINNING_MATTERS = frozenset({"aten.view.dtype", "aten.view_as_complex.default"})

#: Ops that never draw, although torch tags them as random: without dropout, or with a drawn mask.
NEVER_DRAW = frozenset(
    {
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._fused_sdp_choice.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
        "aten._scaled_dot_product_cudnn_attention_backward.default",
        "aten._cudnn_rnn.default",
    }
)

#: Pointwise although torch's tag is missing.
UNTAGGED_POINTWISE = frozenset({"aten.mish_backward.default"})

_SCALAR_TYPES = ("number", "Scalar", "Optional[number]", "Optional[Scalar]", "float", "Tensor",
                 "Optional[Tensor]")  # fmt: skip
_SCALAR_LISTS = ("List[number]", "List[Scalar]")


class CustomOp:
    """Custom op: the user's, or a library's, not torch's own.

    It represents an overload in all queries of facts, also in processes without the op. Two
    definitions of one op have two names, so that their graphs differ.

    Attributes:
        name: ``namespace.op.overload@`` and the module that defines it, or a hash of its code.
        infer: function that runs it on meta or fake tensors; None: its results depend on values.
        definition: the description of it for workers.
    """

    __slots__ = ("__weakref__", "_facts", "_schema", "definition", "infer", "name", "tags")

    def __init__(
        self,
        name: str,
        schema: str,
        tags: Collection[torch.Tag] = (),
        infer: Callable[..., Any] | None = None,
        definition: Any = None,
    ) -> None:
        self.name, self.infer, self.definition = name, infer, definition
        self.tags = list(tags)
        self._schema = torch._C.parse_schema(schema)
        self._facts: OpFacts | None = None

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return its results on meta or fake tensors.

        Raises:
            NotImplementedError: there is no fake kernel.
        """
        if self.infer is None:
            raise NotImplementedError(f"{self.name} has no fake kernel")
        return self.infer(*args, **kwargs)

    @property
    def facts(self) -> OpFacts:
        """Facts of the op; cached here, since the op may be deleted."""
        if self._facts is None:
            self._facts = OpFacts(self)
        return self._facts


#: The custom ops that are still referenced, by name.
_CUSTOM_OPS: weakref.WeakValueDictionary[str, CustomOp] = weakref.WeakValueDictionary()


def add_custom_op(op: CustomOp) -> None:
    """Register a custom op by name; the table refers to it weakly."""
    _CUSTOM_OPS[op.name] = op


def title(name: str) -> str:
    """Return an op's name without the definition's mark ``@...``."""
    return name.partition("@")[0]


class OpFacts:
    """Facts about one overload, for recorder and executor."""

    __slots__ = (
        "aliases",
        "beginning_matters",
        "custom",
        "dynamic",
        "func",
        "hoist",
        "hoist_named",
        "inplace_view",
        "name",
        "one_view",
        "outputs",
        "pointwise",
        "position",
        "random",
        "views",
        "writes",
        "writes_named",
    )

    def __init__(self, func: Overload | CustomOp, extra_writes: tuple[int, ...] = ()) -> None:
        schema = func._schema
        self.func = func
        self.name = str(func)
        #: True if only the schema is known: a number may shape results, and the op may draw
        self.custom = isinstance(func, CustomOp)
        shaped = schema.name.split("::")[1].split(".")[0] in SHAPED_BY_SCALARS
        shaped = shaped or (self.custom and bool(schema.returns))
        arguments = schema.arguments
        positional = [a for a in arguments if not a.kwarg_only]
        #: hoisted (run-time) numbers, position -> 1 when a number there is data, 2 when a list of
        #: numbers is, 0 when it is part of the program
        self.hoist = tuple(0 if shaped else _hoist(a) for a in positional)
        self.hoist_named = {a.name: 0 if shaped else _hoist(a) for a in arguments if a.kwarg_only}
        #: the argument that is an index alone
        self.position = POSITIONS.get(self.name)
        self.writes = tuple(
            i for i, a in enumerate(positional) if _is_written(a) or i in extra_writes
        )
        self.writes_named = tuple(a.name for a in arguments if a.kwarg_only and _is_written(a))
        #: one letter a return: f(resh), w(ritten argument), v(iew), i(nt that shapes determine),
        #: p(ython value that values determine); l = list
        kinds = (_return_kind(r) for r in schema.returns)
        self.outputs = tuple("p" if self.custom and kind == "i" else kind for kind in kinds)
        self.views = any("v" in kind for kind in self.outputs)
        self.beginning_matters = self.name in BEGINNING_MATTERS or (self.custom and self.views)
        self.one_view = self.outputs == ("v",)
        self.inplace_view = torch.Tag.inplace_view in func.tags
        self.random = torch.Tag.nondeterministic_seeded in func.tags and self.name not in NEVER_DRAW
        self.dynamic = self.name not in MASKABLE and (
            torch.Tag.dynamic_output_shape in func.tags
            or torch.Tag.data_dependent_output in func.tags
            or "p" in self.outputs
        )
        self.pointwise = (
            torch.Tag.pointwise in func.tags
            or "::_foreach_" in schema.name
            or self.name in UNTAGGED_POINTWISE
        )
        if self.custom:  # nothing is known of it but its schema
            self.random, self.pointwise = not self.views, False
        self.aliases = self.views or self.name in UNDECLARED_ALIASES

    def __repr__(self) -> str:
        return f"OpFacts({self.name})"


def _hoist(argument: Any) -> int:
    """Return 1 for an argument whose number is data, 2 for a list of such numbers, else 0."""
    kind = str(argument.type)
    if argument.name in DECIDING_NUMBERS:
        return 0
    if kind in _SCALAR_LISTS:
        return 2
    return int(kind in _SCALAR_TYPES)


def _is_written(argument: Any) -> bool:
    """Return whether an op writes an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _return_kind(returned: Any) -> str:
    """Return the kind of a return, as in ``OpFacts.outputs``."""
    kind = str(returned.type)
    if "Tensor" not in kind:
        return "i" if kind == "int" else "p"
    list_mark = "l" if kind.startswith("List") else ""
    if returned.alias_info is None:
        return "f" + list_mark
    return ("w" if returned.alias_info.is_write else "v") + list_mark


def facts(func: Overload | CustomOp) -> OpFacts:
    """Return the facts of an overload."""
    return func.facts if isinstance(func, CustomOp) else _facts(func)


@cache
def _facts(func: Overload) -> OpFacts:
    return OpFacts(func)


@cache
def writing_facts(func: Overload) -> OpFacts:
    """Return the facts of an op in UNDECLARED_WRITES when its flag is on."""
    return OpFacts(func, extra_writes=UNDECLARED_WRITES[str(func)][0])


def returned_write(f: OpFacts, position: int) -> int | str:
    """Return the position or keyword of the written argument that a result is."""
    returned = f.func._schema.returns[position].alias_info
    assert returned is not None
    for i, argument in enumerate(f.func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set == returned.before_set:
            return argument.name if argument.kwarg_only else i
    raise AssertionError(f"{f.name}: return {position} aliases no written argument")


@lru_cache(maxsize=4096)
def viewed_argument(f: OpFacts) -> int:
    """Return the position of the argument that a view op's result is a view of."""
    for i, argument in enumerate(f.func._schema.arguments):
        if argument.alias_info is not None and not argument.alias_info.is_write:
            return i
    return 0


def overload(name: str) -> Any:
    """Return the overload ``namespace.op.overload``; KeyError if torch has none."""
    return _CUSTOM_OPS[name] if "@" in name else _torchs(name)


@cache
def _torchs(name: str) -> Overload:
    """Return torch's own overload ``namespace.op.overload``; KeyError if there is none."""
    parts = name.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        raise KeyError(name)
    try:
        op = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError) as error:
        raise KeyError(name) from error
    if not isinstance(op, Overload):
        raise KeyError(name)
    return op
