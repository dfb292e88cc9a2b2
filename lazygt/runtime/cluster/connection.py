"""Connections between hosts: encrypted, authenticated, and reliable.

    listener = Listener(context, "10.0.0.1", 7000, keys, keyring.allows, 1 << 30)
    connection = listener.accept()                                              # at one end
    connection = dial(context, "tcp://10.0.0.1:7000", keys, server_public, ...)  # at the other

Both ends prove a key (CURVE) before any of their messages is read. A link that is down for a while
delays messages and loses none; a process that has ended is noticed within about a second. See
docs/security.md for the threats that this covers.
"""

from __future__ import annotations

from lazygt.runtime.cluster.dialing import dial
from lazygt.runtime.cluster.listening import Listener
from lazygt.runtime.cluster.reliable import Connection

__all__ = ["Connection", "Listener", "dial"]
