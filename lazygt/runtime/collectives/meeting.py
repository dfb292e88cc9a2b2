"""Rendezvous of ranks on several hosts, for UNIX sockets and encrypted connections.

Ranks of one host use UNIX sockets, ranks of different hosts encrypted connections.

For each group anew, every rank publishes in the session's store its host, and its socket for others
of its host. Of two ranks on different hosts the lower one listens, and publishes in the store its
endpoint and key. Both then prove to each other that they know the session's token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple

from lazygt.runtime.collectives.encrypted import EncryptedPeer
from lazygt.runtime.collectives.sockets import Ends, Rendezvous
from lazygt.runtime.collectives.store import check_interface
from lazygt.runtime.collectives.store_client import StoreClient
from lazygt.runtime.launch.channel import Keys

_LOOK_SECONDS = 0.5  # between two checks that an awaited rank has not joined a later group
_WHICH = range(len(Ends._fields))
_PROOF_BYTES = 32


class Place(NamedTuple):
    """Location of a rank.

    Attributes:
        host: id of its host.
        door: path of its UNIX socket for other ranks of its host.
        address: IP address at which it listens for other hosts.
        backend: name of its backend, see ``backends``.
    """

    host: str
    door: str
    address: str
    backend: str


class Meeting:
    """Rendezvous of this rank with others on any host, in this group and all later ones.

    Args:
        place: location of this rank.
        listener: a descriptor of the socket at ``place.door``, closed with this.
        store: the session's store, closed with this.
        token: the session's secret.
        timeout: seconds to wait for another rank.

    Raises:
        SecurityError: the address is not that of one interface.
    """

    def __init__(
        self,
        rank: int,
        place: Place,
        listener: int,
        store: StoreClient,
        token: bytes,
        timeout: float,
    ) -> None:
        check_interface(place.address)
        self.store = store
        self._rank, self._place, self._token, self._timeout = rank, place, token, timeout
        self._doors: dict[int, str] = {}
        self._local = Rendezvous(rank, listener, self._doors.__getitem__, timeout)
        self._told: list[str] = []

    def meet(self, number: int, others: Collection[int]) -> dict[int, Ends]:
        """Connect with other ranks, all of which do the same for the group of this number.

        Raises:
            OSError: a rank could not be reached, or did not come in time; or the store was lost.
        """
        self._tell(number)
        places = self._places(number, others)
        self._check_backends(places)
        self._doors.clear()
        self._doors.update({rank: place.door for rank, place in places.items()})
        here = [rank for rank in others if places[rank].host == self._place.host]
        there = [rank for rank in others if rank not in here]
        with ExitStack() as undo:
            ends = self._meet_others(number, there, undo)
            ends |= self._local.meet(number, here)
            undo.pop_all()
        return ends

    def close(self) -> None:
        """Stop accepting other ranks. Idempotent."""
        self._local.close()
        self.store.close()

    # -- locations -------------------------------------------------------------------------------

    def _tell(self, number: int) -> None:
        """Publish this rank's location, and delete its entries of earlier groups."""
        for name in self._told:
            self.store.delete_key(name)
        self._told.clear()
        self._say(f"place/{number}/{self._rank}", self._place)
        self.store.set(f"latest/{self._rank}", str(number))

    def _say(self, name: str, what: Any) -> None:
        self._told.append(name)
        self.store.set(name, json.dumps(what))

    def _places(self, number: int, others: Collection[int]) -> dict[int, Place]:
        said = self._said(number, {rank: f"place/{number}/{rank}" for rank in others})
        return {rank: Place(*what) for rank, what in said.items()}

    def _said(self, number: int, names: dict[int, str]) -> dict[int, Any]:
        """Wait until all of these names are set in the store; return the values by rank."""
        until = time.monotonic() + self._timeout
        while True:
            try:
                self.store.wait(list(names.values()), timedelta(seconds=_LOOK_SECONDS))
                break
            except TimeoutError:
                late = [rank for rank, name in names.items() if not self.store.check([name])]
                self._check_current(number, late)
                if late and time.monotonic() >= until:
                    raise self._too_late(late[0]) from None
        return {rank: json.loads(self.store.get(name)) for rank, name in names.items()}

    def _check_backends(self, places: dict[int, Place]) -> None:
        """Raise ConnectionError if ranks have different backends: they would never meet.

        That happens if one host has too few GPUs for NCCL.
        """
        backend = self._place.backend
        for rank, place in places.items():
            if place.backend != backend:
                raise ConnectionError(
                    f"rank {self._rank} on host {self._place.host} talks through {backend!r}, rank "
                    f"{rank} on host {place.host} through {place.backend!r}: every host needs a "
                    f"GPU for each of its workers, or none may have that"
                )

    def _check_current(self, number: int, ranks: Iterable[int]) -> None:
        """Raise ConnectionError if one of the ranks is in a later group."""
        for rank in ranks:
            name = f"latest/{rank}"
            if self.store.check([name]) and int(self.store.get(name)) > number:
                raise ConnectionError(f"rank {rank} came for a later group: it had died before")

    def _too_late(self, rank: int) -> TimeoutError:
        return TimeoutError(f"rank {rank} did not come within {self._timeout:g} seconds")

    # -- ranks of other hosts --------------------------------------------------------------------

    def _meet_others(
        self, number: int, others: Collection[int], undo: ExitStack
    ) -> dict[int, Ends]:
        """Connect with ranks on other hosts; ``undo`` closes the connections."""
        higher = [rank for rank in others if rank > self._rank]
        seats = self._seats(number, higher, undo)
        lower = {rank: f"seats/{number}/{rank}" for rank in others if rank < self._rank}
        for rank, (public, endpoints) in self._said(number, lower).items():
            for which, endpoint in zip(_WHICH, endpoints[str(self._rank)], strict=True):
                keys = Keys(public, "")
                seat = EncryptedPeer(rank, self._timeout, keys, endpoint)
                undo.callback(seat.close)
                seat.send(memoryview(self._proof(number, self._rank, rank, which, endpoint)))
                seats[rank, which] = seat
        for (rank, which), seat in seats.items():
            if rank > self._rank:
                self._check_proof(number, seat, which)
                proof = self._proof(number, self._rank, rank, which, seat.endpoint)
                seat.send(memoryview(proof))
        for (rank, which), seat in seats.items():
            if rank < self._rank:
                self._check_proof(number, seat, which)
        return {rank: Ends(*(seats[rank, which] for which in _WHICH)) for rank in others}

    def _seats(
        self, number: int, ranks: Collection[int], undo: ExitStack
    ) -> dict[tuple[int, int], EncryptedPeer]:
        """Listen for these ranks, and publish the endpoints."""
        if not ranks:
            return {}
        keys, seats = Keys.generate(), {}
        for rank, which in product(ranks, _WHICH):
            seat = EncryptedPeer(rank, self._timeout, keys, address=self._place.address)
            undo.callback(seat.close)
            seats[rank, which] = seat
        endpoints = {rank: [seats[rank, which].endpoint for which in _WHICH] for rank in ranks}
        self._say(f"seats/{number}/{self._rank}", (keys.public, endpoints))
        return seats

    def _proof(self, number: int, teller: int, listener: int, which: int, endpoint: str) -> bytes:
        """Return proof of knowing the token, for one connection in one direction."""
        about = json.dumps([number, teller, listener, which, endpoint]).encode()
        return hashlib.blake2b(about, key=self._token, digest_size=_PROOF_BYTES).digest()

    def _check_proof(self, number: int, peer: EncryptedPeer, which: int) -> None:
        until = time.monotonic() + self._timeout
        while not peer.arrives(_LOOK_SECONDS):
            self._check_current(number, [peer.rank])
            if time.monotonic() >= until:
                raise self._too_late(peer.rank)
        room = bytearray(_PROOF_BYTES)
        peer.receive(memoryview(room))
        expected = self._proof(number, peer.rank, self._rank, which, peer.endpoint)
        if not hmac.compare_digest(bytes(room), expected):
            raise ConnectionError(f"who came as rank {peer.rank} does not know the session's token")
