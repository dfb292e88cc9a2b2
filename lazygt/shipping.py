"""Shipping: from a recorded stretch to a run on the workers, and back to what was asked of it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from lazygt.config import Config
from lazygt.description import Description
from lazygt.errors import ProtocolError, exception_class
from lazygt.graph.mesh import LogicalMesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.source import Mark
from lazygt.history import Flush, History
from lazygt.planning import Kept, Planner
from lazygt.recorder import Recorder
from lazygt.relaid import learn
from lazygt.runtime.blocks import sent
from lazygt.runtime.client import Client
from lazygt.runtime.fetches import Answer, Regions
from lazygt.runtime.messages import Made, Plain, Several
from lazygt.runtime.remote import RemoteValue
from lazygt.runtime.tiers import Tiers
from lazygt.stretch import Stretch
from lazygt.tensor import Cell

#: What torch's own ops raise: a call that waits for its op raises no other class.
_TORCHS_OWN: tuple[Any, ...] = (RuntimeError, IndexError, ValueError, TypeError,
                                NotImplementedError, torch.OutOfMemoryError)  # fmt: skip


class Reply(NamedTuple):
    """What a data-dependent op returned and wrote."""

    returned: list[Any]
    written: list[tuple[TensorMeta, RemoteValue]]


class Shipping:
    """Ships one stretch after another.

    Args:
        mesh: the ranks that plans are made for, on the workers there are.
        history: gets the flushes.
    """

    def __init__(
        self,
        config: Config,
        mesh: LogicalMesh,
        recorder: Recorder,
        client: Client,
        planner: Planner,
        tiers: Tiers,
        history: History,
    ) -> None:
        self._mesh, self._recorder, self._client = mesh, recorder, client
        self._planner, self._tiers, self._history = planner, tiers, history
        #: one worker stands for all
        self._dry = config.launcher == "dry"
        #: a value may have several blocks on a worker
        self._in_blocks = bool(config.invariant)

    def ship(
        self, stretch: Stretch, reason: str, mark: Mark | None, fetch: Cell | None, ask: bool
    ) -> Any:
        """See ``Session.ship``.

        Args:
            mark: the user's line that forces it.
        """
        cells, outputs = stretch.alive()
        if not stretch.marks and fetch is None and self._client.idle:
            return None
        self._history.flushes[reason.split(":")[0]] += 1
        hits = self._history.plan_hits
        kept = self._planner.plan_of(stretch, outputs, reason) if stretch.marks else None
        hit = self._history.plan_hits > hits
        seq, values, describe, regions = self._run(stretch, kept, reason, fetch)
        digest = None if kept is None else kept.entry.plan.digest
        self._history.recent.append(Flush(reason, mark, len(stretch.marks), digest, hit, seq))
        if kept is not None:
            self._tiers.ran(kept.entry)
            self._rebind(kept, outputs, cells, values, stretch.marks)
        del values
        answer: Any = None
        if fetch is not None:
            answer = self._fetched(seq, fetch, regions)
        elif ask:
            answer = self._asked(seq, describe)
        else:
            self._client.hold_back()
        if self._client.relaid:
            learn(self._recorder, self._client)
        return answer

    def _run(
        self, stretch: Stretch, kept: Kept | None, reason: str, fetch: Cell | None
    ) -> tuple[int, list[RemoteValue], Description, Regions | None]:
        """Send the run of a stretch and begin a new one; does not wait.

        Returns:
            The number of the run, its outputs, what its steps are, and where the blocks of the
            fetched value lie.
        """
        entry, made_of = (None, ((),)) if kept is None else (kept.entry, kept.origins)
        inputs = [remote.id for _, remote in stretch.inputs]
        if self._in_blocks:
            inputs = [key for _, remote in stretch.inputs for key in remote.ids]
        wanted, regions = self._wanted(fetch, stretch, kept)
        self._recorder.next_stretch()
        _let_go_of_inputs(stretch)
        describe = Description(stretch.step, stretch.marks, self._recorder.backward_mark, made_of)
        seq, values = self._client.run(
            entry, inputs, tuple(stretch.params), wanted, describe, reason, regions or (0,)
        )
        return seq, values, describe, regions

    def _wanted(
        self, fetch: Cell | None, stretch: Stretch, kept: Kept | None
    ) -> tuple[tuple[int, ...], Regions | None]:
        """The ids that the fetched cell's blocks will have, and which ranks have what of it.

        No regions: rank 0 has all of it.
        """
        if fetch is None:
            return (), None
        if fetch.remote is not None and not (fetch.serial == stretch.serial and fetch.index >= 0):
            keys, stored = fetch.remote.ids, fetch.remote.stored
        else:
            assert kept is not None
            position = kept.positions[fetch.index]
            keys = tuple([self._client.next_output(slot) for slot in kept.slots[position]])
            stored = kept.stored[position]
        if stored is None or self._dry:
            return keys[:1], None
        return keys, sent(self._mesh, stored.labels, fetch.meta.shape)

    def _rebind(
        self,
        kept: Kept,
        outputs: tuple[int, ...],
        cells: list[Cell],
        values: list[RemoteValue],
        marks: list[Mark | None],
    ) -> None:
        """The handles show the outputs of the run from here on."""
        if self._in_blocks:
            values = kept.grouped(values)
        for cell, index in zip(cells, outputs, strict=True):
            position = kept.positions[index]
            cell.remote = value = values[position]
            value.stored = kept.stored[position]
            value.mark = marks[kept.makers[position]] or self._recorder.backward_mark
            cell.serial = 0

    # -- what comes back -----------------------------------------------------------------

    def _wait(self, seq: int) -> dict[int, Answer]:
        """The answers to a run, of the ranks that were asked."""
        begin = time.monotonic_ns()
        answers = self._client.wait(seq)
        if self._history.probe is not None:
            self._history.probe.did("wait for the answer", begin, {"run": seq})
        return answers

    def _fetched(self, seq: int, cell: Cell, regions: Regions | None) -> torch.Tensor:
        value = self._client.fetched(self._wait(seq), cell.meta, regions)
        self._client.raise_failure()
        if self._dry and value.shape != cell.meta.shape:
            return torch.zeros(cell.meta.shape, dtype=value.dtype, device="cpu")
        return value

    def _asked(self, seq: int, describe: Description) -> Reply:
        """The reply to a run whose last op is data-dependent.

        Raises:
            ExecutionError: an earlier op had failed.
            Exception: torch's own, when this one did.
        """
        done, _ = self._wait(seq)[0]
        reply = done.reply
        if reply is None:
            raise ProtocolError("worker 0 did not say what a data-dependent op returned")
        failure = reply.failure
        if failure is not None:
            eager = exception_class(failure.kind)
            earlier = failure.seq != seq or not describe.is_last(failure.node)
            if earlier or eager is None or eager not in _TORCHS_OWN:
                self._client.raise_for(0, failure)
            self._client.drop_failure(0, failure)
            raise eager(failure.detail)
        self._client.raise_failure()
        mark = describe.marks[-1]
        returned = [self._received(item, mark) for item in reply.returned]
        return Reply(returned, [self._adopted(made, mark) for made in reply.written])

    def _received(self, item: Made | Several | Plain, mark: Mark | None) -> Any:
        match item:
            case Several():
                return [self._received(one, mark) for one in item.items]
            case Plain():
                return item.value
            case Made():
                return self._adopted(item, mark)

    def _adopted(self, made: Made, mark: Mark | None) -> tuple[TensorMeta, RemoteValue]:
        value = self._client.adopt(made.id)
        value.mark = mark
        return made.meta, value


def _let_go_of_inputs(stretch: Stretch) -> None:
    """The stretch is over: an input that nobody else holds is freed with its run."""
    held, stretch.inputs = stretch.inputs, []
    for cell, _ in held:
        entered = cell()
        if entered is not None and entered.serial == stretch.serial and entered.index < 0:
            entered.serial = 0
