"""Results of simulations by number of GPUs and by requests a second."""

from __future__ import annotations

from typing import NamedTuple

from lazygt.serving.formulas import HIGH_LOAD
from lazygt.serving.provision import Gpus
from lazygt.serving.simulation import Run

#: Of the GPUs, at which latency is simulated for the curve.
CURVE_LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, HIGH_LOAD, 0.9, 0.95, 0.98)
#: Why so many GPUs.
FORMULAS, GIVEN = "as the formulas say", "as given"
AT_HIGH_LOAD, FOR_SLO = f"busy for {HIGH_LOAD:.0%}", "fewest for the SLO"


class Choice(NamedTuple):
    """So many GPUs.

    Attributes:
        gpus: of each stage; 0 where there are none.
        load: of the busiest stage, by the formulas.
    """

    why: str
    gpus: Gpus
    load: float
    run: Run


class Point(NamedTuple):
    """So many requests a second.

    Attributes:
        load: of the busiest stage, by the formulas.
        mean: seconds by the formulas.
    """

    load: float
    qps: float
    mean: float
    run: Run
