"""Styles: placement of one module on an axis of the mesh.

``lazygt.parallelize_module`` applies them.

Names, arguments and meaning are those of ``torch.distributed.tensor.parallel``; its own objects are
accepted as well. There a module sees the blocks of its rank if ``use_local_output`` says so; here
every tensor is the whole value, wherever its blocks lie, so that argument changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lazygt.graph.placement import Partial, Placement, Replicate, Shard, as_placement
from lazygt.parallel.style_hooks import Layout, ModuleLayouts

_LAST = Shard(-1)


class ParallelStyle(ABC):
    """Placement of a module on one axis of the mesh."""

    @abstractmethod
    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """Return the layouts that the style gives this module.

        Raises:
            NotImplementedError: the style is not for such modules.
            ValueError: a layout is no placement, or layouts don't fit together.
        """

    def _not_for(self, module: nn.Module, kinds: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} is for {kinds}, not for {type(module).__name__}; give it to "
            f"the layers inside, or say how each parameter is stored, by its name"
        )


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ParallelStyle):
    """Linear layer sharded by its outputs, or embedding sharded by its features.

    Each rank computes some of the features. A head that gives logits is sharded by words: a
    cross-entropy of its output exchanges a few numbers a token, not logits.

    Args:
        input_layouts: placement of the input and its gradient; by default whole. ``Shard(1)``: in
            blocks of the sequence, which are gathered here.
        output_layouts: placement of the output; by default in blocks of features.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        if isinstance(module, nn.Linear):
            parameters: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        elif isinstance(module, nn.Embedding):
            parameters = {"weight": Shard(1)}
        else:
            raise self._not_for(module, "nn.Linear and nn.Embedding")
        inputs = (_layout(self.input_layouts or Replicate(), Replicate()),)
        outputs = _unless_last(self.output_layouts, behind=_LAST)
        return ModuleLayouts(parameters, inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ParallelStyle):
    """Linear layer sharded by its inputs, or embedding sharded by its words.

    Each rank adds up, or looks up, its own part; the results are reduced.

    Args:
        input_layouts: placement of the input and its gradient; by default, and for ``Shard(-1)``,
            as the weight needs it.
        output_layouts: placement of the output and its gradient; by default whole. ``Shard(1)``: in
            blocks of the sequence.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise self._not_for(module, "nn.Linear and nn.Embedding")
        is_linear = isinstance(module, nn.Linear)
        inputs = _unless_last(self.input_layouts, _LAST if is_linear else Replicate())
        outputs = (_layout(self.output_layouts or Replicate(), behind=Replicate()),)
        return ModuleLayouts({"weight": Shard(1 if is_linear else 0)}, inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class VocabParallel(RowwiseParallel):
    """``RowwiseParallel`` for embeddings: sharded by words."""

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        if not isinstance(module, nn.Embedding):
            raise self._not_for(module, "nn.Embedding")
        return super().layouts(module)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Norm or dropout on blocks of the sequence; its parameters are whole.

    Args:
        sequence_dim: the sequence's dim in the input and the output.
        use_local_output: changes nothing, see above.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        blocks = _single(Shard(self.sequence_dim))
        return ModuleLayouts({}, blocks, outputs=blocks)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Placement of the arguments of any module, for layers that share one input.

    Args:
        input_layouts: placement of each argument and its gradient; None: unchanged. One placement:
            of the only argument.
        desired_input_layouts: placements in which the module gets them; of the same length.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same of arguments given by name.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    use_local_output: bool = False

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        given, desired = _several(self.input_layouts), _several(self.desired_input_layouts)
        if len(given) != len(desired):
            raise ValueError(
                f"{len(given)} input_layouts, but {len(desired)} desired_input_layouts: say both "
                f"of each argument"
            )
        by_name, wanted = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        if by_name.keys() != wanted.keys():
            raise ValueError(
                f"input_kwarg_layouts are of {', '.join(by_name) or 'nothing'}, but "
                f"desired_input_kwarg_layouts of {', '.join(wanted) or 'nothing'}"
            )
        return ModuleLayouts(
            inputs=tuple(map(_layout, given, desired)),
            keywords={
                name: layout
                for name, placement in by_name.items()
                if (layout := _layout(placement, wanted[name])) is not None
            },
            counted=True,
        )


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Placement of the results of any module.

    Args:
        output_layouts: the placement that each result has; None: the result is left unchanged. The
            placement of a value is known anyhow, so only None makes a difference.
        desired_output_layouts: new placement of each result and its gradient; of the same length.
        use_local_output: changes nothing, see above.
    """

    output_layouts: Any
    desired_output_layouts: Any
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        given, desired = _several(self.output_layouts), _several(self.desired_output_layouts)
        if len(given) != len(desired):
            raise ValueError(
                f"{len(given)} output_layouts, but {len(desired)} desired_output_layouts: say both "
                f"of each result"
            )
        outputs = tuple(
            None if placement is None else _layout(wanted, None)
            for placement, wanted in zip(given, desired, strict=True)
        )
        return ModuleLayouts(outputs=outputs, counted=True)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` in one.

    ``use_local_input`` is the former's ``use_local_output``.
    """

    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    use_local_input: bool = False
    output_layouts: Any
    desired_output_layouts: Any
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        before = PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
        ).layouts(module)
        after = PrepareModuleOutput(
            output_layouts=self.output_layouts, desired_output_layouts=self.desired_output_layouts
        ).layouts(module)
        return ModuleLayouts(None, before.inputs, before.keywords, after.outputs, counted=True)


def _several(placements: Any) -> tuple[Any, ...]:
    """Return one placement, or several, as a tuple; of None an empty one."""
    if placements is None:
        return ()
    return tuple(placements) if isinstance(placements, tuple | list) else (placements,)


def _layout(given: Any, desired: Any = None, behind: Any = None) -> Layout | None:
    """Return a layout with another placement for the module, or for the gradient, or without."""
    if given is None:
        return None
    placement = _stored(given)
    others = (None if other is None else _stored(other) for other in (desired, behind))
    return Layout(placement, *(None if other == placement else other for other in others))


def _stored(given: Any) -> Placement:
    placement = as_placement(given)
    if isinstance(placement, Partial):
        raise ValueError(
            f"{given!r}: no value here waits for its sum; use Replicate() or Shard(dim)"
        )
    return placement


def _single(given: Any) -> tuple[Layout | None, ...]:
    return (_layout(given),)


def _unless_last(given: Any, desired: Any = None, behind: Any = None) -> tuple[Layout | None, ...]:
    """Return no layout for ``Shard(-1)``: sharded weights need, or give, it by themselves."""
    if given is None or as_placement(given) == _LAST:
        return ()
    return (_layout(given, desired, behind),)


# -- torch's own styles --------------------------------------------------------------------------

_TORCH = "torch.distributed.tensor.parallel"


def as_style(given: object) -> ParallelStyle | None:
    """Return a style, also from an object of torch's own; None: it is no style.

    Raises:
        TypeError: a style of torch's, or a class derived from one, is not known here.
    """
    if isinstance(given, ParallelStyle):
        return given
    kind = type(given)
    if not any(_is_torchs(base) and base.__name__ == "ParallelStyle" for base in kind.__mro__):
        return None
    read = _READERS.get(kind.__name__) if _is_torchs(kind) else None
    if read is None:
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is a style of its own, which works on the "
            f"blocks of a rank; of torch's styles lazygt knows {', '.join(_READERS)}"
        )
    return read(given)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith(_TORCH)


def _ends(style: Any) -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts[0],
        "output_layouts": style.output_layouts[0],
        "use_local_output": style.use_local_output,
    }


def _arguments(style: Any) -> dict[str, Any]:
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts,
    }


def _results(style: Any) -> dict[str, Any]:
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


#: Name of a class of torch's styles -> conversion to lazygt's style.
_READERS: Mapping[str, Callable[[Any], ParallelStyle]] = {
    "ColwiseParallel": lambda style: ColwiseParallel(**_ends(style)),
    "RowwiseParallel": lambda style: RowwiseParallel(**_ends(style)),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(
        **_arguments(style), use_local_output=style.use_local_output
    ),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_results(style)),
    "PrepareModuleInputOutput": lambda style: PrepareModuleInputOutput(
        **_arguments(style.prepare_module_input),
        **_results(style.prepare_module_output),
        use_local_input=style.prepare_module_input.use_local_output,
    ),
}
