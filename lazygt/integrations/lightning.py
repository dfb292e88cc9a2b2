"""Lightning on lazygt: ``Trainer(strategy=LazyGTStrategy())`` inside a session.

Lightning gets the devices from an accelerator, and the model's device from a strategy. A session's
workers are one device to Lightning, so the strategy is its own single-device strategy.

No other module of lazygt imports this one, or needs ``lightning`` or ``pytorch_lightning``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from lazygt.record.context import NAME, current_session, recorder
from lazygt.session import current

# Lightning has two packages with the same classes: take the one that the program has imported.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
    from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry
else:
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry


class LazyGTAccelerator(Accelerator):
    """Accelerator: the workers of the open session, as one device."""

    def setup_device(self, device: torch.device) -> None:
        """Check that the strategy puts the model on this device.

        Raises:
            NoSession: outside ``with lazygt.session():``.
            ValueError: the Trainer has this accelerator without ``LazyGTStrategy``.
        """
        recorder()
        if device.type != NAME:
            raise ValueError(
                f"LazyGTAccelerator: Lightning has chosen a strategy for device {str(device)!r}; "
                f"expected device {NAME!r}: write Trainer(strategy=LazyGTStrategy())"
            )

    def teardown(self) -> None:
        """Do nothing: the session ends its workers."""

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
        """Return the one device."""
        return [torch.device(NAME, 0)]

    @staticmethod
    def auto_device_count() -> int:
        """Return 1."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return whether a session is open."""
        return current_session() is not None

    @staticmethod
    def name() -> str:
        """Return the accelerator's name in ``Trainer(accelerator=...)``."""
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return the session's counts, for Lightning's DeviceStatsMonitor."""
        return {
            f"{NAME}.{name}": value
            for name, value in current().stats().items()
            if isinstance(value, int)
        }


class LazyGTStrategy(SingleDeviceStrategy):
    """Strategy that trains in the open session: ``Trainer(strategy=LazyGTStrategy())``."""

    strategy_name = NAME

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("accelerator", LazyGTAccelerator())
        super().__init__(device=torch.device(NAME, 0), **settings)


AcceleratorRegistry.register(NAME, LazyGTAccelerator, description="lazygt's session", override=True)
StrategyRegistry.register(NAME, LazyGTStrategy, description="lazygt's session", override=True)
