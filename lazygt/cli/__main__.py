"""Console script, and ``python -m lazygt.cli``.

``lazygt top`` starts without torch, which all other commands load."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the requested command."""
    if sys.argv[1:2] == ["top"]:
        # why: ``top`` needs no torch, and the other commands need no ``top``
        from lazygt.observe.top.command import alone

        alone()
    else:
        # why: as above
        from lazygt.cli.app import main as others

        others()


if __name__ == "__main__":
    main()
