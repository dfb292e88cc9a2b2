"""Fairness of turns, by simulation: clients that run all they can, on a pool with less room."""

from __future__ import annotations

import heapq
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lazygt.pool.scheduler import LINGER, QUANTUM, Pause, Resume, Turns

pytestmark = pytest.mark.timeout(120)


class Client:
    """Sends a run, waits for its answer, thinks, and sends the next; or sends some ahead."""

    def __init__(self, name, seconds, think=0.0, ahead=1, workers=1):
        self.name, self.seconds, self.think = name, seconds, think
        self.ahead, self.workers = ahead, workers
        self.held = self.running = 0
        self.passes = False
        self.run_seconds = 0.0
        self.waiting_since = None
        self.longest_wait = 0.0


def simulate(clients, at_once, seconds):
    """Let them run for so long."""
    turns = Turns(at_once)
    by_name = {client.name: client for client in clients}
    events, number = [], count()

    def at(when, what, client):
        heapq.heappush(events, (when, next(number), what, client))

    def begin(client, now):
        while client.held and turns.may_pass(client.name, client.running, now):
            client.running, client.held = client.running + 1, client.held - 1
        if client.running and not client.busy:
            client.busy = True
            at(now + client.seconds, "answered", client)

    def tell(client, now):
        return turns.load(client.name, client.running, client.held, now)

    def follow(steps, now):
        for step in steps:
            client = by_name[step.session]
            if isinstance(step, Pause):
                client.passes = False
                continue
            client.passes = True
            if client.waiting_since is not None:
                client.longest_wait = max(client.longest_wait, now - client.waiting_since)
                client.waiting_since = None
            begin(client, now)
            follow(tell(client, now), now)

    for client in clients:
        client.busy = False
        follow(turns.add(client.name, client.name, client.workers, 0.0), 0.0)
        for _ in range(client.ahead):
            at(client.think, "sent", client)
    now = 0.0
    while now < seconds:
        wait = turns.seconds_to_next(now)
        if wait is not None and now + wait < events[0][0]:
            now += wait + 1e-9
            follow(turns.share(now), now)
            continue
        now, _, what, client = heapq.heappop(events)
        if what == "sent":
            client.held += 1
            begin(client, now)
            if not client.passes and client.waiting_since is None:
                client.waiting_since = now
        else:
            client.running -= 1
            client.busy = False
            client.run_seconds += client.seconds * client.workers
            at(now + client.think, "sent", client)
            follow(turns.charge(client.name, client.seconds, now), now)
            begin(client, now)
        follow(tell(client, now), now)
        busy = sum(min(c.workers, at_once) for c in clients if c.busy)
        assert busy <= at_once
    return turns


def jain(shares):
    """Jain's index of fairness: 1 where all shares are equal, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def sixteen():
    """Runs of 1 ms to 2 s."""
    return [
        Client(f"c{n:02}", 0.001 * 2000 ** (n / 15), think=0.001 * (n % 5), ahead=1 + n % 4)
        for n in range(16)
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
def test_sixteen_greedy_clients_of_very_different_runs_get_the_same_time(at_once):
    clients = sixteen()
    simulate(clients, at_once, 60.0)
    shares = [client.run_seconds for client in clients]
    assert jain(shares) >= 0.95, shares
    # and the room is used: little is lost to those who are quiet for a moment
    assert sum(shares) >= 0.9 * at_once * 60.0


def test_a_gang_that_needs_all_the_room_gets_its_share_beside_small_ones():
    clients = [Client("gang", 0.05, workers=4), *(Client(f"c{n}", 0.03) for n in range(7))]
    simulate(clients, 4, 60.0)
    assert jain([client.run_seconds for client in clients]) >= 0.95


def test_single_client_never_waits():
    client = Client("c", 0.5, think=0.1)
    simulate([client], 1, 30.0)
    assert client.longest_wait == 0.0


def test_share_of_departed_client_goes_to_others():
    turns = Turns(1)
    assert turns.add("a", "a", 1, 0.0) == [Resume("a")]
    assert turns.add("b", "b", 1, 0.0) == []
    turns.load("b", 0, 1, 0.0)
    assert turns.load("a", 1, 0, 0.0) == []
    assert turns.remove("a", 0.1) == [Resume("b")]
    assert turns.deficit("a") == 0.0


def test_idle_client_loses_turn_only_if_another_waits():
    turns = Turns(1)
    turns.add("a", "a", 1, 0.0)
    assert turns.share(10 * LINGER) == []
    turns.add("b", "b", 1, 1.0)
    assert not turns.passes("a")
    assert turns.passes("b")
    turns.load("a", 0, 1, 1.0)
    assert turns.seconds_to_next(1.0) == pytest.approx(LINGER)
    assert turns.share(1.0 + 1.01 * LINGER) == [Pause("b"), Resume("a")]


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.floats(0.001, 0.5), st.floats(0.0, 0.01), st.integers(1, 4)),
        min_size=2, max_size=6,
    ),
    st.integers(1, 3),
)  # fmt: skip
def test_nobody_waits_for_longer_than_rounds_of_all_others(drawn, at_once):
    clients = [
        Client(f"c{n}", seconds, think, ahead) for n, (seconds, think, ahead) in enumerate(drawn)
    ]
    simulate(clients, at_once, 20.0)
    longest = max(client.seconds * client.ahead for client in clients)
    rounds = 2 + longest / QUANTUM
    bound = rounds * sum(QUANTUM + LINGER + c.seconds * c.ahead for c in clients)
    for client in clients:
        assert client.longest_wait <= bound
        assert client.run_seconds > 0 or bound > 20.0
