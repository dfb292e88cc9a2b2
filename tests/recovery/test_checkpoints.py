"""The client dies: what it had saved goes on, with the bits of the run that was not killed."""

from __future__ import annotations

import errno
import os
import random
import signal
import struct
import threading
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.host.files import crc32, create
from lazygt.recovery import recover
from lazygt.recovery.checkpoint import checkpoint_file, checkpointing, saved
from lazygt.recovery.checkpoint.checkpoint_file import CheckpointFile
from lazygt.settings import grouped
from tests.recovery.programs import BATCH, LAYOUTS, MLP, WIDTH, Layout, digest

pytestmark = pytest.mark.timeout(120)
STEPS = 6
INLINE: dict[str, Any] = {"launcher": "inline"}


@pytest.fixture(autouse=True)
def at_marks_alone(snapshots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are not taken by the clock: while one is, a mark is passed over."""
    monkeypatch.setattr(recover, "_LEAST_SECONDS", 1e9)


class Run:
    """Training steps that draw random numbers on the workers and in the client, and are marked."""

    def __init__(self, s: lazygt.Session, layout: Layout) -> None:
        self.s, self.layout = s, layout
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.model = MLP()
        layout.lay(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)
        self.mean = torch.zeros(WIDTH, WIDTH * 2).T.contiguous().T
        s.register(model=self.model, optimizer=self.opt, schedule=self.schedule, mean=self.mean)
        self.saved = s.resume()

    def step(self) -> None:
        x = torch.randn(BATCH, WIDTH, device="cpu").to("lazygt") * random.random()
        y = torch.randint(0, WIDTH, (BATCH,), device="cpu").to("lazygt")
        if self.layout.cut:
            x, y = (lazygt.distribute(t, {"ranks": Shard(0)}) for t in (x, y))
        x = x + float(np.random.rand())
        self.opt.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.opt.step()
        self.schedule.step()
        with torch.no_grad():
            self.mean.lerp_(self.model.first[0].weight.T, 0.1)

    def go(self, until: int, **settings: Any) -> None:
        for step in range(self.saved.step, until):
            self.step()
            self.s.checkpoint(step + 1, **settings)

    def told(self) -> str:
        state = [v for each in self.opt.state.values() for v in each.values()]
        numbers = [self.schedule.get_last_lr()[0], random.random(), float(np.random.rand())]
        drawn = torch.tensor(numbers, device="cpu", dtype=torch.float64)
        return digest([*self.model.parameters(), *state, self.mean, drawn, torch.get_rng_state()])


def undisturbed(layout: Layout, **settings: Any) -> str:
    with lazygt.session(**grouped({**layout.settings, **settings})) as s:
        run = Run(s, layout)
        run.go(STEPS)
        return run.told()


def placements(model: nn.Module, opt: torch.optim.Optimizer) -> list[Any]:
    state = [v for each in opt.state.values() for v in each.values() if v.dim()]
    return [t.placements for t in (*model.parameters(), *state)]  # type: ignore[attr-defined]


def check_resumed(layout: Layout, folder: Path, **settings: Any) -> None:
    """A run that ends after four steps, the last of them not saved, and one that goes on."""
    whole = undisturbed(layout, **settings)
    with lazygt.session(**grouped({"checkpoint": folder, **layout.settings, **settings})) as s:
        run = Run(s, layout)
        assert (run.saved.step, dict(run.saved)) == (0, {})
        run.go(3)
        assert s.checkpoint(3, now=True, best=0.5)
        s.flush()
        laid = placements(run.model, run.opt)
        run.step()
    with lazygt.session(**grouped({"checkpoint": folder, **layout.settings, **settings})) as s:
        run = Run(s, layout)
        assert (run.saved.step, run.saved["best"]) == (3, 0.5)
        s.flush()
        assert placements(run.model, run.opt) == laid
        run.go(STEPS)
        assert run.told() == whole


INLINE_LAYOUT = Layout({**INLINE, "compile": "off"}, LAYOUTS["one worker"].lay)


def test_a_run_goes_on_inline(tmp_path: Path) -> None:
    check_resumed(INLINE_LAYOUT, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_goes_on_with_the_bits_of_one_that_was_not_killed(name: str, tmp_path: Path) -> None:
    check_resumed(LAYOUTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one worker", "fully sharded"])
def test_a_run_without_recovery_goes_on(name: str, tmp_path: Path) -> None:
    check_resumed(LAYOUTS[name], tmp_path, recovery="off")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one worker", "fully sharded", "pipeline"])
def test_background_checkpoint_has_state_at_its_mark(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is saved, and the next three are done before a byte of it is written."""
    layout, told = LAYOUTS[name], {}
    with lazygt.session(**grouped(layout.settings)) as s:
        run = Run(s, layout)
        for step in range(STEPS):
            run.step()
            told[step + 1] = digest(run.model.parameters())
    with lazygt.session(
        **grouped({"checkpoint": tmp_path, "checkpoint_every": 1, **layout.settings})
    ) as s:
        run, writes = Run(s, layout), HeldWrites(monkeypatch)
        run.step()
        for step in range(1, 5):
            run.step()
            assert s.checkpoint(step + 1) == (step == 1)
            s.synchronize()
        writes.go_on()
    state = lazygt.resume(tmp_path)
    assert state.step == 2
    assert digest(state["model"].values()) == told[2]


class HeldWrites:
    """Writing threads wait until they may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may, written = threading.Event(), checkpointing._write_moment
        self._monkeypatch = monkeypatch

        def held(*given: Any) -> Any:
            assert self._may.wait(60)
            return written(*given)

        monkeypatch.setattr(checkpointing, "_write_moment", held)

    def go_on(self) -> None:
        self._may.set()

    def when_waited_for(self, s: lazygt.Session) -> threading.Event:
        """Go on when a recovery waits for them; set then."""
        waited, recovery = threading.Event(), s._client.recovery
        assert recovery is not None
        assert recovery.checkpoint_write is not None

        def wait(readers: list[Any]) -> None:
            assert readers == [recovery.checkpoint_write]
            waited.set()
            self.go_on()
            recovery.checkpoint_write.result()

        self._monkeypatch.setattr(recover, "wait", wait)
        return waited


# -- one process, no workers: what is refused, and what is told ----------------------------


class Small:
    """A registered tensor, in an inline session."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.s = lazygt.session(**grouped({"checkpoint": folder, **INLINE, **settings}))

    def __enter__(self) -> lazygt.Session:
        s = self.s.__enter__()
        self.weight = torch.arange(6.0).reshape(2, 3)
        s.register(weight=self.weight, notes={"epoch": 1})
        return s

    def __exit__(self, *told: Any) -> None:
        self.s.__exit__(*told)


def save_small(folder: Path, step: int = 4, **values: Any) -> Path:
    with Small(folder) as s:
        s.resume()
        assert s.checkpoint(step, now=True, **values)
        return s.checkpoints[-1].path


def rewritten(path: Path, **about: Any) -> None:
    """The same checkpoint, with other words on it."""
    file = CheckpointFile(path)
    data = [file.section(number) for number in range(len(file))]
    path.unlink()
    with open(create(path), "wb") as new:
        checkpoint_file.write(new, {**file.about, **about}, data)


def test_checkpoint_of_killed_program_is_readable_without_session(tmp_path: Path) -> None:
    values = {"best": 0.25, "seen": {"a", "b"}, "place": (1, [2.5, None], b"x"), "many": 1 << 90,
              "array": np.arange(3), "dtype": torch.bfloat16, "size": torch.Size([2])}  # fmt: skip
    path = save_small(tmp_path, 4, **values)
    read = lazygt.resume(tmp_path)
    assert (read.step, read.path) == (4, path)
    assert set(read) == {"weight", "notes", *values}
    assert read["weight"].device.type == "cpu"
    assert read["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["notes"] == {"epoch": 1}
    assert read["array"].tolist() == [0, 1, 2]
    assert {name: read[name] for name in values if name != "array"} == {
        name: value for name, value in values.items() if name != "array"
    }
    here = torch.zeros(2, 3, device="cpu")
    read.load(weight=here)
    assert here.tolist() == [[0, 1, 2], [3, 4, 5]]


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64,
          torch.complex64, torch.complex128)  # fmt: skip


def test_all_dtypes_layouts_and_ties(tmp_path: Path) -> None:
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        base = torch.arange(12).reshape(3, 4)
        given = {str(dtype): (base % 2 if dtype is torch.bool else base).to(dtype)
                 for dtype in DTYPES}  # fmt: skip
        given |= {"turned": base.T.contiguous().T, "view": base[1:, ::2], "flipped": base.T,
                  "empty": base[:0], "blank": torch.empty(2), "number": torch.tensor(3.5),
                  "one": torch.ones(1, 1), "cpu": torch.ones(2, 2, device="cpu").T, "same": base,
                  "conj": torch.ones(2, dtype=torch.complex64).mul(1j).conj()}  # fmt: skip
        del given["blank"]
        s.register(state=given)
        wanted = {name: t.cpu() for name, t in given.items()}
        assert s.checkpoint(0, now=True)
    read = lazygt.resume(tmp_path)["state"]
    for name, value in wanted.items():
        assert torch.equal(read[name], value.resolve_conj()), name
        assert read[name].dtype == value.dtype
    assert read["turned"].stride() == (1, 3)


def test_generators_go_on(tmp_path: Path) -> None:
    own, numpys, pythons = torch.Generator(), np.random.default_rng(4), random.Random(5)
    owns = {"own": own, "numpys": numpys, "pythons": pythons}

    def draws() -> list[float]:
        lazy, cpu = torch.rand(1).item(), torch.rand(1, device="cpu").item()
        named = [torch.rand(1, generator=own, device="cpu").item(), numpys.random()]
        return [lazy, cpu, *named, pythons.random(), random.random(), np.random.rand()]

    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        s.register(**owns)
        torch.manual_seed(1)
        draws()
        lazy = torch.rand(3)  # the workers have the state now
        assert s.checkpoint(1, now=True)
        wanted = draws()
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        torch.manual_seed(2)
        del lazy
        for _ in range(3):
            draws()
        s.register(**owns)
        s.resume()
        assert draws() == wanted


@pytest.mark.parametrize(
    ("about", "told"),
    [
        ({"torch": "2.0.0"}, r"saved by torch 2\.0\.0, and this is torch 2"),
        ({"lazygt": "9.9"}, r"saved by lazygt 9\.9, and this is lazygt 0"),
    ],
)
def test_another_version_is_refused(tmp_path: Path, about: dict[str, str], told: str) -> None:
    path = save_small(tmp_path)
    rewritten(path, **about)
    with Small(tmp_path) as s, pytest.raises(lazygt.CheckpointError, match=told) as raised:
        s.resume()
    assert raised.value.path == str(path)
    with pytest.raises(lazygt.CheckpointError, match=told):
        lazygt.resume(tmp_path)


def test_a_flipped_byte_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    small = Small(tmp_path)
    with small as s:
        small.weight.zero_()
        with pytest.raises(lazygt.CheckpointError, match="is not what was written") as raised:
            s.resume()
        assert raised.value.path == str(path)
        assert small.weight.sum().item() == 0


class Other(nn.Linear):
    """Not what was saved."""


OTHERS: dict[str, tuple[Any, str]] = {
    "shape": (lambda: nn.Linear(4, 3), r"m\.weight was float32\[2, 4\], and is float32\[3, 4\]"),
    "dtype": (lambda: nn.Linear(4, 2).double(), r"is float64\[2, 4\] here"),
    "missing": (lambda: nn.Linear(4, 2, bias=False), r"m\.bias was float32\[2\], and is not there"),
    "class": (lambda: Other(4, 2), r"'m' was a Linear, and is a Other here"),
    "kind": (dict, r"'m' was a Linear, and is a dict here"),
}


@pytest.mark.parametrize("which", OTHERS)
def test_another_program_is_refused_and_nothing_is_loaded(tmp_path: Path, which: str) -> None:
    make, told = OTHERS[which]
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        s.register(first=torch.ones(2), m=nn.Linear(4, 2))
        s.checkpoint(1, now=True)
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        first = torch.zeros(2)
        s.register(first=first, m=make())
        with pytest.raises(lazygt.CheckpointError, match=f"of another program: .*{told}"):
            s.resume()
        assert first.sum().item() == 0
        with pytest.raises(lazygt.CheckpointError, match="would replace"):
            s.checkpoint(1)


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(2, device="cpu", requires_grad=True)
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        s.register(opt=torch.optim.SGD([weight], 0.1))
        s.checkpoint(1, now=True)
    two = [weight, weight.detach().clone().requires_grad_()]
    for other, told in [
        (torch.optim.SGD(two, 0.1), r"had \[1\] parameters in its groups, and has \[2\] here"),
        (torch.optim.Adam([weight]), r"was a SGD, and is a Adam here"),
    ]:
        with pytest.raises(lazygt.CheckpointError, match=told):
            lazygt.resume(tmp_path).load(opt=other)


def test_all_that_was_registered_is_to_be_there(tmp_path: Path) -> None:
    save_small(tmp_path)
    with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
        with pytest.raises(lazygt.CheckpointError, match=r"'notes', 'weight' .* none are here"):
            s.resume()
        with pytest.raises(lazygt.CheckpointError, match="nothing was registered as 'other'"):
            lazygt.resume(tmp_path).load(other=torch.ones(2))


def test_session_without_folder_ignores_registrations() -> None:
    with lazygt.session(**grouped(INLINE)) as s:
        s.register(anything=3)  # without a folder nothing is kept, and nothing looked at
        assert not s.checkpoint(1)
        assert (s.resume().step, dict(s.resume()), s.checkpoints) == (0, {}, [])


def test_unsaveable_value_is_refused_at_mark(tmp_path: Path) -> None:
    with Small(tmp_path) as s:
        with pytest.raises(TypeError, match=r"^register\(epoch=3\): a int has no state_dict\(\)"):
            s.register(epoch=3)
        for value in (lambda: 3, object(), Path("x")):
            with pytest.raises(TypeError, match="the state of 'odd' can't be saved"):
                s.checkpoint(1, now=True, odd=value)
        with pytest.raises(ValueError, match="'weight' is registered already"):
            s.checkpoint(1, weight=3)
        for step in (-1, 1.5, True):
            with pytest.raises(ValueError, match="expected how many steps are done"):
                s.checkpoint(step)  # type: ignore[arg-type]
        assert s.checkpoint(1, now=True)
    nothing = lazygt.session(**grouped({"checkpoint": tmp_path / "new", **INLINE}))
    with nothing as s, pytest.raises(RuntimeError, match="has nothing to save"):
        s.checkpoint(1)


def replaced(path: Path, name: str, state: bytes) -> None:
    """The same checkpoint, with other bytes for one state."""
    file = CheckpointFile(path)
    contents = msgspec.msgpack.decode(file.section(0), type=saved.Contents)
    contents.states[name] = state
    data = [memoryview(msgspec.msgpack.encode(contents))]
    data += [file.section(number) for number in range(1, len(file))]
    path.unlink()
    with open(create(path), "wb") as new:
        checkpoint_file.write(new, file.about, data)


def _command(marker: Path) -> bytes:
    """A pickle that reaches ``os.system`` by names alone: torch's function that imports them."""
    words = [b"dtype", b"_import_dotted_name", b"os.system", f"touch {marker}".encode()]
    texts = [b"\x8c" + bytes([len(word)]) + word for word in words]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x86Q" + b"".join(
        text + b"\x85R" for text in texts[2:]
    ) + b"."  # fmt: skip


