"""Access control of listeners by public key, through ZMQ's ZAP.

ZMQ asks at each handshake, before a byte of a message is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from weakref import WeakKeyDictionary

import zmq
from zmq.auth.thread import ThreadAuthenticator

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_domains = count()
_LET_GO_SECONDS, _LOOK_SECONDS = 10.0, 0.005
#: The one authenticator that a context has room for, shared by all its listeners.
_shared: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator] = (
    WeakKeyDictionary()
)


class Guard:
    """Authenticator of one listener's peers, by their public keys.

    Args:
        context: context of the listener's socket.
        allowed: returns the name of a public key (Z85), or None.

    Attributes:
        domain: the ``ZAP_DOMAIN`` for the listener's socket.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], allowed: Callable[[str], str | None]
    ) -> None:
        self.domain = f"lazygt-{next(_domains)}"
        self._context, self._allowed = context, allowed
        with _lock:
            authenticator = _shared.get(context)
            if authenticator is None:
                authenticator = ThreadAuthenticator(context)
                # Sockets of this context that ask for no domain stay as they are without us.
                authenticator.configure_curve_callback("*", _Everybody())
                _start(authenticator)
                _shared[context] = authenticator
            authenticator.configure_curve_callback(self.domain, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a key is allowed; called by pyzmq's authenticator."""
        try:
            return self._allowed(key.decode()) is not None
        except Exception:  # noqa: BLE001 - its thread must go on, and nobody gets in meanwhile
            _log.exception("a client was refused, since its key could not be looked up")
            return False

    def close(self) -> None:
        with _lock:
            authenticator = _shared[self._context]
            del authenticator.credentials_providers[self.domain]
            if len(authenticator.credentials_providers) == 1:
                del _shared[self._context]
                authenticator.stop()


def _start(authenticator: ThreadAuthenticator) -> None:
    """Start an authenticator, once ZMQ has released the name of its predecessor.

    ZMQ does not signal that.

    Raises:
        zmq.ZMQError: the name is not released in time, or there are no sockets left.
    """
    until = time.monotonic() + _LET_GO_SECONDS
    while True:
        try:
            authenticator.start()
        except zmq.ZMQError as error:
            authenticator.stop()
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until:
                raise
        else:
            return
        time.sleep(_LOOK_SECONDS)


class _Everybody:
    def callback(self, domain: str, key: bytes) -> bool:
        return True
