"""Hostile checkpoints: pickles of an opcode generator, drawn trees, and changed files, all read.

Every file has right checksums, so that its content is reached. Nothing outside the reader's tables
may run (Python's audit events show imports, commands, sockets and files), every refusal is a
CheckpointError, and memory and time stay bounded.
"""

import argparse
import os
import pickletools
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import lazygt
from benchmarks.harness import Report
from lazygt.errors import CheckpointError
from lazygt.host.files import create
from lazygt.recovery.checkpoint.checkpoint_file import write
from lazygt.recovery.checkpoint.encoding import _KINDS, encoded
from lazygt.recovery.checkpoint.saved import Contents, versions
from lazygt.recovery.checkpoint.states import Leaf, class_of, state_of

#: Callables that a pickle would name to run a command, and others that lead there.
GLOBALS = (
    "os system", "posix system", "subprocess Popen", "builtins eval", "builtins exec",
    "builtins getattr", "builtins __import__", "importlib import_module", "os execv", "pty spawn",
    "torch _import_dotted_name", "torch.load", "torch.hub load", "torch.utils.cpp_extension load",
    "numpy load", "numpy.core.multiarray _reconstruct", "numpy.core.multiarray scalar",
    "collections OrderedDict", "functools partial", "operator attrgetter", "shutil rmtree",
    "torch._utils _rebuild_tensor_v2", "types FunctionType", "marshal loads", "ctypes CDLL",
)  # fmt: skip
#: Sizes that no memory has, and numbers at the ends of their formats.
NUMBERS = (0, 1, -1, 7, 255, 1 << 31, (1 << 31) - 1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1)
#: Events of a reader: it opens and maps its own file, and lists its folder.
_EXPECTED = frozenset({"open", "os.listdir", "mmap.__new__", "builtins.id"})
_SEED_STATE = {"notes": {"a": [1, (2.5, None)], "n": np.arange(3)}, "rng": {"x": 1 << 90}}
_ABOUT = {**versions(), "step": 1, "settings": dict[str, str]()}


class Watch:
    """Audit events of this process while it is armed, all but those of reading one folder."""

    def __init__(self) -> None:
        self.folder, self.events = "", Counter[str]()
        sys.addaudithook(self._heed)

    @contextmanager
    def armed(self, folder: Path) -> Iterator[None]:
        self.folder = str(folder)
        try:
            yield
        finally:
            self.folder = ""

    def _heed(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        file = args[0] if event == "open" else 0
        at_home = isinstance(file, int) or str(file).startswith(self.folder)
        if event not in _EXPECTED or not at_home:
            self.events[f"{event} {args[:1]!r:.60}"] += 1


# -- contents ------------------------------------------------------------------------------


def pickles(draw: random.Random, command: str) -> bytes:
    """A pickle: random opcodes around one that would run a command."""
    module, _, name = draw.choice(GLOBALS).partition(" ")
    text = draw.choice([command, name, f"{module}.{name}"])
    before = b"".join(_opcode(draw, command) for _ in range(draw.randrange(8)))
    after = b"".join(_opcode(draw, command) for _ in range(draw.randrange(4)))
    called = _text(module) + _text(name) + b"\x93"
    argument = _text(text)
    attack = draw.choice([
        called + argument + b"\x85R",
        f"c{module}\n{name}\n(S'{text}'\ntR".encode(),
        f"(S'{text}'\ni{module}\n{name}\n".encode(),
        b"(" + called + argument + b"o",
        called + argument + b"\x85\x81",
        called + argument + b"\x85}\x92",
        called + b")R}" + _text("__setstate__") + called + b"sb",
        _text("dtype") + _text(draw.choice(["_import_dotted_name", "load", "hub"])) + b"\x86Q"
        + _text(f"{module}.{name}") + b"\x85R" + argument + b"\x85R",
        b"\x82" + draw.randbytes(1) + argument + b"\x85R",
        f"Pdtype {name}\n".encode(),
    ])  # fmt: skip
    return b"\x80" + bytes([draw.randrange(6)]) + before + attack + after + b"."


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _opcode(draw: random.Random, command: str) -> bytes:
    """Any opcode of any protocol, with an argument of the form that it takes."""
    opcode = draw.choice(pickletools.opcodes)
    code = opcode.code.encode("latin-1")
    if opcode.arg is None:
        return code
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        lines = draw.choice(GLOBALS).replace(" ", "\n") if "pair" in opcode.arg.name else command
        return code + lines.encode() + b"\n"
    if opcode.arg.n > 0:
        return code + draw.randbytes(opcode.arg.n)
    width = {pickletools.TAKEN_FROM_ARGUMENT1: "<B", pickletools.TAKEN_FROM_ARGUMENT8U: "<Q"}
    data = command.encode()
    length = len(data) if draw.random() < 0.8 else draw.choice((0, 255))
    return code + struct.pack(width.get(opcode.arg.n, "<I"), length) + data


def tree(draw: random.Random, depth: int = 4) -> Any:
    """A value of the format's outline: kinds that there are, with fields that they don't have."""
    if not depth or draw.random() < 0.4:
        return draw.choice([
            None, True, draw.choice(NUMBERS), draw.random(), float("nan"), draw.randbytes(4), "C",
            draw.choice(GLOBALS), draw.choice(["|O", "<f8", "O,O", "<U99", "|V9", "cpu", "float"]),
            "torch.float32", "torch._import_dotted_name", "os",
        ])  # fmt: skip
    kind = draw.choice([*_KINDS, "tensor", *GLOBALS])
    if kind == "array" and draw.random() < 0.7:
        shape = ["tuple", *(draw.choice(NUMBERS) for _ in range(draw.randrange(4)))]
        return [kind, draw.choice(["<f8", "|O", "|S0", "<U999999999"]), "C", shape, b"abcdefgh"]
    return [kind, *(tree(draw, depth - 1) for _ in range(draw.randrange(5)))]


def deep(draw: random.Random) -> bytes:
    """Containers within containers, beyond every limit."""
    levels = draw.choice((99, 100, 101, 1000, 50_000))
    return (b"\x92" + msgspec.msgpack.encode(draw.choice(["list", "tuple"]))) * levels + b"\xc0"


def changed(draw: random.Random, data: bytes) -> bytes:
    """Bytes with some of them replaced, removed or repeated."""
    new = bytearray(data)
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(new) or 1)
        new[at : at + draw.randrange(3)] = draw.choice([b"", draw.randbytes(1), new[at : at + 9]])
    return bytes(new)


