"""Runs of a sweep: each combination is simulated, and measured where it can be.

Every combination is recorded and planned once without computing. On ranks that are not there that
is all, and a step of it is simulated. On workers that are there it says how much memory a rank
needs, and how many tokens a step has; then, if there is room, the program runs for real.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lazygt.config import cache_setting
from lazygt.graph.mesh import Mesh
from lazygt.graph.text import amount
from lazygt.machine import Gpus, machine_of
from lazygt.parallel.fsdp_overrides import forced_knobs
from lazygt.session import Session
from lazygt.simulation import DRY, Living, Prediction, predict
from lazygt.sweeps.knobs import Combination, combinations, matching
from lazygt.sweeps.report import FAILED, MEASURED, SIMULATED, SKIPPED, Row, Sweep
from lazygt.sweeps.shares import Shares, measured_shares, simulated_shares
from lazygt.sweeps.steps import Steps, StepsDone, Stopwatch, Window

#: Share of a rank's memory that is used: workspaces of kernels, and an allocator's waste, are in no
#: prediction.
SAFE = 0.9
#: Steps that a dry run does: the first makes the optimizer's state, and a step has to be repeated.
DRY_STEPS = 4

#: Runs the program once: the combination (of which ``passed`` is the program's), the settings of
#: its sessions, and a callback for these. Raises the program's errors.
Run = Callable[[Combination, Mapping[str, Any], Callable[[Session], object]], object]


class ProgramFailed(Exception):
    """The program ended in an error, which this says in a line."""


class KnobsIgnored(ProgramFailed):
    """The program has nothing that the knobs could act upon."""


@dataclass(frozen=True)
class Ground:
    """Settings that all combinations share.

    Attributes:
        settings: of every session.
        simulated: True if the ranks are not there.
        memory: bytes that a rank may use; None: 90 % of those that there are.
        window: the measured steps.
        tick: called after each step, dry or not.
    """

    settings: Mapping[str, Any]
    simulated: bool
    memory: float | None = None
    window: Window = field(default_factory=Window)
    tick: Callable[[], object] = lambda: None

    @property
    def how(self) -> str:
        return SIMULATED if self.simulated else MEASURED

    @property
    def ticks(self) -> int:
        """Steps of a combination."""
        return DRY_STEPS + (0 if self.simulated else self.window.total)


def rows_of(combos: Sequence[Combination], run: Run, ground: Ground) -> Iterator[Row]:
    """Yield a row for each combination, as they come. One that fails is a row, too."""
    for combo in combos:
        try:
            yield _row(combo, run, ground)
        except Exception as error:  # noqa: BLE001 - any error of the program is told in its row
            yield Row(combo, ground.how, FAILED, note=_line(error))


def _row(combo: Combination, run: Run, ground: Ground) -> Row:
    try:
        prediction = _predicted(combo, run, ground)
    except Exception as error:
        if ground.simulated or isinstance(error, KnobsIgnored):
            raise
        # zeros stood for the values that the program read: with these it may go on
        row = _measured(combo, run, ground, 0)
        return replace(row, note=f"its memory was not looked at before: {_line(error)}")
    peak, room = prediction.peak_bytes, _room(prediction, ground)
    if peak > room:
        note = f"a rank would need {amount(peak, 'B')}, and {amount(int(room), 'B')} are safe"
        return Row(combo, ground.how, SKIPPED, peak_bytes=peak, note=note)
    if not ground.simulated:
        return _measured(combo, run, ground, prediction.tokens)
    return Row(
        combo, SIMULATED, step_seconds=prediction.step_seconds, tokens=prediction.tokens,
        peak_bytes=peak, shares=simulated_shares(prediction),
    )  # fmt: skip


def _predicted(combo: Combination, run: Run, ground: Ground) -> Prediction:
    """Predict a step of a combination, without computing anything."""
    watched: dict[int, Living] = {}

    def opened(session: Session) -> None:
        watched[id(session)] = Living(session)
        steps.opened(session)

    steps = Steps(DRY_STEPS, lambda session, done: ground.tick())
    with _forced_run(combo) as sessions:
        try:
            run(combo, {**ground.settings, **DRY}, sessions.opened(opened))
        except StepsDone:
            pass
        finally:
            steps.close()
    if steps.session is None:
        raise ProgramFailed("no torch optimizer stepped in a session: there is no step to look at")
    session = steps.session
    return predict(session, session.machine, watched[id(session)])


def _measured(combo: Combination, run: Run, ground: Ground, tokens: int) -> Row:
    watch = Stopwatch(ground.window, ground.tick)
    with _forced_run(combo) as sessions:
        try:
            # a worker that dies is an error, and no snapshot falls into one window and not another
            settings = {**ground.settings, "recover": "off"}
            run(combo, settings, sessions.opened(watch.opened))
        except StepsDone:
            pass
        finally:
            watch.close()
    if watch.step_seconds is None:
        raise ProgramFailed(
            f"the program ended after {watch.steps.done} steps of {ground.window.total}: let it do "
            f"more, or measure fewer"
        )
    shares = _shares(watch)
    return Row(
        combo, MEASURED, step_seconds=watch.step_seconds, tokens=tokens,
        peak_bytes=watch.peak_bytes, shares=shares,
        note="" if shares else f"ended after {watch.steps.done} steps: shares are not known",
    )  # fmt: skip


def _shares(watch: Stopwatch) -> Shares | None:
    session, timeline, seconds = watch.steps.session, watch.timeline, watch.step_seconds
    if timeline is None or session is None or seconds is None or not timeline.timed:
        return None
    return measured_shares(
        timeline.timed, seconds, watch.window.profiled, session.mesh, session.machine
    )


class _Sessions:
    """The sessions that a run has opened."""

    def __init__(self) -> None:
        self.all: list[Session] = []

    def opened(self, tell: Callable[[Session], object]) -> Callable[[Session], object]:
        """Return a callback that notes a session, and reports it."""

        def opened(session: Session) -> None:
            self.all.append(session)
            tell(session)

        return opened


@contextmanager
def _forced_run(combo: Combination) -> Iterator[_Sessions]:
    """Run the program with a combination's overrides; no worker survives it."""
    sessions = _Sessions()
    with ExitStack() as stack:
        forced = stack.enter_context(forced_knobs(**combo.forced))
        try:
            yield sessions
        finally:
            for session in sessions.all:
                session.close()
        try:
            forced.check()
        except ValueError as error:
            raise KnobsIgnored(str(error)) from None


