"""Runs of a sweep: each combination is simulated, and measured where it can be.

Every combination is recorded and planned once without computing, which predicts a rank's memory and
the tokens of a step. Without real ranks a step is simulated from that; with real workers the
program runs for real, if the memory suffices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lazygt.config import cache_setting
from lazygt.graph.text import amount
from lazygt.machine import machine_of
from lazygt.machine.find import requested
from lazygt.parallel.fsdp_overrides import forced_knobs
from lazygt.session import Session
from lazygt.settings import grouped
from lazygt.simulation import DRY, LiveValue, Prediction, predict
from lazygt.sweeps.knobs import Combination, combinations, matching
from lazygt.sweeps.report import FAILED, MEASURED, SIMULATED, SKIPPED, Row, Sweep
from lazygt.sweeps.steps import (
    Shares,
    Steps,
    StepsDone,
    Stopwatch,
    Window,
    measured_shares,
    simulated_shares,
)

#: Usable share of a rank's memory; predictions omit workspaces of kernels and fragmentation.
SAFE = 0.9
#: Steps of a dry run: the first makes the optimizer's state; a prediction needs a repetition.
DRY_STEPS = 4

#: Function that runs the program once; arguments: the combination, the settings of its sessions,
#: and a callback for each new session. Raises the program's errors.
Run = Callable[[Combination, Mapping[str, Any], Callable[[Session], object]], object]


class ProgramFailed(Exception):
    """Failure of the program, with its error in one line."""


class KnobsIgnored(ProgramFailed):
    """The program has no calls that the knobs apply to."""


@dataclass(frozen=True)
class SweepSetup:
    """Conditions that all combinations share.

    Attributes:
        settings: settings of every session.
        simulated: True without real ranks.
        memory: bytes that a rank may use; None: 90 % of its memory.
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
        """Origin of the figures."""
        return SIMULATED if self.simulated else MEASURED

    @property
    def ticks(self) -> int:
        """Number of steps of a combination, for a progress bar."""
        return DRY_STEPS + (0 if self.simulated else self.window.total)


def run_combinations(combos: Sequence[Combination], run: Run, setup: SweepSetup) -> Iterator[Row]:
    """Run the combinations one by one, and yield their rows; a failure is a row, too."""
    for combo in combos:
        try:
            yield _row(combo, run, setup)
        except Exception as error:  # noqa: BLE001 - any error of the program becomes its row
            yield Row(combo, setup.how, FAILED, note=_error_line(error))


def _row(combo: Combination, run: Run, setup: SweepSetup) -> Row:
    """Predict a combination; skip it if its memory is too large, else measure it if possible."""
    try:
        prediction = _predicted(combo, run, setup)
    except Exception as error:
        if setup.simulated or isinstance(error, KnobsIgnored):
            raise
        # the dry run read zeros; with real values the program may succeed
        row = _measured(combo, run, setup, 0)
        return replace(row, note=f"its memory was not looked at before: {_error_line(error)}")
    peak, limit = prediction.peak_bytes, _memory_limit(prediction, setup)
    if peak > limit:
        note = f"a rank would need {amount(peak, 'B')}, and {amount(int(limit), 'B')} are safe"
        return Row(combo, setup.how, SKIPPED, peak_bytes=peak, note=note)
    if not setup.simulated:
        return _measured(combo, run, setup, prediction.tokens)
    return Row(
        combo, SIMULATED, step_seconds=prediction.step_seconds, tokens=prediction.tokens,
        peak_bytes=peak, shares=simulated_shares(prediction),
    )  # fmt: skip


def _predicted(combo: Combination, run: Run, setup: SweepSetup) -> Prediction:
    """Predict a step of a combination, without computing anything."""
    observers: dict[int, LiveValue] = {}

    def on_session_opened(session: Session) -> None:
        """Observe a session's values from its beginning, and count its steps."""
        observers[id(session)] = LiveValue(session)
        steps.on_session_opened(session)

    steps = Steps(DRY_STEPS, lambda session, done: setup.tick())
    _run_steps(combo, run, {**setup.settings, **DRY}, on_session_opened, steps.close)
    if steps.session is None:
        raise ProgramFailed("no torch optimizer stepped in a session: there is no step to look at")
    session = steps.session
    return predict(session, session.machine, observers[id(session)])


def _measured(combo: Combination, run: Run, setup: SweepSetup, tokens: int) -> Row:
    """Run a combination for real, and return its measured row.

    Args:
        tokens: tokens of a step, as predicted.
    """
    stopwatch = Stopwatch(setup.window, setup.tick)
    # no recovery: a dead worker is an error, and no snapshot disturbs a window
    settings = {**setup.settings, "recovery": "off"}
    _run_steps(combo, run, settings, stopwatch.on_session_opened, stopwatch.close)
    if stopwatch.step_seconds is None:
        raise ProgramFailed(
            f"the program ended after {stopwatch.steps.done} steps of {setup.window.total}: "
            f"let it do more, or measure fewer"
        )
    shares = _shares(stopwatch)
    return Row(
        combo, MEASURED, step_seconds=stopwatch.step_seconds, tokens=tokens,
        peak_bytes=stopwatch.peak_bytes, shares=shares,
        note="" if shares else f"ended after {stopwatch.steps.done} steps: shares are not known",
    )  # fmt: skip


