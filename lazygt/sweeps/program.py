"""``lazygt.sweep``: the combinations of a function's knobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lazygt.config import cache_setting
from lazygt.graph.mesh import Mesh
from lazygt.machine import Gpus, machine_of
from lazygt.session import Session
from lazygt.sweeps.knobs import Combination, combinations, matching
from lazygt.sweeps.report import Sweep
from lazygt.sweeps.running import Ground, rows_of
from lazygt.sweeps.steps import Window


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
