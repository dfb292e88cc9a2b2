"""Server of a pool: keys, quotas, and the opening of the gateway."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import zmq

from lazygt.net.connection import Listener
from lazygt.net.keys import KeyFile, Keyring
from lazygt.pool.gateway import Gateway
from lazygt.pool.pool_client import LONGEST
from lazygt.pool.requests import Quota, Rules

#: Name of the pool's own key.
SERVER = "(server)"
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def server_key(keyring: Keyring, endpoint: str = "") -> KeyFile:
    """Return the pool's own key, as a client's key file with the right to administer."""
    keys = keyring.server
    return KeyFile(SERVER, keys.public, keys.secret, keys.public, endpoint)


class Doorkeeper:
    """Admission of keys, for use and for administration."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    def allows(self, public: str) -> str | None:
        """Return the name of a public key, or None."""
        return SERVER if public == self._keyring.server.public else self._keyring.allows(public)

    def administrates(self, name: str) -> bool:
        """Return whether the key of this name may administer."""
        return name == SERVER or self._keyring.administrates(name)


def open_gateway(
    bind: tuple[str, int], keyring: Keyring, rules: Rules, device: str, caches: Path
) -> Gateway:
    """Open a listening gateway of a pool; `Gateway.serve` runs it.

    Args:
        bind: host and port.

    Raises:
        OSError: the address can't be listened on.
    """
    doorkeeper = Doorkeeper(keyring)
    listener = Listener(
        zmq.Context.instance(), *bind, keyring.server, doorkeeper.allows, LONGEST,
        grace=max(rules.grace, 1.0),
    )  # fmt: skip
    return Gateway(listener, doorkeeper.administrates, rules, device, caches)


def address(text: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``.

    Raises:
        ValueError: the text has another form.
    """
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address such as 'tcp://127.0.0.1:7000'")
    return host.strip("[]"), int(port)


def quotas(path: Path) -> tuple[Quota, dict[str, Quota]]:
    """Read the default quota and those of some clients from a TOML file::

        [default]
        workers = 4
        memory = "8 GiB"

        [client.alice]
        sessions = 2

    Entries missing in a client's table default to those of ``default``.

    Raises:
        ValueError: the file is no valid quota file.
        OSError: the file can't be read.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    unknown = sorted(tables.keys() - {"default", "client"})
    if unknown:
        raise ValueError(f"{path}: [{unknown[0]}]: expected [default] and [client.NAME]")
    default = _limits(path, "default", tables.get("default", {}))
    clients = tables.get("client", {})
    if not isinstance(clients, Mapping):
        raise ValueError(f"{path}: expected [client.NAME]")
    return Quota(**default), {
        name: Quota(**{**default, **_limits(path, f"client.{name}", table)})
        for name, table in clients.items()
    }


def _limits(path: Path, name: str, table: Any) -> dict[str, int]:
    """Parse and check one table of quotas."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{path}: expected a table [{name}]")
    allowed = [field.name for field in fields(Quota)]
    limits = {}
    for key, value in table.items():
        if key not in allowed:
            raise ValueError(f"{path}: [{name}] {key}: expected {', '.join(allowed)}")
        number = _nbytes(value) if key == "memory" and isinstance(value, str) else value
        if type(number) is not int or number < 0:
            raise ValueError(f"{path}: [{name}] {key} = {value!r}: expected a whole number >= 0")
        limits[key] = number
    return limits


def _nbytes(text: str) -> int | None:
    """Parse a size such as ``8 GiB`` into bytes; None: the text is no size."""
    number, _, unit = text.strip().partition(" ")
    with suppress(ValueError, KeyError):
        return int(float(number) * _SIZES[unit.strip()])
    return None


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