@pytest.mark.parametrize("read", ["named", "resumed"])
def test_pickled_command_in_a_checkpoint_is_refused(tmp_path: Path, read: str) -> None:
    folder, marker = tmp_path / "run", tmp_path / "ran"
    replaced(save_small(folder), "notes", _command(marker))
    with pytest.raises(lazygt.CheckpointError, match="'notes' in it is not as a checkpoint has it"):
        if read == "named":
            _ = lazygt.resume(folder)["notes"]
        else:
            with Small(folder) as s:
                s.resume()
    assert not marker.exists()


def test_checkpoint_of_another_format_names_both(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    data = bytearray(path.read_bytes())
    data[15:16] = b"1"
    data[56:64] = struct.pack("<Q", crc32(bytes(data[:56])))
    path.write_bytes(data)
    with pytest.raises(lazygt.CheckpointError, match=r"its format is 1, and .* reads format 2"):
        lazygt.resume(tmp_path)


def test_a_run_that_is_there_is_not_replaced_by_one_that_did_not_ask(tmp_path: Path) -> None:
    save_small(tmp_path)
    with Small(tmp_path) as s:
        with pytest.raises(lazygt.CheckpointError, match=r"Call resume\(\)"):
            s.checkpoint(1)
        lazygt.resume(tmp_path)
        s.checkpoint(1)


def test_two_sessions_in_one_folder_are_refused(tmp_path: Path) -> None:
    with Small(tmp_path) as s:
        with pytest.raises(lazygt.CheckpointError, match="another session"):
            lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE}))
        assert s.checkpoint(1, now=True)
    with Small(tmp_path) as s:
        assert s.resume().step == 1


