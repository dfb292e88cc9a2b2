"""The wait for the hosts of a job: refused hosts end it, and strangers do not."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import zmq

from lazygt.errors import AccessDenied, LaunchError, VersionMismatch
from lazygt.net import listening
from lazygt.net.channel import Keys
from lazygt.net.connection import Listener, dial
from lazygt.net.keys import derived
from lazygt.net.tcp import Versions
from lazygt.runtime.cluster.attach import SHARE_FOR_TRUE_HOSTS, Refusals
from lazygt.runtime.cluster.environment import Job
from tests.runtime.cluster.jobs import POD

pytestmark = pytest.mark.timeout(120)

TOKEN, OTHER = b"t" * 32, b"o" * 32
AGENT, CLIENT = derived(TOKEN, "agent"), derived(TOKEN, "client")
SECONDS = 60.0
#: An address is known where its connection was looked at before it ended.
SOMEWHERE = r"(127\.0\.0\.1|an unknown address)"


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A client's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    known = {AGENT.public: "agent"}
    listener = Listener(context, "127.0.0.1", 0, CLIENT, known.get, 1 << 20)
    yield listener
    listener.close()
    context.destroy(0)


@pytest.fixture
def job() -> Job:
    """Of the client of a job on two hosts."""
    job = Job.from_environment({**POD, "RANK": "0", "WORLD_SIZE": "2"})
    assert job is not None
    return job


def calls(listener: Listener, keys: Keys, server: Keys, error: type[Exception]) -> None:
    """Have a host call that is refused."""
    raised: list[BaseException] = []

    def call() -> None:
        with zmq.Context() as context, pytest.raises(error) as caught:
            dial(context, listener.address, keys, server.public, b"", 1 << 20, SECONDS)
        raised.append(caught.value)

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        assert listener.accept() is None
        select.select([listener.fd], [], [], 0.01)
    thread.join()
    assert raised


def a_host_with_another_token(listener: Listener) -> None:
    calls(listener, derived(OTHER, "agent"), derived(OTHER, "client"), AccessDenied)
    until_counted(listener, 1)


def until_counted(listener: Listener, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while listener.counts["handshake"] < count or not listener.strangers.addresses:
        assert time.monotonic() < deadline, listener.counts
        listener.accept()


def check(job: Job, listener: Listener, has_come: bool = False, told: str = "") -> None:
    """Look for refused hosts when the time for true ones is over."""
    Refusals(job, listener, lambda: told, 0.0).check(has_come)


def test_as_many_hosts_with_another_token_as_are_awaited(job: Job, listener: Listener) -> None:
    check(job, listener)
    a_host_with_another_token(listener)
    with pytest.raises(LaunchError, match=rf"^LAZYGT_TOKEN is another .* here: {SOMEWHERE} came"):
        check(job, listener)
    check(job, listener)  # the next start does not know of them


def test_true_hosts_have_time(
    job: Job, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    a_host_with_another_token(listener)
    refusals = Refusals(job, listener, lambda: "", SECONDS / SHARE_FOR_TRUE_HOSTS)
    refusals.check(False)
    refusals.check(False)
    (said,) = caplog.messages
    assert re.match(f"refused {SOMEWHERE}: no proof of this host's LAZYGT_TOKEN", said)


def test_a_stranger_ends_no_wait_once_a_host_has_come(job: Job, listener: Listener) -> None:
    a_host_with_another_token(listener)
    check(job, listener, has_come=True)


def test_fewer_strangers_than_hosts_are_awaited_end_no_wait(job: Job, listener: Listener) -> None:
    a_host_with_another_token(listener)
    a_host_with_another_token(listener)
    check(replace(job, world_size=3, hosts=3), listener)
    check(replace(job, world_size=3, hosts=None), listener)


def test_strangers_that_are_no_hosts_with_another_token_end_no_wait(
    job: Job, listener: Listener
) -> None:
    """One that knows the listener's key, and one that hangs up; both are told of."""
    calls(listener, Keys.generate(), CLIENT, AccessDenied)
    with socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2]))):
        while "127.0.0.1" not in listener.strangers.accepted:
            listener.accept()
    until_counted(listener, 2)
    check(job, listener)
    summary = str(Refusals(job, listener, lambda: "", SECONDS))
    assert summary.endswith(", from 127.0.0.1")


def test_a_host_that_says_in_the_jobs_store_that_its_token_is_another(
    job: Job, listener: Listener
) -> None:
    with pytest.raises(LaunchError, match="LAZYGT_TOKEN is another one for 'rank 1 on host1' of"):
        check(job, listener, told="rank 1 on host1")


def test_a_host_with_other_versions(
    job: Job, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "versions_here", lambda: Versions("9.9", "1.0", "2.7"))
    calls(listener, AGENT, CLIENT, VersionMismatch)
    with pytest.raises(LaunchError, match=r"at 127\.0\.0\.1: lazygt is 9\.9 here and .* there"):
        check(job, listener)
    check(job, listener)
