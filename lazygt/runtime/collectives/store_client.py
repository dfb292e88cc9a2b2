"""Client of the session's store for a rank; torch's backends, such as NCCL, can use it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import zmq
from torch.distributed.distributed_c10d import Store

from lazygt.errors import ProtocolError, StoreLost
from lazygt.runtime.cluster.keys import derived
from lazygt.runtime.collectives.store import ANSWER, NUMBER, REFUSED, ROLE, Frames, keep_alive

SILENCE = 20.0
"""Seconds without a word from the store until it is lost; more than a network may fail for."""

_AGAIN_SECONDS = 1.0  # until a request is repeated


class StoreClient(Store):
    """Session's store, from another process. Each thread has a connection of its own.

    Args:
        endpoint: endpoint of the ``StoreServer``.
        token: the session's secret.
        timeout: seconds to wait for a name to be set.
        silence: seconds of silence until the store counts as lost.
    """

    def __init__(
        self, endpoint: str, token: bytes, timeout: float, silence: float = SILENCE
    ) -> None:
        super().__init__()
        self.endpoint, self._token, self._silence = endpoint, token, silence
        self._seconds = timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads = threading.local()
        self._clones: list[StoreClient] = []

    def set(self, key: str | bytes, value: str | bytes) -> None:
        """Set a name's value.

        Raises:
            StoreLost: the store does not answer; all other methods raise this, too.
        """
        self._ask(b"set", _bytes(key), _bytes(value))

    def get(self, key: str | bytes) -> bytes:
        """Return a name's value, once it is set.

        Raises:
            TimeoutError: it was not set in time.
        """
        return self._wait(b"get", [key], self._seconds)[0]

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Wait until all of these names are set.

        Raises:
            TimeoutError: they were not in time.
        """
        self._wait(b"wait", keys, self._seconds if timeout is None else timeout.total_seconds())

    def add(self, key: str | bytes, amount: int) -> int:
        """Add to a number, 0 if missing; return the sum."""
        return int(self._ask(b"add", _bytes(key), str(amount).encode())[0])

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Return whether all of these names are set."""
        return self._ask(b"check", *map(_bytes, keys)) == [b"1"]

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a name; return whether it was there."""
        return self._ask(b"delete", _bytes(key)) == [b"1"]

    def delete_all(self, prefix: str) -> int:
        """Remove all names with this prefix; return their number."""
        return int(self._ask(b"delete_all", prefix.encode())[0])

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a name if it has the expected value (empty: or none); return its value then."""
        return self._ask(b"compare", *map(_bytes, (key, expected, desired)))[0]

    def num_keys(self) -> int:
        """Return the number of names."""
        return int(self._ask(b"count")[0])

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time to wait for a name to be set."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Time to wait for a name to be set."""
        return timedelta(seconds=self._seconds)

    def clone(self) -> StoreClient:
        """Return the store for one more user; it is closed with this one.

        This one keeps it alive: torch's C++ would lose its Python part.
        """
        self._clones.append(StoreClient(self.endpoint, self._token, self._seconds, self._silence))
        return self._clones[-1]

    def close(self) -> None:
        """Close the connections; no thread may have a request. Idempotent."""
        for clone in self._clones:
            clone.close()
        self._context.destroy(0)

    def _wait(self, op: bytes, keys: Sequence[str | bytes], seconds: float) -> Frames:
        try:
            return self._ask(op, *map(_bytes, keys), seconds=seconds)
        except TimeoutError:
            names = ", ".join(_bytes(key).decode(errors="replace") for key in keys)
            raise TimeoutError(
                f"nobody has set {names} in the store at {self.endpoint} within {seconds:g} seconds"
            ) from None

    def _ask(self, op: bytes, *arguments: bytes, seconds: float = float("inf")) -> Frames:
        asking: _Asking | None = getattr(self._threads, "asking", None)
        if asking is None:
            asking = self._threads.asking = _Asking(self._context, self.endpoint, self._token)
        state, *frames = asking.ask([op, *arguments], seconds, self._silence)
        if state == REFUSED:
            raise ProtocolError(f"the store refuses {frames[0].decode(errors='replace')}")
        return frames


class _Asking:
    """One thread's connection to the store."""

    def __init__(self, context: Any, endpoint: str, token: bytes) -> None:
        self._endpoint, self._token, self._number = endpoint, token, 0
        keys, server = derived(token, f"{ROLE} client"), derived(token, ROLE)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.ROUTING_ID, b"s" + secrets.token_bytes(16))
        keep_alive(self._socket)
        self._socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
        self._socket.connect(endpoint)

    def __del__(self) -> None:
        self._socket.close(0)  # its thread has ended, or the store is closed

    def ask(self, request: Frames, seconds: float, silence: float) -> Frames:
        """Return the store's final reply: its state, answered or refused, and the frames."""
        self._number += 1
        message = [self._token, NUMBER.pack(self._number), *request]
        heard = begun = time.monotonic()
        self._socket.send_multipart(message)
        while True:
            now = time.monotonic()
            if now - begun >= seconds:
                raise TimeoutError
            if now - heard >= silence:
                raise StoreLost(self._endpoint, silence)
            left = min(_AGAIN_SECONDS, silence - (now - heard), seconds - (now - begun))
            if not self._socket.poll(max(round(left * 1000), 1)):
                self._socket.send_multipart(message)
                continue
            number, *said = self._socket.recv_multipart()
            heard = time.monotonic()
            if number == message[1] and said[0] in (ANSWER, REFUSED):
                return said


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
