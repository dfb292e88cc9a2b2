"""Message handlers that worker processes of these tests load: they obey, and compute nothing."""

import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence

from lazygt.errors import ProtocolError
from lazygt.net import channel

Frame = bytes | memoryview


class Obedient:
    """The first frame is the order, the rest its arguments."""

    def __init__(self, *, device, rank, world_size, upload, fetch):
        self.device, self.rank, self.world_size = device, rank, world_size
        self.upload, self.fetch = upload, fetch

    def handle(self, frames: list[Frame]) -> Sequence[Sequence[Frame]]:
        order, *arguments = (bytes(frame) for frame in frames)
        return getattr(self, order.decode())(*arguments)

    def echo(self, *arguments):
        return [arguments]

    def many(self, count):
        return [[str(index).encode()] for index in range(int(count))]

    def big(self, nbytes):
        return [[b"x" * int(nbytes)]]

    def who(self):
        return [[str(os.getpid()).encode(), str(self.rank).encode(), self.device.encode()]]

    def environment(self, name):
        return [[os.environ.get(name.decode(), "").encode()]]

    def sleep(self, seconds):
        """Sleeps without the interpreter's lock, as a torch op computes."""
        time.sleep(float(seconds))
        return [[b"slept"]]

    def hold(self, seconds):
        """Sleeps and keeps the interpreter's lock: nothing else runs here, the answers to pings
        neither."""
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
        return [[b"held"]]

    def count(self, much):
        """The same, at work."""
        return [[str(sum(itertools.repeat(1, int(much)))).encode()]]

    def started(self, seconds):
        """Says that it begins by touching a file's worth of stderr, then sleeps."""
        sys.stderr.write("begun\n")
        sys.stderr.flush()
        return self.sleep(seconds)

    def do_not_spin(self):
        """From now on it dies where it would spin for the next message."""
        channel.spin = lambda boxes, elsewhere: os._exit(9)
        return [[b"done"]]

    def refuse(self):
        raise ProtocolError("no such order")

    def crash(self, text):
        raise RuntimeError(text.decode())

    def exit(self, code):
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(int(code))

    def die(self, number):
        sys.stderr.write("killed by itself\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.Signals(int(number)))
        return []

    def shout(self, nbytes):
        chunk = "y" * 1023 + "\n"
        for _ in range(int(nbytes) // 1024):
            sys.stderr.write(chunk)
        sys.stderr.flush()
        return [[b"shouted"]]


class Torch(Obedient):
    """Also computes; needs torch."""

    def threads(self):
        return [[str(self.torch.get_num_threads()).encode()]]

    @property
    def torch(self):
        import torch

        return torch

    def total(self, offset, nbytes):
        """Sum an uploaded float32 tensor in place; the answer goes through the fetch arena."""
        view = self.upload.view(int(offset), int(nbytes)).view(self.torch.float32)
        slot = self.fetch.put(view.cumsum(0))
        return [[str(slot.offset).encode(), str(slot.nbytes).encode()]]

    def release(self, offset):
        self.fetch.free(int(offset))
        return [[str(self.fetch.bytes_in_use).encode()]]

    def kernel(self, size):
        """One long torch op."""
        sys.stderr.write("begun\n")
        sys.stderr.flush()
        a = self.torch.ones(int(size), int(size), dtype=self.torch.float64)
        (a @ a).sum()
        return [[b"computed"]]

    def all_reduce(self):
        from lazygt.runtime.collectives import collective_ops

        value = self.torch.tensor([self.rank + 1.0])
        return [[str(collective_ops.all_reduce(value, "sum", "data").item()).encode()]]


class Broken:
    def __init__(self, **given):
        raise ImportError("no such executor on this machine")
