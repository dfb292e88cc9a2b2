"""Sessions of a hostile client, and the end of its connection."""

from __future__ import annotations

import time

from lazygt.runtime.cluster.protocol import TO_CLIENT, Open, Opened, spec_text
from lazygt.runtime.launch.start_plan import LinkSpec
from lazygt.runtime.wire import decode, encode
from tests.pool.serving import SECONDS, Asker


def refused(pool, what):
    return pool.status()["refused"].get(what, 0)


def is_dropped(asker):
    until = time.monotonic() + SECONDS
    while asker.connection.closed is None:
        assert time.monotonic() < until
        asker.connection.take()
        time.sleep(0.005)
    asker.close()


def opened(pool, name="eve"):
    """A session with a worker of its own."""
    asker = Asker(pool, name)
    asker.told()
    spec = LinkSpec(loads_torch=True, arena_bytes=1 << 20)
    asker.connection.send(encode(Open(0, spec_text(spec))))
    until = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < until
        frames = asker.connection.take()
        if frames is not None and isinstance(decode(frames, TO_CLIENT), Opened):
            return asker
