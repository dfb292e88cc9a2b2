"""Checkpoint read from a file: states by name, and their loading into objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from lazygt.config import VERSION
from lazygt.errors import CheckpointError, LazyGTError
from lazygt.graph.mesh import Sharding
from lazygt.graph.placement import Replicate
from lazygt.record.annotate import mesh_of, restore_sharding
from lazygt.record.context import current_session
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import is_lazy, storage_of, view_of
from lazygt.recovery.checkpoint import states as object_states
from lazygt.recovery.checkpoint.checkpoint_file import CheckpointFile, unpacked
from lazygt.recovery.checkpoint.encoding import decoded
from lazygt.recovery.checkpoint.states import Leaf, placements_of, tensor_of


class Contents(msgspec.Struct, frozen=True):
    """First section of a file; the others are the values of the states' tensors, the leaves."""

    states: dict[str, bytes]  # encoded states without their tensors, by name
    classes: dict[str, str]  # classes of the registered objects, by name
    generators: bytes  # encoded states of the random generators; see ``generators``
    leaves: list[Leaf]  # the tensors of the states, by number


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint requires: others may compute other bits."""
    return {"lazygt": VERSION, "torch": str(torch.__version__)}


class Saved(Mapping[str, Any]):
    """Saved states of a run by registered name.

    The state of a module or an optimizer is its ``state_dict()``, with tensors on the CPU.

    Attributes:
        step: number of the saved step; 0: there is no checkpoint.
        path: path of the file; None: there is no checkpoint.
        settings: settings of the session that saved it.
    """

    def __init__(self, file: CheckpointFile | None = None) -> None:
        self.step = 0
        self.path: Path | None = None
        self.settings: dict[str, str] = {}
        self._file, self._contents = file, Contents({}, {}, b"", [])
        if file is not None:
            self.path = file.path
            _check_versions(file)
            self._contents = _contents(file)
            self.step, self.settings = _step_and_settings(file)

    # -- reading -------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        return self._state(name, self._on_cpu)

    def __iter__(self) -> Iterator[str]:
        return iter(self._contents.states)

    def __len__(self) -> int:
        return len(self._contents.states)

    def __repr__(self) -> str:
        where = "nothing" if self.path is None else f"{self.path} of step {self.step}"
        return f"<lazygt checkpoint {where}: {', '.join(self) or 'empty'}>"

    @property
    def objects(self) -> frozenset[str]:
        """Names of registered objects; the other states are values saved with the step."""
        return frozenset(self._contents.classes)

    def _state(self, name: str, tensor_of_number: Callable[[int], Any]) -> Any:
        """Decode a state.

        Args:
            tensor_of_number: returns the object that replaces a tensor, by the tensor's number.
        """
        return self._decoded(repr(name), self._contents.states[name], tensor_of_number)

    def _decoded(self, title: str, data: bytes, tensor: Callable[[int], Any]) -> Any:
        """Decode a state; CheckpointError, with the title, for invalid data."""
        try:
            return decoded(data, tensor)
        except ValueError as error:
            raise self._error(f"{title} in it is not as a checkpoint has it: {error}") from error

    def _error(self, reason: str) -> CheckpointError:
        """Return an error about this file."""
        return CheckpointError(self.path or "", f"{reason}. Nothing was loaded")

    def _leaf_of(self, number: int) -> Leaf:
        """Return the description of a tensor; ValueError if there is no such number."""
        if not 0 <= number < len(self._contents.leaves):
            raise ValueError(f"there is no tensor {number}")
        return self._contents.leaves[number]

    def _on_cpu(self, number: int) -> Tensor:
        """Return a tensor over the file's bytes."""
        assert self._file is not None
        return tensor_of(self._leaf_of(number), self._file.section(number + 1))

    # -- loading -------------------------------------------------------------------------

    def load(self, **objects: Any) -> None:
        """Load objects with the states saved under these names, and the random generators.

        Tensors from workers go to the workers of the open session.

        Raises:
            CheckpointError: the objects are not the registered ones, and nothing was loaded; or an
                object rejects its state, and then models and optimizers are unchanged.
        """
        for name, obj in objects.items():
            self._check(name, obj)
        random_states = self._decoded(
            "the random generators", self._contents.generators, self._on_cpu
        )
        on_device = self._device_lookup()
        # unchecked objects first: if one raises, models and optimizers are unchanged
        for name in sorted(objects, key=lambda name: _is_checked(objects[name])):
            with self._loading(name):
                object_states.load(objects[name], self._state(name, on_device))
        for name, obj in objects.items():
            self._restore_shardings(name, obj)
        with self._loading("random"):
            set_generators(random_states)

    @contextmanager
    def _loading(self, name: str) -> Iterator[None]:
        """Convert an object's error in loading to a CheckpointError with file and object."""
        try:
            yield
        except LazyGTError:
            raise
        except Exception as error:  # raised by the object's code
            raise CheckpointError(
                self.path or "",
                f"{name!r} does not take the state that was saved: {type(error).__name__}: {error}",
            ) from error

    def _check(self, name: str, obj: Any) -> None:
        """Raise CheckpointError unless the saved state of this name can be the object's."""
        if name not in self._contents.classes:
            raise CheckpointError(
                self.path or "",
                f"it is of another program: nothing was registered as {name!r}, but "
                f"{', '.join(map(repr, self._contents.classes)) or 'nothing'}. Nothing was loaded",
            )
        state = self._state(name, self._leaf_of)
        with self._loading(name):
            object_states.check(self.path, name, obj, self._contents.classes[name], state)

    def _device_lookup(self) -> Callable[[int], Tensor]:
        """Return a function from a tensor's number to the tensor on its device, moved once."""
        in_session = current_session() is not None
        moved: dict[int, Tensor] = {}

        def on_device(number: int) -> Tensor:
            """Return a tensor: lazy if it was and a session is open, else on the CPU."""
            if number not in moved:
                value, lazy = self._on_cpu(number), self._contents.leaves[number].lazy
                moved[number] = value.to("lazygt") if lazy and in_session else value.clone()
            return moved[number]

        return on_device

    def _restore_shardings(self, name: str, obj: Any) -> None:
        """Restore the saved shardings of an object's tensors that have no placements set."""
        state = self._state(name, self._leaf_of)
        for tensor, leaf in object_states.pairs(object_states.state_of(obj), state):
            if not is_lazy(tensor) or view_of(tensor) is not None:
                continue
            placements = placements_of(leaf)
            same_mesh = str(mesh_of(tensor)) == self.settings.get("mesh")
            is_sharded = any(not isinstance(placement, Replicate) for placement in placements)
            if is_sharded and same_mesh and storage_of(tensor).placed is None:
                restore_sharding(tensor, Sharding(placements))


