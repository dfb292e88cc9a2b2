"""A client whose link is cut: ``python through_a_cut.py ADDRESS TOKEN``.

It sends 1,000 messages, says ``half``, sends on without waiting, says for how long the host was
away when it is asked by a line, and then what came back.
"""

from __future__ import annotations

import select
import sys

import zmq

from lazygt.net.connection import dial
from lazygt.net.keys import derived

address, token = sys.argv[1], sys.argv[2].encode()
keys, server = derived(token, "client"), derived(token, "agent").public
connection = dial(zmq.Context(), address, keys, server, b"", 256 << 20, 60, grace=30)
for number in range(1000):
    connection.send([b"%d" % number])
print("half", flush=True)
for number in range(1000, 2000):
    connection.send([b"%d" % number, bytes(10_000)])
sys.stdin.readline()
connection.pump()
print(connection.away, flush=True)
poller = select.poll()
poller.register(connection.fd, select.POLLIN)
numbers: list[int] = []
while len(numbers) < 2000 and connection.closed is None:
    if (frames := connection.take()) is None:
        poller.poll()
    else:
        numbers.append(int(bytes(frames[0])))
verdict = "in order, once" if numbers == list(range(2000)) else "wrong"
print(len(numbers), verdict, *filter(None, [connection.closed]), flush=True)
connection.close("all is here")
