"""``lazygt pool`` and what ``lazygt serve`` is given."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import lazygt
from lazygt.cli.app import app
from lazygt.errors import SessionEnded
from lazygt.pool.pool_client import Pool
from lazygt.pool.requests import Quota, address, quotas
from lazygt.settings import grouped
from tests.pool.serving import SECONDS, Asker, served

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with served(tmp_path_factory.mktemp("pool"), "--workers", "3", "--at-once", "2") as pool:
        yield pool


def command(pool, *words, keys=True):
    own = ["--keys", str(pool.folder / "keys")] if keys else []
    return CliRunner().invoke(app, ["pool", words[0], pool.on, *words[1:], *own])


def test_status_lists_sessions_and_waiting_clients(pool):
    first, second = Asker(pool, "alice", 2), Asker(pool, "bob", 2)
    first.told()
    second.told()
    with Pool(pool.on, pool.key("alice"), SECONDS) as alice:
        alice.publish("weights", torch.ones(3), shared=True)
    told = json.loads(command(pool, "status", "--json").stdout)
    assert (told["workers"], told["free"], told["at_once"]) == (3, 1, 2)
    assert [row["client"] for row in told["sessions"]] == ["alice", "bob"]
    assert [row["places"] for row in told["sessions"]] == [[0, 1], []]
    lines = command(pool, "status").stdout.splitlines()
    assert lines[0] == "2 of 3 workers are taken, 2 run at once"
    assert lines[1].split()[:4] == ["session", "key", "state", "workers"]
    assert lines[2].split()[1] == "alice"
    assert lines[3].split()[1:5] == ["bob", "waits,", "0", "before"]
    assert lines[5].split() == ["weights", "alice", "12", "all", "keys"]
    for asker in (first, second):
        asker.close()
    pool.until(lambda status: status["free"] == 3)


def test_evict_ends_a_session_and_says_if_there_is_none(pool):
    asker = Asker(pool, "carol")
    name = asker.told().session
    done = command(pool, "evict", name)
    assert (done.exit_code, done.stdout) == (0, f"{name} is ended\n")
    with pytest.raises(SessionEnded):
        asker.told()
    asker.close()
    pool.until(lambda status: status["free"] == 3)
    done = command(pool, "evict", "carol-0")
    assert done.exit_code != 0
    assert "there is no session 'carol-0' in this pool: none" in done.output


def test_status_with_two_identities_is_refused(pool):
    done = command(pool, "status", "--key", str(pool.key("alice")))
    assert done.exit_code != 0
    assert "not both" in done.output


def test_a_key_that_may_administer_and_one_that_may_not(pool, tmp_path):
    folder = str(pool.folder / "keys")
    for name, options in (("root", ["--admin"]), ("user", [])):
        words = ["keys", "new", name, "--keys", folder, "-o", str(tmp_path / name), *options]
        assert CliRunner().invoke(app, words).exit_code == 0
    done = command(pool, "status", "--json", "--key", str(tmp_path / "root"), keys=False)
    assert json.loads(done.stdout)["workers"] == 3
    done = command(pool, "drain", "--key", str(tmp_path / "user"), keys=False)
    assert done.exit_code != 0
    assert "may not administer" in done.output


def test_status_for_non_administrator_only_counts_others(pool):
    first, second, third = Asker(pool, "alice", 2), Asker(pool, "bob", 1), Asker(pool, "bob", 3)
    for asker in (first, second, third):
        asker.told()
    for name in ("dora", "erik"):
        with Pool(pool.on, pool.key(name), SECONDS) as client:
            client.publish(f"of-{name}", torch.ones(3), shared=name == "erik")
    words = ("--key", str(pool.key("alice")))
    told = json.loads(command(pool, "status", "--json", *words, keys=False).stdout)
    assert [row["client"] for row in told["sessions"]] == ["alice"]
    assert told["others"] == {"sessions": 1, "workers": 1, "waiting": 1}
    names = {row["name"] for row in told["published"]}
    assert "of-erik" in names
    assert "of-dora" not in names
    assert "bob" not in json.dumps(told)
    said = command(pool, "status", *words, keys=False).stdout.splitlines()
    assert said[1] == "other keys have 1 sessions with 1 workers, and 1 that wait"
    told = json.loads(command(pool, "status", "--json").stdout)
    assert told["others"] == {"sessions": 0, "workers": 0, "waiting": 0}
    assert [row["client"] for row in told["sessions"]] == ["alice", "bob", "bob"]
    for asker in (third, second, first):
        asker.close()
    pool.until(lambda status: status["free"] == 3)


def test_pool_address_is_parsed():
    assert address("tcp://127.0.0.1:7000") == ("127.0.0.1", 7000)
    assert address("tcp://[::1]:0") == ("::1", 0)
    for wrong in ("127.0.0.1:7000", "tcp://:7000", "tcp://host", "tcp://host:70000", "udp://h:1"):
        with pytest.raises(ValueError, match="is no address"):
            address(wrong)


def test_quotas_of_a_file(tmp_path):
    path = tmp_path / "quota.toml"
    path.write_text('[default]\nworkers = 4\nmemory = "1.5 GiB"\n[client.alice]\nsessions = 2\n')
    default = Quota(workers=4, memory=3 << 29)
    assert quotas(path) == (default, {"alice": Quota(sessions=2, workers=4, memory=3 << 29)})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[default]\nworker = 4", r"\[default\] worker: expected sessions, workers, cores, memory"),
        ("[default]\nworkers = -1", r"workers = -1: expected a whole number"),
        ('[default]\nmemory = "8 GB"', r"memory = '8 GB': expected a whole number"),
        ("[client]\nalice = 3", r"expected a table \[client.alice\]"),
        ("[alice]\n", r"\[alice\]: expected \[default\] and \[client.NAME\]"),
        ("workers", r"quota.toml: "),
    ],
)
def test_a_wrong_file_of_quotas(tmp_path, text, wrong):
    path = tmp_path / "quota.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong):
        quotas(path)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"pool": "host:1", "key": "k"}, "expected 'tcp://HOST:PORT'"),
        ({"pool": "tcp://host:1"}, "needs key=FILE"),
        ({"key": "k"}, "say where that listens"),
        ({"detach": True}, "say where that listens"),
        ({"pool": "tcp://host:1", "key": "k", "launcher": "inline"}, "leave launcher="),
        ({"pool": "tcp://host:1", "key": "k", "spares": 1}, "leave launcher="),
        ({"pool": "tcp://host:1", "key": "k", "grace": -1.0}, "expected seconds"),
    ],
)
def test_settings_that_contradict_each_other(settings, wrong):
    with pytest.raises(ValueError, match=wrong):
        lazygt.session(**grouped(settings))


def test_publishing_needs_a_pool():
    with (
        lazygt.session(launcher="inline") as session,
        pytest.raises(ValueError, match="for a session in a pool"),
    ):
        session.publish("w", {})
