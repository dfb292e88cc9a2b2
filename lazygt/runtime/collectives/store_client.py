"""A rank's end of the session's store; torch's own backends, such as NCCL, can meet there."""

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

_AGAIN_SECONDS = 1.0  # until a question is asked again


class StoreClient(Store):
    """The session's store, from another process. Each thread has a connection of its own.

    Args:
        endpoint: of the ``StoreServer``.
        token: the session's secret.
        timeout: seconds that a name may take to be set.
        silence: seconds without a word from the store until it is lost.
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
            StoreLost: for this and all that follow: the store does not answer.
        """
        self._ask(b"set", _bytes(key), _bytes(value))

    def get(self, key: str | bytes) -> bytes:
        """A name's value, once it is set.

        Raises:
            TimeoutError: nobody has set it in time.
        """
        return self._wait(b"get", [key], self._seconds)[0]

    def wait(self, keys: Sequence[str | bytes], timeout: timedelta | None = None) -> None:
        """Return when all of these are set.

        Raises:
            TimeoutError: they were not in time.
        """
        self._wait(b"wait", keys, self._seconds if timeout is None else timeout.total_seconds())

    def add(self, key: str | bytes, amount: int) -> int:
        """Add to a number, which is 0 where there is none; what it is then."""
        return int(self._ask(b"add", _bytes(key), str(amount).encode())[0])

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all of these are set."""
        return self._ask(b"check", *map(_bytes, keys)) == [b"1"]

    def delete_key(self, key: str | bytes) -> bool:
        """Remove a name; whether it was there."""
        return self._ask(b"delete", _bytes(key)) == [b"1"]

    def delete_all(self, prefix: str) -> int:
        """Remove all names that begin so; how many."""
        return int(self._ask(b"delete_all", prefix.encode())[0])

    def compare_set(self, key: str | bytes, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a name that has the expected value (empty: or none); what it has then."""
        return self._ask(b"compare", *map(_bytes, (key, expected, desired)))[0]

    def num_keys(self) -> int:
        """How many names there are."""
        return int(self._ask(b"count")[0])

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a name may take to be set."""
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The same."""
        return timedelta(seconds=self._seconds)

    def clone(self) -> StoreClient:
        """The store for one more user; closed with this one, which keeps it: torch's C++ would lose
        what is Python's of it.
        """
        self._clones.append(StoreClient(self.endpoint, self._token, self._seconds, self._silence))
        return self._clones[-1]

    def close(self) -> None:
        """Give the connections back; no thread may be asking. Idempotent."""
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
        """What the store says at last: whether it answers or refuses, and the frames of that."""
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