def test_missing_checkpoint_is_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(lazygt.CheckpointError, match=f"checkpoint {folder}: "):
            lazygt.resume(folder)


def test_a_full_disk_is_told_once_and_with_since_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Small(tmp_path, checkpoint_every=1) as s:
        assert s.checkpoint(1, now=True)
        with monkeypatch.context() as disk:
            disk.setattr(checkpoint_file, "write", full)
            with pytest.warns(RuntimeWarning, match=r"saved since step 1: OSError.*28") as told:
                assert not s.checkpoint(2, now=True)
            assert told[0].filename == __file__
            assert not s.checkpoint(3, now=True)
            assert not s.checkpoint(4, now=True)
        assert s.checkpoint(5, now=True)
        assert s.stats()["ops_recorded"]
    assert lazygt.resume(tmp_path).step == 5


def test_marks_between_intervals_are_skipped(tmp_path: Path) -> None:
    with Small(tmp_path, checkpoint_every=3) as s:
        assert [s.checkpoint(step) for step in range(1, 6)] == [False, False, True, False, False]
    assert lazygt.resume(tmp_path).step == 3


def test_times_and_costs_between_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(checkpointing.time, "monotonic", lambda: clock[0])
    with Small(tmp_path / "time", checkpoint_every="1 min") as s:
        assert not s.checkpoint(0)
        clock[0] += 2
        assert s.checkpoint(1)  # the first when a second has passed
        wait_written(s)
        clock[0] += 59
        assert not s.checkpoint(2)
        clock[0] += 1
        assert s.checkpoint(3)
    with Small(tmp_path / "cost", snapshot_cost=0.5) as s:
        clock[0] += 2
        assert s.checkpoint(1)
        wait_written(s)
        clock[0] += 0.9
        assert not s.checkpoint(2)
        clock[0] += 0.2 + 2 * s.checkpoints[-1].busy
        assert s.checkpoint(3)


