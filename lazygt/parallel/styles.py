"""Parallel styles of a module on an axis of the mesh, for ``lazygt.parallelize_module``.

Names, arguments and meaning are those of ``torch.distributed.tensor.parallel``, whose own objects
are taken as well. There a module sees the blocks of its rank where ``use_local_output`` says so;
here every tensor is the whole value, wherever its blocks lie, so that argument changes nothing.
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
        """Return the layouts of this module.

        Raises:
            NotImplementedError: the style is not for such modules.
            ValueError: a layout that is no placement, or layouts that don't fit together.
        """

    def _not_for(self, module: nn.Module, kinds: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__} is for {kinds}, not for {type(module).__name__}; give it to "
            f"the layers inside, or say how each parameter is stored, by its name"
        )


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ParallelStyle):
    """A linear layer cut by its outputs, or an embedding by its features.

    Each rank computes some of the features. As the head that gives logits it is cut by words: a
    cross-entropy of its output exchanges numbers a token, not logits.

    Args:
        input_layouts: how the input, and its gradient, lies; by default whole. ``Shard(1)``: in
            blocks of the sequence, which are gathered here.
        output_layouts: how the output lies; by default in blocks of features.
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
    """A linear layer cut by its inputs, or an embedding by its words.

    Each rank multiplies, or looks up, its own block; the results are reduced.

    Args:
        input_layouts: how the input, and its gradient, lies; by default, and for ``Shard(-1)``, as
            the weight needs it.
        output_layouts: how the output, and its gradient, lies; by default whole. ``Shard(1)``: in
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
    """``RowwiseParallel`` of an embedding, named for the sharded dim: the vocabulary."""

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        if not isinstance(module, nn.Embedding):
            raise self._not_for(module, "nn.Embedding")
        return super().layouts(module)


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """A norm or dropout on blocks of the sequence; its parameters are whole.

    Args:
        sequence_dim: of the input and the output.
        use_local_output: changes nothing, see above.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def layouts(self, module: nn.Module) -> ModuleLayouts:
        blocks = _single(Shard(self.sequence_dim))
        return ModuleLayouts({}, blocks, outputs=blocks)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Placements of the arguments of any module, for layers that share one input.

    Args:
        input_layouts: how each argument, and its gradient, lies; None: as it comes. One placement:
            of the only argument.
        desired_input_layouts: how the module gets them; of the same length.
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
    """Placements of the results of any module.

    Args:
        output_layouts: for each result, how it lies when it comes; None: it stays as it comes. A
            value knows by itself where it is, so only None makes a difference.
        desired_output_layouts: how each result, and its gradient, is to lie; of the same length.
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
    """One placement, or several, or None for none at all."""
    if placements is None:
        return ()
    return tuple(placements) if isinstance(placements, tuple | list) else (placements,)


def _layout(given: Any, desired: Any = None, behind: Any = None) -> Layout | None:
    """Return the layout of a value with a desired placement, and one of its gradient."""
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
    """No layout for ``Shard(-1)``, which a weight in blocks needs, or gives, by itself."""
    if given is None or as_placement(given) == _LAST:
        return ()
    return (_layout(given, desired, behind),)


# -- torch's own styles --------------------------------------------------------------------------

_TORCH = "torch.distributed.tensor.parallel"


def as_style(given: object) -> ParallelStyle | None:
    """A style, also from an object of torch's own; None: it is none.

    Raises:
        TypeError: a style of torch's, or derived from one, that is not known here.
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


#: What a style of torch's own says, by its name.
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
