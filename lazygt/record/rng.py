"""Random stream shared by the CPU and a session's workers, as one stream in eager torch.

The stream's state is in one place at a time: the client's CPU generator has it, or the workers of a
session have it. The first lazy draw hands it to the workers, which costs no sync point. A draw on a
CPU tensor (see ``host_rng``), a read of the state, and the regular end of a session fetch it back,
which is a sync point.

Workers on GPUs have a stream of their own, as GPUs do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lazygt.errors import WorkerDied, WorkerFrozen
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import DEVICE, Node, Ref
from lazygt.record.host_values import to_lazy
from lazygt.record.tensor import NATIVE, LazyTensor
from lazygt.record.trace import TraceOwner

_SEED, _GET, _SET = "lazygt.manual_seed", "lazygt.get_rng_state", "lazygt.set_rng_state"
_GPU_STATE_BYTES = 16
#: Ops that hand the stream to the workers.
SEEDS = frozenset({_SEED, _SET})

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: The generator of the session whose CPU workers have the state; empty: the client has it.
_owners: list[SessionGenerator] = []


def is_state(meta: TensorMeta | None) -> bool:
    """Return whether a tensor has the dtype and shape of a CPU generator's state."""
    return meta is not None and meta.dtype is torch.uint8 and meta.shape == _state_shape()


@cache
def _state_shape() -> tuple[int, ...]:
    """Return the shape of a CPU generator's state."""
    return tuple(torch.Generator().get_state().shape)


class SessionGenerator:
    """Session's generator: draws, seeding, and the state of the stream.

    Attributes:
        holds: True if the workers have the state that the next draw starts from.
    """

    def __init__(self, owner: TraceOwner, device_type: str) -> None:
        self._owner = owner
        self._on_cpu = device_type == "cpu"
        self.holds = False
        #: the state that was sent to the workers last
        self._sent_state: torch.Tensor | None = None

    def before_draw(self, args: Args, kwargs: Kwargs | None) -> tuple[Args, Kwargs | None]:
        """Hand the state to the workers if they lack it, before a draw is recorded.

        Returns:
            The draw's arguments, without a generator that equals the client's default.
        """
        if not self.holds:
            self.hand_to_workers()
        if torch.Generator in map(type, args):
            args = tuple([None if type(a) is torch.Generator and self.is_own(a) else a
                          for a in args])  # fmt: skip
        if kwargs and (generator := kwargs.get("generator")) is not None and self.is_own(generator):
            kwargs = {name: a for name, a in kwargs.items() if name != "generator"}
        return args, kwargs

    def is_elsewhere(self, args: Args, kwargs: Kwargs | None) -> bool:
        """Return whether a draw goes through a generator that is not the session's."""
        generator = kwargs.get("generator") if kwargs else None
        if generator is None and torch.Generator in map(type, args):
            generator = next(a for a in args if type(a) is torch.Generator)
        return generator is not None and not self.is_own(generator)

    def hand_to_workers(self) -> None:
        """Record the upload of the client's state; on GPUs, seed the workers' own stream."""
        if self._on_cpu:
            move_to_client()
            self._sent_state = torch.default_generator.get_state()
            self._record_state(self._sent_state)
        else:
            self.manual_seed(torch.initial_seed())

    def take_back(self) -> None:
        """Restore the client's state: the op that handed it to the workers is rolled back."""
        if self._on_cpu and self._sent_state is not None:
            torch.default_generator.set_state(self._sent_state)
            discard_worker_state()
        self.holds = False

    def manual_seed(self, seed: int) -> None:
        """Seed the stream; no sync point. The seed is data, not part of a plan.

        Raises:
            RuntimeError: torch's own, when the seed does not fit into 64 bits.
        """
        if self._on_cpu:
            torch.default_generator.manual_seed(seed)
            discard_worker_state()
            return
        checked = torch.Generator().manual_seed(seed).initial_seed()
        with self._owner.lock:
            self.holds = True
            trace = self._owner.trace
            trace.internal((_SEED,), Node(_SEED, (DEVICE, trace.hoist(checked))))

    def get_state(self) -> LazyTensor:
        """Return the state as a lazy tensor of bytes; no sync point."""
        owner = self._owner
        with owner.lock:
            if not self.holds:
                self.hand_to_workers()
            size = torch.default_generator.get_state().numel() if self._on_cpu else _GPU_STATE_BYTES
            meta: TensorMeta = intern((size,), (1,), torch.uint8)
            index = owner.internal((_GET,), Node(_GET, (DEVICE,), (), (meta,)))
            return owner.show(index, meta)

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state; no sync point, whether the new one is lazy or on the CPU."""
        if self._on_cpu and state.device.type == "cpu":
            torch.default_generator.set_state(state)
            discard_worker_state()
        else:
            with self._owner.lock:
                self._record_state(state)

    def _record_state(self, state: torch.Tensor) -> None:
        """Record the op that sets the workers' state."""
        owner = self._owner
        lazy = state if state.device.type == "lazygt" else to_lazy(owner, state)
        index = owner.index_of(lazy)  # type: ignore[arg-type]
        owner.internal((_SET, index), Node(_SET, (DEVICE, Ref(index))))
        if self._on_cpu:
            discard_worker_state()
            _owners.append(self)
        self.holds = True

    def restore_host_state(self) -> None:
        """Fetch the state into the client's CPU generator; a sync point if the workers have it."""
        with self._owner.lock:
            if not (self.holds and self._on_cpu):
                return
            try:
                state = self._owner.fetch(self.get_state(), "generator")
            except (WorkerDied, WorkerFrozen):
                discard_worker_state()  # the state is lost: this call raises, later draws need not
                raise
            torch.default_generator.set_state(state)
            discard_worker_state()

    def close(self) -> None:
        """Discard the workers' state of the stream, when the workers end."""
        if self in _owners:
            discard_worker_state()

    def is_own(self, generator: torch.Generator) -> bool:
        """Return whether ``generator=`` names the stream that is drawn from without it."""
        return self._on_cpu and is_default(generator)

    def is_recording(self) -> bool:
        """Return whether this thread works for the session, not for the user."""
        owned: bool = self._owner.lock._is_owned()  # type: ignore[attr-defined]
        return owned


def is_default(generator: torch.Generator) -> bool:
    """Return whether a generator is the client's default; torch creates new objects for it."""
    host: Any = host_generator(generator)
    same: bool = host._cdata == torch.default_generator._cdata  # type: ignore[attr-defined]
    return same


def host_generator(generator: torch.Generator) -> torch.Generator:
    """Return the CPU generator behind a generator of device lazygt; a CPU one itself."""
    if generator.device.type != "lazygt":
        return generator
    host: torch.Generator = NATIVE.host_generator(generator)
    return host


def state_owner() -> SessionGenerator | None:
    """Return the generator of the session with the state; None inside that session's own work."""
    for generator in _owners:
        return None if generator.is_recording() else generator
    return None


def move_to_client() -> None:
    """Fetch the state from the workers, if they have it: CPU draws continue the stream."""
    generator = state_owner()
    if generator is not None:
        generator.restore_host_state()


def discard_worker_state() -> None:
    """Invalidate the workers' state of the stream."""
    for generator in _owners:
        generator.holds = False
    _owners.clear()
