"""``lazygt.transfer(...)``: an extractor, a sender and a progress bar tied together."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from tqdm import tqdm

from lazygt.transfer.extractor import Extractor, ModuleExtractor
from lazygt.transfer.report import Progress, TransferReport
from lazygt.transfer.sender import Sender


def transfer(
    source: nn.Module | Mapping[str, Tensor] | Extractor,
    sender: Sender,
    *,
    version: int | None = None,
    timeout: float = 60.0,
    progress: bool | None = None,
) -> TransferReport:
    """Give every receiver of ``sender`` the weights of ``source``, or none of them.

    Args:
        source: a module, a mapping of tensors, or an extractor made with casts, groups or other
            names. The workers of a lazygt session, sharded or not, write their own values into
            shared memory; other senders fetch them through this process.
        version: greater than the receivers' own; by default the last one plus 1.
        timeout: seconds for the whole transfer.
        progress: draw a bar; None: where standard error is a terminal.

    Raises:
        TypeError: the source is none of these, or has a parameter that can't travel.
        TransferError: it failed; receivers keep their version, and it may be tried again at
            once. Its subclasses say who and why: see `lazygt.transfer.errors`.
        ExecutionError, WorkerDied, WorkerFrozen: the session could not compute the values, or
            lost a worker; receivers keep their version, too.
    """
    if isinstance(source, nn.Module | Mapping):
        source = ModuleExtractor(source)
    elif not hasattr(source, "manifest"):
        raise TypeError(
            f"transfer() of a {type(source).__name__}: expected a module, a mapping of tensors, "
            f"or an extractor"
        )
    off = None if progress is None else not progress
    with tqdm(
        desc="transfer", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=off
    ) as bar:

        def show(at: Progress) -> None:
            bar.total = at.total
            bar.update(at.done - bar.n)

        return sender.send(source, version=version, timeout=timeout, progress=show)