def _contents(file: CheckpointFile) -> Contents:
    """Read the first section, and check that it has a leaf for each of the other sections."""
    _check_versions(file)
    contents = unpacked(file.path, file.section(0) if len(file) else b"", Contents)
    if len(contents.leaves) != len(file) - 1:
        raise CheckpointError(
            file.path, f"it has {len(file) - 1} values of {len(contents.leaves)} tensors"
        )
    return contents


def _step_and_settings(file: CheckpointFile) -> tuple[int, dict[str, str]]:
    """Return step and settings from a file's description."""
    step, settings = file.about.get("step"), file.about.get("settings")
    if not isinstance(step, int) or not isinstance(settings, dict):
        raise CheckpointError(file.path, "it does not say its step and settings")
    return step, settings


def _is_checked(obj: Any) -> bool:
    """Return whether `object_states.check` compares an object's tensors with the saved ones."""
    return isinstance(obj, torch.nn.Module | torch.optim.Optimizer | Tensor)


def _check_versions(file: CheckpointFile) -> None:
    """Raise CheckpointError for a file of other versions."""
    for name, version in versions().items():
        if (saved := file.about.get(name)) != version:
            raise CheckpointError(
                file.path,
                f"it was saved by {name} {saved}, and this is {name} {version}, which may compute "
                f"other bits. Nothing was loaded. Resume it with {name} {saved}",
            )


# -- random numbers ------------------------------------------------------------------------


def generators(recorder: Recorder) -> dict[str, Any]:
    """Return the states of the default random generators of Python, NumPy and torch.

    Torch's stream is on the workers after a lazy draw (``recorder.generator.holds``), else here.
    """
    workers = recorder.generator.get_state() if recorder.generator.holds else None
    on_cpu = recorder.worker_device == "cpu"
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "workers": workers,
        # with workers on CPUs there is a single stream, saved under "workers" if it is there
        "torch": None if on_cpu and workers is not None else torch.default_generator.get_state(),
        "device": recorder.worker_device,
    }


def set_generators(state: dict[str, Any]) -> None:
    """Set the states of the default random generators; no sync point."""
    random.setstate(state["python"])
    object_states.check_numpy(state["numpy"][2])
    np.random.set_state(state["numpy"])
    if state["torch"] is not None:
        torch.set_rng_state(state["torch"])
    workers = state["workers"]
    if workers is None:
        return
    if state["device"] == "cpu":
        torch.set_rng_state(workers)
    elif isinstance(recorder := getattr(current_session(), "recorder", None), Recorder):
        recorder.generator.set_state(workers)
