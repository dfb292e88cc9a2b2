"""Artifacts: found only when whole, in a place that is there also without a home."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from lazygt.runtime.executors.compiled import Cache, Record

KEY = "0" * 32
CODE = bytes(range(256)) * 8
RECORD = Record(1.5, ((1024, 2e-5, 1e-5), (1 << 20, 3e-3, 1e-3)))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    made = Cache(str(tmp_path / "cache"))
    made.keep(KEY, CODE, RECORD)
    return made


def test_stored_artifact_is_found(cache: Cache) -> None:
    assert cache.find(KEY) == RECORD
    assert cache.code(KEY).read_bytes() == CODE


@pytest.mark.parametrize("suffix", ["json", "so"])
@pytest.mark.parametrize("damage", ["flipped", "cut short", "emptied", "zeroed", "removed"])
def test_a_damaged_artifact_is_as_good_as_missing(cache: Cache, suffix: str, damage: str) -> None:
    (path,) = cache.path.glob(f"*.{suffix}")
    data = path.read_bytes()
    # the second digit of the record's seconds; any byte of the code
    place = data.index(b"5") if suffix == "json" else 1000
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes({
            "flipped": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
            "cut short": data[:-1],
            "emptied": b"",
            "zeroed": bytes(len(data)),
        }[damage])  # fmt: skip
    assert cache.find(KEY) is None
    with pytest.raises(ValueError, match="or it is damaged"):
        cache.code(KEY)
    cache.keep(KEY, CODE, RECORD)
    assert cache.code(KEY).read_bytes() == CODE


def test_the_place_is_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache().path == tmp_path / ".cache" / "lazygt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache().path == tmp_path / "xdg" / "lazygt"


def test_a_user_without_a_home_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no password file knows."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = Cache()
    assert cache.path == tmp_path / f"compiled-by-lazygt-{os.getuid()}"
    cache.keep(KEY, CODE, RECORD)
    assert cache.find(KEY) == RECORD
    assert cache.path.stat().st_mode & 0o777 == 0o700
    assert Cache(str(tmp_path / "given")).path == tmp_path / "given"


def test_a_link_that_somebody_else_has_put_there_is_refused(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lead elsewhere as soon as it was looked at."""
    link = tmp_path / "link"
    link.symlink_to(cache.path)
    assert Cache(str(link)).find(KEY) == RECORD
    lstat = Path.lstat

    def of_another(path: Path) -> os.stat_result:
        fields = list(lstat(path))
        fields[stat.ST_UID] += path == link
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", of_another)
    assert cache.find(KEY) == RECORD
    with pytest.raises(PermissionError, match="only you may write to it, or link it"):
        Cache(str(link)).find(KEY)
