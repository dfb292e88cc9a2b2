"""Who may connect: asked by ZMQ for each handshake, before a byte of a message is read (ZAP)."""

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
#: A context has room for one authenticator: that which all its listeners share.
_shared: WeakKeyDictionary[zmq.Context[zmq.Socket[bytes]], ThreadAuthenticator] = (
    WeakKeyDictionary()
)


class Guard:
    """Asks ``allowed`` about the public keys of those who connect to one listener.

    Args:
        context: of the listener's socket.
        allowed: gives the name of a public key (Z85), or None.

    Attributes:
        domain: what the listener's socket is to have as its ``ZAP_DOMAIN``.
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
        """What pyzmq's authenticator asks."""
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
    """Start one, once ZMQ has let go of the name of the one before it, which it tells nobody.

    Raises:
        zmq.ZMQError: it does not, or there are no sockets left.
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
