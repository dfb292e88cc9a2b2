"""The commands of ``lazygt``, one small file each.

A new one is a file with a function, and a line here: in ``PLAIN``, or in ``WITH_SCRIPT`` where it
runs a script (see ``base.run``).
"""

from __future__ import annotations

from lazygt.commands.diff import diff
from lazygt.commands.doctor import doctor
from lazygt.commands.dump import dump
from lazygt.commands.explain import explain
from lazygt.commands.profile import profile
from lazygt.commands.viz import viz
from lazygt.commands.why import why

PLAIN = (diff, doctor)
WITH_SCRIPT = (dump, explain, profile, viz, why)

__all__ = ["PLAIN", "WITH_SCRIPT"]