def _room(prediction: Prediction, ground: Ground) -> float:
    """Return the bytes that a rank may use."""
    if ground.memory is not None:
        return ground.memory
    if ground.simulated:
        return SAFE * prediction.machine.memory.capacity
    if torch.cuda.is_available() and ground.settings.get("device") != "cpu":
        return SAFE * float(torch.cuda.get_device_properties(0).total_memory)
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = 1 if prediction.mesh is None else prediction.mesh.world_size
    return SAFE * pages / ranks


def _line(error: Exception) -> str:
    """Return an error in a line."""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, ProgramFailed):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- ``lazygt.sweep``: the combinations of a function's knobs --------------------------------------


def sweep(
    program: Callable[..., object],
    knobs: Mapping[str, Sequence[Any] | str],
    *,
    mesh: Mapping[str, int] | str | None = None,
    gpus: str | None = None,
    hosts: int | None = None,
    machine: str | os.PathLike[str] | None = None,
    baseline: str | None = None,
    target: float = 15.0,
    memory: float | None = None,
    window: Window | None = None,
) -> Sweep:
    """Run a program with every combination of knobs, or simulate it, and say which is best.

    Args:
        program: called in a session of its own for each combination; it trains for as many steps
            as ``window`` has, and is ended after them.
        knobs: values by knob. ``wrap``, ``bucket_cap_mb``, ``reshard`` and ``limit_all_gathers``
            are forced upon its calls of ``lazygt.fully_shard``; it is called with the others as
            keyword arguments, which are texts.
        mesh: the workers; with ``gpus`` or ``machine`` ranks that need not be there.
        gpus: such as ``8xB200``; simulates. See ``lazygt.simulate``, also for ``hosts``.
        machine: a name such as ``h100``, or a machine file; simulates.
        baseline: the combination that others are compared with, such as ``wrap=auto,reshard=1``;
            None: the first.
        target: per cent by which the best has to be better.
        memory: bytes that a rank may use; None: 90 % of those that there are.
        window: which steps are measured; None: 20, after 5 of warm-up, then 5 are profiled.

    Raises:
        MachineError: there is no such machine, or its file is wrong.
        ValueError: a knob or a value is wrong, there is no such baseline, or the mesh is none, or
            not of as many ranks as GPUs.
    """
    combos = combinations(knobs)
    first = 0 if baseline is None else matching(combos, baseline)
    ranks = mesh if mesh is None or isinstance(mesh, str) else str(Mesh.of(mesh))
    if gpus is not None:
        named = Gpus.parse(gpus, hosts, None if machine is None else os.fspath(machine))
        ranks, machine = named.mesh(ranks), named.machine
    elif hosts is not None:
        raise ValueError("hosts says where GPUs are: give gpus, too")
    settings: dict[str, Any] = {} if ranks is None else {"mesh": ranks}
    if machine is not None:
        device = machine_of(machine, cache_setting()).device
        settings |= {"machine": os.fspath(machine), "device": device}
    simulated = gpus is not None or machine is not None
    ground = Ground(settings, simulated, memory, window or Window())
    title = sweep_title(getattr(program, "__name__", "program"), len(combos), ground)
    return Sweep(title, list(rows_of(combos, _calling(program), ground)), first, target)


def sweep_title(what: str, count: int, ground: Ground) -> str:
    """Return the title of a sweep: program, place and number of combinations."""
    places = [str(ground.settings[key]) for key in ("mesh", "machine") if key in ground.settings]
    where = f" on {', '.join(places)}" if places else ""
    counted = "1 combination" if count == 1 else f"{count} combinations"
    return f"{what}{where}: {counted}, {ground.how}"


def _calling(program: Callable[..., object]) -> Any:
    def run(
        combo: Combination, settings: Mapping[str, Any], opened: Callable[[Session], object]
    ) -> None:
        with Session(**settings) as session:
            opened(session)
            program(**combo.passed)

    return run
