"""Keys that both ends of a connection make of the session's token, so that no key travels."""

from __future__ import annotations

import hashlib

import zmq
from zmq.utils import z85

from lazygt.runtime.launch.channel import Keys

_PURPOSE = b"lazygt curve"  # so that nothing else that is made of a token is ever a key


def derived(token: bytes, role: str) -> Keys:
    """The CURVE keys of a role in the session of a token: the same wherever they are made.

    The secret key is BLAKE2b of the role, keyed with the token (RFC 7693); the public key follows
    from it (``crypto_scalarmult_base``).

    Raises:
        ValueError: the token is empty, or longer than 64 bytes.
    """
    if not 0 < len(token) <= hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"a token of {len(token)} bytes: expected 1 to 64")
    digest = hashlib.blake2b(role.encode(), digest_size=32, key=token, person=_PURPOSE).digest()
    secret = z85.encode(digest)
    return Keys(zmq.curve_public(secret).decode(), secret.decode())