def wait_written(s: lazygt.Session) -> None:
    assert s._checkpoints is not None
    assert s._checkpoints._writing is not None
    s._checkpoints._writing.result()


def test_a_folder_that_nothing_was_saved_in_is_told(tmp_path: Path) -> None:
    told = r"has saved nothing: call session\.checkpoint\(step\)"
    with pytest.warns(RuntimeWarning, match=told), Small(tmp_path):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Small(tmp_path) as s:
            s.resume()  # the run was at its end


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "often", "5 m", "s"])
def test_invalid_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint_every"):
        lazygt.session(**grouped({"checkpoint": tmp_path, "checkpoint_every": every, **INLINE}))


def test_a_dry_session_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing is computed, so there is nothing to save"):
        lazygt.session(checkpoint=tmp_path, launcher="dry")


def test_tensors_of_another_session_are_refused(tmp_path: Path) -> None:
    with lazygt.session(**grouped(INLINE)):
        other = torch.ones(2)
        with lazygt.session(**grouped({"checkpoint": tmp_path, **INLINE})) as s:
            s.register(other=other)
            with pytest.raises(lazygt.NoSession, match="a tensor of another session"):
                s.checkpoint(1, now=True)


def test_a_failed_value_is_raised_and_not_saved(tmp_path: Path) -> None:
    small = Small(tmp_path)
    with small as s:
        assert s.checkpoint(1, now=True)
        with torch.no_grad():
            small.weight.copy_(torch.ones(2, 3)[torch.tensor([0, 7])])
        with pytest.raises(IndexError):
            s.checkpoint(2, now=True)
        small.weight.data = torch.ones(2, 3)
        assert s.checkpoint(3, now=True)


