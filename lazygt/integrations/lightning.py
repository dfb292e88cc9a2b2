"""Lightning on lazygt: ``Trainer(strategy=LazyGTStrategy())`` inside a session.

Lightning asks an accelerator for its devices, and a strategy for the model's device. The session's
workers are one device, so the strategy is Lightning's own for one device.

Nothing else of lazygt imports this module or needs ``lightning`` or ``pytorch_lightning``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lazygt.record.context import NAME, current_session, recorder
from lazygt.session import current

# Lightning has two packages with the same classes; what a program has imported is what it uses.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
    from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
else:
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry


class LazyGTAccelerator(Accelerator):
    """The workers of the open session, which are one device to Lightning."""

    def setup_device(self, device: torch.device) -> None:
        """Check that the strategy puts the model on this device.

        Raises:
            NoSession: outside ``with lazygt.session():``.
            ValueError: the Trainer was given this accelerator without ``LazyGTStrategy``.
        """
        recorder()
        if device.type != NAME:
            raise ValueError(
                f"LazyGTAccelerator: Lightning has chosen a strategy for device {str(device)!r}; "
                f"expected device {NAME!r}: write Trainer(strategy=LazyGTStrategy())"
            )

    def teardown(self) -> None:
        """Nothing to do: the session ends its workers."""

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """Return the Trainer's number of devices: one, for any number of workers.

        Raises:
            ValueError: for any other number.
        """
        if str(devices) not in ("1", "auto", "-1"):
            raise ValueError(
                f"Trainer(devices={devices!r}): a lazygt session is one device to Lightning; "
                f"leave devices= out and open lazygt.session(workers=...) instead"
            )
        return 1

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The one device."""
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return whether a session is open."""
        return current_session() is not None

    @staticmethod
    def name() -> str:
        """Return its name in ``Trainer(accelerator=...)``."""
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Counts of the session, for Lightning's DeviceStatsMonitor."""
        return {
            f"{NAME}.{name}": value
            for name, value in current().stats().items()
            if isinstance(value, int)
        }


class LazyGTStrategy(SingleDeviceStrategy):
    """Trains on the open session: ``Trainer(strategy=LazyGTStrategy())``."""

    strategy_name = NAME

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("accelerator", LazyGTAccelerator())
        super().__init__(device=torch.device(NAME, 0), **settings)


AcceleratorRegistry.register(NAME, LazyGTAccelerator, description="lazygt's session", override=True)
StrategyRegistry.register(NAME, LazyGTStrategy, description="lazygt's session", override=True)
