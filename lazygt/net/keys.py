"""Keys of hosts and clients: derived from a session's token, or stored in files.

A key file is TOML, belongs to one user and is readable by nobody else. A pool's directory holds::

    server.key        the pool's own pair
    clients/HEX       a file for each client, named by its public key, with the client's name in it

The directory is read for each lookup, so a revoked key is refused from then on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from lazygt.errors import SecurityError
from lazygt.host.files import READABLE, create_whole, make_folder, open_own
from lazygt.net.channel import Keys

#: Characters of the shortest token: 128 bits in hexadecimal.
TOKEN_LENGTH = 32
#: Name of a pool's own key.
SERVER = "(server)"
#: Bytes of the longest token.
TOKEN_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_PURPOSE = b"lazygt curve"  # separates keys from other values derived from a token
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


# -- of a session ------------------------------------------------------------------------------


def new_token() -> str:
    """Return a new random value for LAZYGT_TOKEN: 256 bits."""
    return secrets.token_hex(32)


def derived(token: bytes, role: str) -> Keys:
    """Derive the CURVE keys of a role (``client``, ``agent`` ...) from a session's token.

    All hosts derive the same keys, so no key is transmitted. The secret key is BLAKE2b of the role,
    keyed with the token (RFC 7693); the public key is computed from the secret one
    (``crypto_scalarmult_base``).

    Raises:
        ValueError: the token is empty, or longer than 64 bytes.
    """
    if not 0 < len(token) <= TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes: expected 1 to {TOKEN_BYTES}")
    digest = hashlib.blake2b(role.encode(), digest_size=32, key=token, person=_PURPOSE).digest()
    secret = z85.encode(digest)
    return Keys(zmq.curve_public(secret).decode(), secret.decode())


def token_from(environment: Mapping[str, str]) -> bytes | None:
    """Return the session's token: LAZYGT_TOKEN, or the contents of LAZYGT_TOKEN_FILE.

    None without either.

    Raises:
        SecurityError: the token is too short to be secret, or too long, or others may read the
            file.
    """
    name, token = "LAZYGT_TOKEN", environment.get("LAZYGT_TOKEN", "")
    if not token and (path := environment.get("LAZYGT_TOKEN_FILE")):
        name, token = f"LAZYGT_TOKEN_FILE {path}", _read_private(Path(path))
    elif not token:
        return None
    token = token.strip()
    if len(token) < TOKEN_LENGTH or len(token.encode()) > TOKEN_BYTES:
        raise SecurityError(
            f"{name} has {len(token)} characters: expected {TOKEN_LENGTH} to {TOKEN_BYTES} that "
            f"nobody guesses; make one with `lazygt keys token`"
        )
    return token.encode()


# -- of a pool ---------------------------------------------------------------------------------


def keys_directory() -> Path:
    """Return the default directory of a pool's keys, among the user's settings."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base).absolute() if base else Path.home() / ".config") / "lazygt" / "keys"


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Client's key pair, with the client's name and the pool's key."""

    name: str  # name of the client
    public: str  # public, secret: the client's key pair (Z85)
    secret: str
    server: str  # the public key of the pool
    endpoint: str = ""  # the pool's endpoint, if it was known; else ""

    @property
    def keys(self) -> Keys:
        return Keys(self.public, self.secret)

    def write(self, path: Path) -> None:
        """Write the key to a new file that only this user can read.

        Raises:
            FileExistsError: there is such a file.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        _write_private(path, "# a secret key of lazygt: for its owner alone", fields)

    @staticmethod
    def read(path: Path) -> KeyFile:
        """Read a key file.

        Raises:
            SecurityError: the file is missing or damaged, or others may read it.
        """
        fields = _read_fields(path)
        for name in ("public", "secret", "server"):
            if not _Z85.fullmatch(fields.get(name, "")):
                raise SecurityError(f"{path}: {name} is missing or is no key of 40 characters")
        known = {name: fields.get(name, "") for name in KeyFile.__slots__}
        return KeyFile(**known)


class Keyring:
    """Keys of a pool, in a directory that only its user can write to or read.

    Attributes:
        directory: the directory of the keys; it is created if it is missing.
        server: the pool's own key pair, generated at its first use.

    Raises:
        SecurityError: others may write to the directory, or read the pool's key.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._clients = directory / "clients"
        for folder in (directory, self._clients):
            try:
                make_folder(folder)
            except PermissionError as error:
                raise SecurityError(
                    f"{folder}: a user with write access here can admit any client: `chmod 700 "
                    f"{folder}`, and it must be yours"
                ) from error
        self.server = self._server()

    def _server(self) -> Keys:
        """Read the pool's key pair; generate it if there is none."""
        path = self.directory / "server.key"
        keys = Keys.generate()
        with suppress(FileExistsError):
            fields = {"public": keys.public, "secret": keys.secret}
            _write_private(path, "# the secret key of a pool of lazygt", fields)
        fields = _read_fields(path)
        if not (_Z85.fullmatch(fields.get("secret", "")) and "public" in fields):
            raise SecurityError(f"{path}: there is no key of 40 characters in it")
        return Keys(fields["public"], fields["secret"])

    def allows(self, public: str) -> str | None:
        """Return the name of the client with this public key; None if it is not allowed."""
        if public == self.server.public:
            return SERVER
        if not _Z85.fullmatch(public):
            return None
        try:
            path = self._file_of(public)
            return self._name_in(path) if path.exists() else None
        except FileNotFoundError:  # it was revoked just now
            return None

    def administrates(self, name: str) -> bool:
        """Return whether the client of this name may administer the pool."""
        if name == SERVER:
            return True
        path = self._files().get(name)
        return path is not None and _read_fields(path).get("administrates") == "yes"

    def own(self, endpoint: str = "") -> KeyFile:
        """Return the pool's own key, as a client's key file with the right to administer."""
        keys = self.server
        return KeyFile(SERVER, keys.public, keys.secret, keys.public, endpoint)

    def new(self, name: str, endpoint: str = "", administrates: bool = False) -> KeyFile:
        """Generate a key and allow it. The secret half is only in the returned value.

        Args:
            administrates: True if the client may see, drain and evict.

        Raises:
            ValueError: there is a client of that name, or the name is invalid.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no name of a client: expected up to 64 letters, digits and .-_@"
            )
        if name in self.names():
            raise ValueError(f"{name} has a key: revoke that one first, or choose another name")
        keys = Keys.generate()
        fields = {"name": name, "public": keys.public}
        if administrates:
            fields["administrates"] = "yes"
        _write_private(self._file_of(keys.public), "# a client that is allowed", fields)
        return KeyFile(name, keys.public, keys.secret, self.server.public, endpoint)

    def revoke(self, name: str) -> None:
        """Revoke a client's key.

        Raises:
            KeyError: there is no client of that name.
        """
        path = self._files().get(name)
        if path is None:
            raise KeyError(name)
        path.unlink()

    def names(self) -> list[str]:
        """Return the names of all allowed clients, sorted."""
        return sorted(self._files())

    def _files(self) -> dict[str, Path]:
        """Return the key file of each allowed client, by the client's name."""
        files = {}
        for path in self._clients.glob("[!.]*"):
            with suppress(FileNotFoundError):  # it was revoked meanwhile
                files[self._name_in(path)] = path
        return files

    def _file_of(self, public: str) -> Path:
        return self._clients / z85.decode(public).hex()

    @staticmethod
    def _name_in(path: Path) -> str:
        return _read_fields(path).get("name", "")


# -- files -------------------------------------------------------------------------------------


def _write_private(path: Path, title: str, fields: Mapping[str, str]) -> None:
    """Write a new private file atomically.

    Raises:
        FileExistsError: the file exists.
    """
    lines = [f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in fields.items()]
    create_whole(path, "\n".join([title, *lines, ""]).encode())


def _read_private(path: Path) -> str:
    """Return the text of a private file.

    Raises:
        SecurityError: the file is missing, or another user owns it or may read it.
    """
    if not path.exists():
        raise SecurityError(f"there is no {path}")
    try:
        fd = open_own(path.resolve())  # links are followed: secrets are mounted as such
    except PermissionError as error:
        raise SecurityError(f"a secret must be your own: {error}") from error
    with open(fd, encoding="utf-8") as file:
        if os.fstat(fd).st_mode & READABLE:
            raise SecurityError(f"{path} holds a secret that others may read: `chmod 600 {path}`")
        return file.read()


def _read_fields(path: Path) -> dict[str, str]:
    """Return the fields of a private TOML file, as text."""
    try:
        fields = tomllib.loads(_read_private(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SecurityError(f"{path} is no key file: {error}") from error
    return {name: str(value) for name, value in fields.items()}