# -- beside worker processes ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one worker", "fully sharded"])
def test_workers_that_die_while_a_moment_is_written_change_no_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = LAYOUTS[name]
    with lazygt.session(
        **grouped({"checkpoint": tmp_path, "checkpoint_every": 1, **layout.settings})
    ) as s:
        run = Run(s, layout)
        writes = HeldWrites(monkeypatch)
        run.step()
        s.synchronize()
        told = digest(run.model.parameters())
        assert s.checkpoint(1)
        s._client.wait_snapped()
        for rank in range(s.mesh.world_size):
            os.kill(s.worker_pids[rank], signal.SIGKILL)
            run.step()
            s.synchronize()
        writes.go_on()
    assert len(s.recoveries) == s.mesh.world_size
    state = lazygt.resume(tmp_path)
    assert state.step == 1
    assert digest(state["model"].values()) == told


@pytest.mark.slow
def test_a_worker_that_dies_before_its_snapshot_takes_it_again(tmp_path: Path) -> None:
    layout = LAYOUTS["one worker"]
    whole = undisturbed(layout)
    with lazygt.session(
        **grouped({"checkpoint": tmp_path, "checkpoint_every": 3, **layout.settings})
    ) as s:
        run = Run(s, layout)
        run.go(2)
        run.step()
        s.synchronize()
        os.kill(s.worker_pids[0], signal.SIGSTOP)
        assert s.checkpoint(3)
        os.kill(s.worker_pids[0], signal.SIGKILL)
        s.synchronize()
    assert [each.step for each in s.checkpoints] == [3]
    with lazygt.session(**grouped({"checkpoint": tmp_path, **layout.settings})) as s:
        run = Run(s, layout)
        run.go(STEPS)
        assert run.told() == whole


