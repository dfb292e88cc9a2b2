"""``lazygt keys``: what it makes, and what it says where it is asked wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lazygt.cli.app import app
from lazygt.net.keys import KeyFile, Keyring


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def keys(*args: str) -> Any:
    result = CliRunner().invoke(app, ["keys", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_key_is_made_listed_and_revoked(here: Path) -> None:
    made = keys("new", "alice", "--endpoint", "tcp://host:7000")
    assert made.exit_code == 0
    assert made.stdout.startswith("alice.key: the key of alice")
    key = KeyFile.read(here / "alice.key")
    ring = Keyring(here / "config" / "lazygt" / "keys")
    assert (key.name, key.endpoint, key.server) == ("alice", "tcp://host:7000", ring.server.public)
    assert ring.allows(key.public) == "alice"
    keys("new", "bob", "-o", "b.key")
    assert keys("list").stdout.split() == ["alice", "bob"]
    assert keys("revoke", "alice").exit_code == 0
    assert ring.allows(key.public) is None
    assert keys("list").stdout.split() == ["bob"]


def test_a_directory_can_be_given(here: Path) -> None:
    assert keys("new", "alice", "--keys", "pool", "-o", "a.key").exit_code == 0
    assert Keyring(here / "pool").names() == ["alice"]
    assert keys("list").stdout == ""


def test_a_token_is_fresh_each_time() -> None:
    tokens = {keys("token").stdout.strip() for _ in range(3)}
    assert {len(token) for token in tokens} == {64}
    assert len(tokens) == 3


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("new", "a b"), "'a b' is no name of a client"),
        (("new", "alice", "-o", "taken.key"), "there is a taken.key: choose another file with -o"),
        (("new", "alice", "-o", "no/where.key"), "No such file or directory"),
        (("revoke", "nobody"), "no client is called nobody: `lazygt keys list` names them all"),
        (("list", "--keys", "open"), "chmod 700 open"),
    ],
)
def test_keys_command_reports_mistakes(here: Path, args: tuple[str, ...], says: str) -> None:
    (here / "taken.key").touch()
    (here / "open").mkdir()
    (here / "open").chmod(0o777)
    result = keys(*args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert Keyring(here / "config" / "lazygt" / "keys").names() == []
