"""Cost models: machines, their figures, and machine files.

All costs come from a ``Machine``. ``machine_of`` finds one: ``machines/`` has the shipped ones, and
``lazygt calibrate`` writes one for the machine on which it runs.
"""

from lazygt.errors import former_names
from lazygt.machine.file import shipped
from lazygt.machine.find import (
    CALIBRATED,
    Gpus,
    calibrated_path,
    default_machine,
    machine_of,
    on_hosts,
)
from lazygt.machine.model import Figure, LinkFigures, Machine
from lazygt.machine.prices import collective_seconds

__all__ = [
    "CALIBRATED",
    "Figure",
    "Gpus",
    "LinkFigures",
    "Machine",
    "calibrated_path",
    "collective_seconds",
    "default_machine",
    "machine_of",
    "on_hosts",
    "shipped",
]

__getattr__ = former_names(__name__, {"Link": "LinkFigures"})
