"""Tensor-parallel styles: placement of one module on an axis of the mesh.

``lazygt.parallelize_module`` applies them.

Names, arguments and meaning are those of ``torch.distributed.tensor.parallel``; its own objects are
accepted as well. In torch a module sees the blocks of its rank with ``use_local_output``; in
lazygt every tensor is the full value, however sharded, so that argument changes nothing.
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
            NotImplementedError: the style does not support this class of modules.
            ValueError: a layout is no placement, or layouts don't fit together.
        """

    def _unsupported(self, module: nn.Module, kinds: str) -> NotImplementedError:
        """Return the error for a module of an unsupported class."""
        return NotImplementedError(
            f"{type(self).__name__} is for {kinds}, not for {type(module).__name__}; give it to "
            f"the layers inside, or say how each parameter is stored, by its name"
        )


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ParallelStyle):
    """Linear layer sharded by its outputs, or embedding sharded by its features.

    Each rank computes a block of the features. A head with logits as output is sharded by words:
    cross-entropy of the output exchanges a few numbers per token, not logits.

    Args:
        input_layouts: placement of the input and its gradient; by default replicated. ``Shard(1)``:
            sharded along the sequence, and gathered here.
        output_layouts: placement of the output; by default sharded by features.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        if isinstance(module, nn.Linear):
            parameters: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        elif isinstance(module, nn.Embedding):
            parameters = {"weight": Shard(1)}
        else:
            raise self._unsupported(module, "nn.Linear and nn.Embedding")
        inputs = (_layout(self.input_layouts or Replicate(), Replicate()),)
        outputs = _unless_last(self.output_layouts, grad_placement=_LAST)
        return ModuleLayouts(parameters, inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ParallelStyle):
    """Linear layer sharded by its inputs, or embedding sharded by its words.

    Each rank computes a partial sum, or looks up its own words; the results are reduced.

    Args:
        input_layouts: placement of the input and its gradient; by default, and for ``Shard(-1)``,
            the one that matches the weight.
        output_layouts: placement of the output and its gradient; by default replicated.
            ``Shard(1)``: sharded along the sequence.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    output_layouts: Any = None
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise self._unsupported(module, "nn.Linear and nn.Embedding")
        is_linear = isinstance(module, nn.Linear)
        inputs = _unless_last(self.input_layouts, _LAST if is_linear else Replicate())
        outputs = (_layout(self.output_layouts or Replicate(), grad_placement=Replicate()),)
        return ModuleLayouts({"weight": Shard(1 if is_linear else 0)}, inputs, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class VocabParallel(RowwiseParallel):
    """``RowwiseParallel`` for embeddings: sharded by words."""

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        if not isinstance(module, nn.Embedding):
            raise self._unsupported(module, "nn.Embedding")
        return super().layouts(module)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Norm or dropout sharded along the sequence; the parameters are replicated.

    Args:
        sequence_dim: the sequence's dim in the input and the output.
        use_local_output: changes nothing, see above.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        blocks = _single(Shard(self.sequence_dim))
        return ModuleLayouts({}, blocks, outputs=blocks)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Placement of the arguments of any module, for layers that share one input.

    Args:
        input_layouts: placement of each argument and its gradient; None: unchanged. One placement:
            of the only argument.
        desired_input_layouts: placements inside the module; of the same length.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same of keyword arguments.
        use_local_output: changes nothing, see above.
    """

    input_layouts: Any = None
    desired_input_layouts: Any = None
    input_kwarg_layouts: Mapping[str, Any] | None = None
    desired_input_kwarg_layouts: Mapping[str, Any] | None = None
    use_local_output: bool = False

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        current, desired = _as_tuple(self.input_layouts), _as_tuple(self.desired_input_layouts)
        if len(current) != len(desired):
            raise ValueError(
                f"{len(current)} input_layouts, but {len(desired)} desired_input_layouts: give "
                f"both for each argument"
            )
        by_name, desired_by_name = (
            self.input_kwarg_layouts or {},
            self.desired_input_kwarg_layouts or {},
        )
        if by_name.keys() != desired_by_name.keys():
            raise ValueError(
                f"input_kwarg_layouts are of {', '.join(by_name) or 'nothing'}, but "
                f"desired_input_kwarg_layouts of {', '.join(desired_by_name) or 'nothing'}"
            )
        return ModuleLayouts(
            inputs=tuple(map(_layout, current, desired)),
            keywords={
                name: layout
                for name, placement in by_name.items()
                if (layout := _layout(placement, desired_by_name[name])) is not None
            },
            counted=True,
        )


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Placement of the results of any module.

    Args:
        output_layouts: present placement of each result; None: the result is left unchanged. Only
            None makes a difference, since placements of values are known.
        desired_output_layouts: new placement of each result and its gradient; of the same length.
        use_local_output: changes nothing, see above.
    """

    output_layouts: Any
    desired_output_layouts: Any
    use_local_output: bool = True

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        """See `ParallelStyle`."""
        current, desired = _as_tuple(self.output_layouts), _as_tuple(self.desired_output_layouts)
        if len(current) != len(desired):
            raise ValueError(
                f"{len(current)} output_layouts, but {len(desired)} desired_output_layouts: "
                f"give both for each result"
            )
        outputs = tuple(
            None if placement is None else _layout(desired_placement, None)
            for placement, desired_placement in zip(current, desired, strict=True)
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
        """See `ParallelStyle`."""
        input_style = PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
        ).layouts(module)
        output_style = PrepareModuleOutput(
            output_layouts=self.output_layouts, desired_output_layouts=self.desired_output_layouts
        ).layouts(module)
        return ModuleLayouts(
            None, input_style.inputs, input_style.keywords, output_style.outputs, counted=True
        )


def _as_tuple(placements: Any) -> tuple[Any, ...]:
    """Return one placement or several as a tuple; None: an empty one."""
    if placements is None:
        return ()
    return tuple(placements) if isinstance(placements, tuple | list) else (placements,)


def _layout(user_placement: Any, desired: Any = None, grad_placement: Any = None) -> Layout | None:
    """Build a layout of placements in a user's form; None, which leaves a tensor as it is, stays.

    Args:
        desired, grad_placement: see ``Layout``; those equal to the placement become None.
    """
    if user_placement is None:
        return None
    stored = _stored_placement(user_placement)
    alternatives = (
        None if other is None else _stored_placement(other) for other in (desired, grad_placement)
    )
    return Layout(stored, *(None if other == stored else other for other in alternatives))


def _stored_placement(user_placement: Any) -> Placement:
    """Check and convert a placement; Partial is no placement of a style."""
    placement = as_placement(user_placement)
    if isinstance(placement, Partial):
        raise ValueError(
            f"{user_placement!r}: no value here waits for its sum; use Replicate() or Shard(dim)"
        )
    return placement


def _single(placement: Any) -> tuple[Layout | None, ...]:
    """Return the layouts of one tensor."""
    return (_layout(placement),)


def _unless_last(
    placement: Any, desired: Any = None, grad_placement: Any = None
) -> tuple[Layout | None, ...]:
    """Build a layout, or none for ``Shard(-1)``, which follows from the sharded weight."""
    if placement is None or as_placement(placement) == _LAST:
        return ()
    return (_layout(placement, desired, grad_placement),)


# -- torch's own styles --------------------------------------------------------------------------

_TORCH = "torch.distributed.tensor.parallel"


def as_style(style: object) -> ParallelStyle | None:
    """Return a style of lazygt's for a style of lazygt's or torch's; None for other objects.

    Raises:
        TypeError: a style of torch's, or a class derived from one, is not supported.
    """
    if isinstance(style, ParallelStyle):
        return style
    cls = type(style)
    if not any(_is_from_torch(base) and base.__name__ == "ParallelStyle" for base in cls.__mro__):
        return None
    convert = _CONVERSIONS.get(cls.__name__) if _is_from_torch(cls) else None
    if convert is None:
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} is a style of its own, which works on the "
            f"blocks of a rank; of torch's styles lazygt knows {', '.join(_CONVERSIONS)}"
        )
    return convert(style)


