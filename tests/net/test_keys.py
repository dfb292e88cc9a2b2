"""Keys that are made of a token: the same for the same, others for any other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from lazygt.errors import SecurityError
from lazygt.net.channel import Keys
from lazygt.net.keys import KeyFile, Keyring, derived, new_token, token_from

TOKEN = bytes(range(32))


def test_both_ends_make_the_same_keys() -> None:
    keys = derived(TOKEN, "store")
    assert keys == derived(bytes(range(32)), "store")
    assert zmq.curve_public(keys.secret.encode()).decode() == keys.public
    assert len(keys.public) == len(keys.secret) == 40


def test_another_token_or_role_has_other_keys() -> None:
    pairs = {derived(token, role) for token in (TOKEN, bytes(32)) for role in ("store", "client")}
    assert len({keys.public for keys in pairs} | {keys.secret for keys in pairs}) == 8


@pytest.mark.parametrize("size", [0, 65])
def test_a_token_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"a token of {size} bytes"):
        derived(bytes(size), "store")


# -- tokens ------------------------------------------------------------------------------------


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{'t' * 40}\n")
    path.chmod(0o600)
    assert token_from({}) is None
    assert token_from({"LAZYGT_TOKEN": "x" * 32}) == b"x" * 32
    assert token_from({"LAZYGT_TOKEN_FILE": str(path)}) == b"t" * 40
    fresh = new_token()
    assert token_from({"LAZYGT_TOKEN": fresh}) == fresh.encode()
    assert len(derived(fresh.encode(), "client").public) == 40


@pytest.mark.parametrize("length", [1, 31, 65])
def test_a_token_of_the_wrong_length_is_refused(length: int) -> None:
    with pytest.raises(SecurityError, match=rf"has {length} characters.*`lazygt keys token`"):
        token_from({"LAZYGT_TOKEN": "x" * length})


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t" * 40)
    path.chmod(0o640)
    with pytest.raises(SecurityError, match=rf"chmod 600 {path}"):
        token_from({"LAZYGT_TOKEN_FILE": str(path)})


@pytest.mark.timeout(30)
def test_pipe_in_the_place_of_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    os.mkfifo(path, 0o600)
    with pytest.raises(SecurityError, match=f"{path} is no file"):
        token_from({"LAZYGT_TOKEN_FILE": str(path)})


def test_token_is_read_through_a_link(tmp_path: Path) -> None:
    """As secrets are mounted in containers."""
    (tmp_path / "..data").write_text("t" * 40)
    (tmp_path / "..data").chmod(0o400)
    (tmp_path / "token").symlink_to("..data")
    assert token_from({"LAZYGT_TOKEN_FILE": str(tmp_path / "token")}) == b"t" * 40


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"there is no .*/nowhere"):
        token_from({"LAZYGT_TOKEN_FILE": str(tmp_path / "nowhere")})


# -- files -------------------------------------------------------------------------------------


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "alice.key"
    keys = Keys.generate()
    file = KeyFile("alice", keys.public, keys.secret, Keys.generate().public, "tcp://h:1")
    file.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert KeyFile.read(path) == file
    assert file.keys == keys
    with pytest.raises(FileExistsError):
        file.write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["alice.key"]
    path.chmod(0o604)
    with pytest.raises(SecurityError, match=f"chmod 600 {path}"):
        KeyFile.read(path)


@pytest.mark.parametrize("text", ["", "name = ", 'public = "short"', "\x00"])
def test_a_damaged_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "alice.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SecurityError, match=str(path)):
        KeyFile.read(path)


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="there is no"):
        KeyFile.read(tmp_path / "nobody.key")


def test_a_keyring_allows_and_revokes(tmp_path: Path) -> None:
    ring, second = Keyring(tmp_path / "keys"), Keyring(tmp_path / "keys")
    assert ring.server == second.server
    assert ring.names() == []
    alice, bob = ring.new("alice"), ring.new("bob", "tcp://host:7000")
    assert (alice.server, bob.endpoint) == (ring.server.public, "tcp://host:7000")
    assert second.names() == ["alice", "bob"]
    assert second.allows(alice.public) == "alice"
    assert second.allows(Keys.generate().public) is None
    ring.revoke("alice")
    assert second.allows(alice.public) is None
    assert second.allows(bob.public) == "bob"
    assert ring.new("alice").public != alice.public
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {0o600, 0o700}
    texts = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert alice.secret not in texts
    assert bob.secret not in texts


@pytest.mark.parametrize("public", ["", "short", "../../server.key", "\n" * 40, "é" * 40])
def test_malformed_key_is_not_allowed(tmp_path: Path, public: str) -> None:
    assert Keyring(tmp_path).allows(public) is None


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "x" * 65, 'a"b'])
def test_malformed_name_gets_no_key(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a client"):
        Keyring(tmp_path).new(name)


def test_a_name_has_one_key(tmp_path: Path) -> None:
    ring = Keyring(tmp_path)
    ring.new("alice")
    with pytest.raises(ValueError, match="alice has a key: revoke that one first"):
        ring.new("alice")
    with pytest.raises(KeyError):
        ring.revoke("bob")


def test_a_keyring_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    Keyring(tmp_path)
    tmp_path.chmod(0o770)
    with pytest.raises(SecurityError, match=f"chmod 700 {tmp_path}"):
        Keyring(tmp_path)