# -- files ---------------------------------------------------------------------------------


class Forge:
    """Writes hostile checkpoints, and reads each as programs do: alone, and in a session."""

    session: lazygt.Session

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.canary = folder.with_name("canary")
        self.path = folder / "checkpoint-000001.lazygt"
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0
        generators = {"python": random.getstate(), "numpy": np.random.get_state(),
                      "torch": torch.get_rng_state(), "workers": None, "device": "cpu"}  # fmt: skip
        self._leaves: list[Leaf] = []
        self._data: list[bytes] = []
        self.states = {name: encoded(name, s, self._leaf) for name, s in self._programs().items()}
        self.drawn = encoded("generators", generators, self._leaf)

    def _programs(self) -> dict[str, Any]:
        linear = torch.nn.Linear(3, 2, device="cpu")
        optimizer = torch.optim.Adam(linear.parameters())
        self.objects = {
            "linear": linear, "optimizer": optimizer,
            "numbers": np.random.Generator(np.random.MT19937(1)), "python": random.Random(1),
        }  # fmt: skip
        self.classes = {name: class_of(each) for name, each in self.objects.items()}
        return {name: state_of(each) for name, each in self.objects.items()} | _SEED_STATE

    def _leaf(self, t: torch.Tensor) -> int:
        dtype = str(t.dtype).removeprefix("torch.")
        self._leaves.append(Leaf(dtype, tuple(t.shape), t.stride()))
        self._data.append(t.contiguous().view(torch.uint8).numpy().tobytes())
        return len(self._leaves) - 1

    def write(self, contents: bytes, data: list[bytes], about: dict[str, Any]) -> None:
        self.path.unlink(missing_ok=True)
        with open(create(self.path), "wb") as file:
            write(file, about, map(memoryview, (contents, *data)))

    def honest(self) -> None:
        """The checkpoint that all others are made of."""
        self.forge(lambda: (self.states, self.drawn))

    def hostile(self, kind: str) -> None:
        """One of a kind."""
        draw, states, drawn = self.draw, dict(self.states), self.drawn
        make: dict[str, Callable[[], bytes]] = {
            "pickle": lambda: pickles(draw, f"touch {self.canary}"),
            "tree": lambda: msgspec.msgpack.encode(tree(draw)),
            "deep": lambda: deep(draw),
            "changed": lambda: changed(draw, draw.choice([*self.states.values(), self.drawn])),
        }
        name = draw.choice([*states, ""])
        if name:
            states[name] = make[kind]()
        else:
            drawn = make[kind]()
        self.forge(lambda: (states, drawn))

    def forge(self, make: Callable[[], tuple[dict[str, bytes], bytes]]) -> None:
        states, drawn = make()
        contents = msgspec.msgpack.encode(Contents(states, self.classes, drawn, self._leaves))
        self.write(contents, self._data, dict(_ABOUT))

    def outer(self) -> None:
        """Changed contents, values, descriptions or bytes of the file itself."""
        draw, about = self.draw, dict(_ABOUT)
        leaves = [Leaf("float32", (draw.choice(NUMBERS) & (1 << 61) - 1, 0), (1, 1))]
        contents = msgspec.msgpack.encode(
            Contents(self.states, self.classes, self.drawn, self._leaves)
        )
        which = draw.randrange(5)
        if which == 0:
            contents = changed(draw, contents)
        elif which == 1:
            contents = pickles(draw, f"touch {self.canary}")
        elif which == 2:
            leaves = [*leaves, *self._leaves[1:]]
            some = Contents(self.states, self.classes, self.drawn, leaves)
            contents = msgspec.msgpack.encode(some)
        elif which == 3:
            about |= {"step": "x", "settings": 1, "torch": {}}
        self.write(contents, self._data, about)
        if which == 4:
            self.path.write_bytes(changed(draw, self.path.read_bytes()))

    def read(self, watch: Watch) -> str:
        """The outcome of reading, loading and resuming the file: ``read`` or ``refused``."""
        begin, outcomes = time.perf_counter(), set()
        with watch.armed(self.folder):
            outcomes.add(self._tried(self.session.resume))
            if (saved := self._resumed()) is None:
                outcomes.add("refused")
            else:
                outcomes |= {self._tried(partial(saved.__getitem__, name)) for name in saved}
                outcomes.add(self._tried(partial(saved.load, **self.objects)))
        self.slowest = max(self.slowest, time.perf_counter() - begin)
        outcome = min(outcomes, key=("refused", "read").index) if outcomes <= _KNOWN else str(
            outcomes - _KNOWN)  # fmt: skip
        self.outcomes[outcome] += 1
        return outcome

    def _resumed(self) -> Any:
        try:
            return lazygt.resume(self.folder)
        except CheckpointError:
            return None

    def _tried(self, action: Callable[[], object]) -> str:
        try:
            action()
        except CheckpointError:
            return "refused"
        return "read"