def _is_from_torch(kind: type) -> bool:
    return kind.__module__.startswith(_TORCH)


def _linear_arguments(style: Any) -> dict[str, Any]:
    """Return lazygt's arguments of torch's column- or row-wise style."""
    return {
        "input_layouts": style.input_layouts[0],
        "output_layouts": style.output_layouts[0],
        "use_local_output": style.use_local_output,
    }


def _input_arguments(style: Any) -> dict[str, Any]:
    """Return lazygt's arguments of torch's PrepareModuleInput."""
    return {
        "input_layouts": style.input_layouts,
        "desired_input_layouts": style.desired_input_layouts,
        "input_kwarg_layouts": style.input_kwarg_layouts,
        "desired_input_kwarg_layouts": style.desired_input_kwarg_layouts,
    }


def _output_arguments(style: Any) -> dict[str, Any]:
    """Return lazygt's arguments of torch's PrepareModuleOutput."""
    return {
        "output_layouts": style.output_layouts,
        "desired_output_layouts": style.desired_output_layouts,
        "use_local_output": style.use_local_output,
    }


#: Name of a class of torch's styles -> conversion to lazygt's style.
_CONVERSIONS: Mapping[str, Callable[[Any], ParallelStyle]] = {
    "ColwiseParallel": lambda style: ColwiseParallel(**_linear_arguments(style)),
    "RowwiseParallel": lambda style: RowwiseParallel(**_linear_arguments(style)),
    "SequenceParallel": lambda style: SequenceParallel(
        sequence_dim=style.sequence_sharding[0].dim, use_local_output=style.use_local_output
    ),
    "PrepareModuleInput": lambda style: PrepareModuleInput(
        **_input_arguments(style), use_local_output=style.use_local_output
    ),
    "PrepareModuleOutput": lambda style: PrepareModuleOutput(**_output_arguments(style)),
    "PrepareModuleInputOutput": lambda style: PrepareModuleInputOutput(
        **_input_arguments(style.prepare_module_input),
        **_output_arguments(style.prepare_module_output),
        use_local_input=style.prepare_module_input.use_local_output,
    ),
}