@pytest.mark.slow
def test_no_snapshot_is_taken_over_one_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a due one; where the journal is full, the program waits for the disk."""
    with lazygt.session(
        checkpoint=tmp_path,
        recovery=lazygt.Recovery(checkpoint_every=1, journal_bytes=1 << 20),
        workers=lazygt.Workers(threads=1),
    ) as s:
        weight = torch.zeros(64)
        s.register(weight=weight)
        writes = HeldWrites(monkeypatch)
        assert s.checkpoint(1)
        s._client.wait_snapped()
        before = s.stats()["snapshots"]
        assert s._client.recovery is not None
        s._client.recovery._due = 0.0
        for _ in range(3):
            weight.add_(1)
            s.synchronize()
        assert s.stats()["snapshots"] == before
        waiting = writes.when_waited_for(s)
        for _ in range(40):
            weight.add_(torch.ones(1 << 14, device="cpu").to("lazygt")[:64])
            s.flush()
        assert waiting.is_set()
        s.synchronize()
        assert s.stats()["snapshots"] > before
        assert weight.tolist() == [43.0] * 64
    assert lazygt.resume(tmp_path)["weight"].tolist() == [0.0] * 64


@pytest.mark.slow
def test_another_number_of_workers_goes_on_with_the_values(tmp_path: Path) -> None:
    two, one = LAYOUTS["fully sharded"], LAYOUTS["one worker"]
    with lazygt.session(**grouped({"checkpoint": tmp_path, **two.settings})) as s:
        run = Run(s, two)
        run.go(2)
        s.checkpoint(2, now=True)
        told = run.told()
    settings = {**one.settings, "mesh": {"ranks": 1}}
    with lazygt.session(**grouped({"checkpoint": tmp_path, **settings})) as s:
        with pytest.warns(RuntimeWarning, match=r"saved with mesh ranks=2 \(now ranks=1\)"):
            run = Run(s, one)
        assert run.told() == told
        run.go(3)


@pytest.mark.slow
def test_a_moment_is_saved_beside_snapshots_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is taken after every run, also after the one that a mark sends."""
    with lazygt.session(checkpoint=tmp_path, workers=lazygt.Workers(threads=1)) as s:
        weight = torch.zeros(8)
        s.register(weight=weight)
        recovery = s._client.recovery
        assert recovery is not None
        monkeypatch.setattr(recover, "_LEAST_SECONDS", 0.0)
        monkeypatch.setattr(recovery, "_cost", 1e9)
        recovery._due = 0.0
        for step in range(1, 6):
            weight.add_(1)
            assert s.checkpoint(step, now=True)
            assert lazygt.resume(tmp_path)["weight"].tolist() == [step] * 8
        assert recovery.journal.committed.number > 5


@pytest.mark.slow
def test_a_failed_moment_is_not_saved(tmp_path: Path) -> None:
    with lazygt.session(checkpoint=tmp_path, workers=lazygt.Workers(threads=1)) as s:
        weight = torch.ones(2, 3)
        s.register(weight=weight)
        assert s.checkpoint(1, now=True)
        weight.copy_(torch.ones(2, 3)[torch.tensor([0, 7])])
        with pytest.raises(IndexError):
            s.checkpoint(2, now=True)
    assert lazygt.resume(tmp_path).step == 1


@pytest.mark.slow
def test_memory_without_room_for_snapshots_leaves_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lazygt.session(checkpoint=tmp_path, workers=lazygt.Workers(threads=1)) as s:
        weight = torch.arange(8.0)
        s.register(weight=weight)

        def without_room(rank: int, told: Any) -> None:
            s._client._disable_recovery("there is no room")

        monkeypatch.setattr(s._client, "_snapped", without_room)
        with pytest.warns(RuntimeWarning, match="death of a worker loses values"):
            assert s.checkpoint(1, now=True)
        weight.add_(1)
        assert s.checkpoint(2, now=True)
    read = lazygt.resume(tmp_path)
    assert (read.step, read["weight"].tolist()) == (2, list(range(1, 9)))