_KNOWN = {"read", "refused"}
KINDS = ("pickle", "tree", "deep", "changed", "outer")
_watch: list[Watch] = []


def attack(kind: str, count: int, folder: Path, seed: int = 1) -> tuple[Forge, Counter[str]]:
    """Read ``count`` files of a kind; the forge, and the events that no reader may cause.

    Raises:
        Exception: other than CheckpointError, as a reader raised it.
    """
    if not _watch:
        _watch.append(Watch())  # there is no taking one back
    watch = _watch[0]
    folder.mkdir(0o700)
    forge = Forge(folder, seed)
    forge.honest()
    with lazygt.session(launcher="inline", checkpoint=folder) as session:
        session.register(**forge.objects)
        forge.session = session
        forge.read(watch)  # what is loaded once is loaded now
        watch.events.clear()
        assert forge.read(watch) == "read"
        forge.outcomes.clear()
        for _ in range(count):
            forge.outer() if kind == "outer" else forge.hostile(kind)
            forge.read(watch)
    assert not forge.canary.exists(), "a command ran"
    return forge, watch.events


def run(count: int) -> Report:
    report = Report(
        "hostile checkpoints",
        "Checkpoints with right checksums and hostile content, read and loaded: pickles of an "
        "opcode generator, trees of the format's outline, deep ones, and changed files.",
        ("files", "refused", "read", "events of others", "slowest ms", "peak MiB more"),
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as room:
        for seed, kind in enumerate(KINDS):
            some = count if kind == "pickle" else count // 4
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            forge, events = attack(kind, some, Path(room) / kind, seed)
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            report.add(
                f"{kind}: {some:,}", f"{forge.outcomes['refused']:,}",
                f"{forge.outcomes['read']:,}", str(dict(events) or 0),
                f"{1000 * forge.slowest:.1f}", f"{more:.1f}",
            )  # fmt: skip
    return report


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument(
        "--pickles", type=int, default=10**5, help="a quarter of each other kind"
    )
    arguments.add_argument("--save", action="store_true", help="keep the table in RESULTS.md")
    given = arguments.parse_args()
    run(given.pickles).finish(save=given.save)


if __name__ == "__main__":
    main()