def _shares(stopwatch: Stopwatch) -> Shares | None:
    """Return the shares of the profiled steps; None if the program ended before them."""
    session, timeline, seconds = stopwatch.steps.session, stopwatch.timeline, stopwatch.step_seconds
    if timeline is None or session is None or seconds is None or not timeline.timed:
        return None
    return measured_shares(
        timeline.timed, seconds, stopwatch.window.profiled, session.mesh, session.machine
    )


def _run_steps(
    combo: Combination,
    run: Run,
    settings: Mapping[str, Any],
    on_session_opened: Callable[[Session], object],
    close: Callable[[], object],
) -> None:
    """Run a combination with its overrides up to its last step, and close its sessions.

    Args:
        on_session_opened: called with each new session.
        close: called at the end of the program.

    Raises:
        KnobsIgnored: the program has no call that the knobs apply to.
        Exception: the program's own errors.
    """
    sessions: list[Session] = []

    def register(session: Session) -> None:
        sessions.append(session)
        on_session_opened(session)

    with forced_knobs(**combo.forced) as forced:
        try:
            run(combo, settings, register)
        except StepsDone:
            pass
        finally:
            close()
            for session in sessions:
                session.close()
        try:
            forced.check()
        except ValueError as error:
            raise KnobsIgnored(str(error)) from None


def _memory_limit(prediction: Prediction, setup: SweepSetup) -> float:
    """Return the bytes that a rank may use: the setting, or 90 % of its memory."""
    if setup.memory is not None:
        return setup.memory
    if setup.simulated:
        return SAFE * prediction.machine.memory.capacity
    if torch.cuda.is_available() and setup.settings.get("device") != "cpu":
        return SAFE * float(torch.cuda.get_device_properties(0).total_memory)
    host_bytes: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks = 1 if prediction.mesh is None else prediction.mesh.world_size
    return SAFE * host_bytes / ranks


def _error_line(error: Exception) -> str:
    """Return an error's type and first line."""
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
    """Run a program with every combination of knobs, or simulate it, and report the best.

    Args:
        program: function to train with, called in a new session for each combination; it is ended
            after the steps of ``window``.
        knobs: values by knob. ``wrap``, ``bucket_cap_mb``, ``reshard`` and ``limit_all_gathers``
            override arguments of ``lazygt.fully_shard``; others are passed to the program as
            keyword arguments, as texts.
        mesh: mesh of the workers; with ``gpus`` or ``machine`` the ranks need not exist.
        gpus: number and kind of GPUs, such as ``8xB200``; simulates. See ``lazygt.simulate``, also
            for ``hosts``.
        machine: a name such as ``h100``, or a machine file; simulates.
        baseline: combination to compare with, such as ``wrap=auto,reshard=1``; None: the first.
        target: required gain over the baseline, in per cent.
        memory: bytes that a rank may use; None: 90 % of its memory.
        window: phases of a run; None: 5 steps of warm-up, 20 measured, 5 profiled.

    Raises:
        MachineError: there is no such machine, or its file is invalid.
        ValueError: a knob or a value is invalid, there is no such baseline, or the mesh is invalid
            or does not match the GPUs.
    """
    combos = combinations(knobs)
    baseline_index = 0 if baseline is None else matching(combos, baseline)
    mesh_text, machine = requested(gpus, hosts, mesh, machine)
    settings: dict[str, Any] = {} if mesh_text is None else {"mesh": mesh_text}
    if machine is not None:
        device = machine_of(machine, cache_setting()).device
        settings |= {"machine": machine, "device": device}
    simulated = gpus is not None or machine is not None
    setup = SweepSetup(settings, simulated, memory, window or Window())
    title = sweep_title(getattr(program, "__name__", "program"), len(combos), setup)
    return Sweep(
        title, list(run_combinations(combos, _runner(program), setup)), baseline_index, target
    )


def sweep_title(program: str, count: int, setup: SweepSetup) -> str:
    """Return the title of a sweep: program, mesh and machine, number of combinations."""
    targets = [str(setup.settings[key]) for key in ("mesh", "machine") if key in setup.settings]
    location = f" on {', '.join(targets)}" if targets else ""
    counted = "1 combination" if count == 1 else f"{count} combinations"
    return f"{program}{location}: {counted}, {setup.how}"


def _runner(program: Callable[..., object]) -> Run:
    """Return a function that calls the program in a new session."""

    def run(
        combo: Combination,
        settings: Mapping[str, Any],
        on_session_opened: Callable[[Session], object],
    ) -> None:
        """Call the program once; see ``Run``."""
        with Session(**grouped(settings)) as session:
            on_session_opened(session)
            program(**combo.passed)

    return run
