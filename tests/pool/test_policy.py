"""The pool's policy: timed events in, lists of instructions out."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazygt.errors import (
    GangTooLarge,
    OverQuota,
    PoolDraining,
    PoolError,
    PoolFull,
    SessionEnded,
)
from lazygt.pool.policy import EndSession, Grant, Policy, Refuse, SessionRequest
from lazygt.pool.requests import Quota, Rules
from lazygt.pool.scheduler import Pause, Resume

pytestmark = pytest.mark.timeout(60)


def policy(workers=4, **given):
    return Policy(Rules(workers, **{"at_once": workers, **given}))


def ask(pool, session, workers=1, client=None, now=0.0, cores=None, **given):
    asked = SessionRequest(session, client or session, workers, cores or workers, **given)
    return pool.request(asked, now)


def refusal(steps):
    (step,) = steps
    assert isinstance(step, Refuse)
    return step.error


def granted(steps):
    return [step.session for step in steps if isinstance(step, Grant)]


def test_a_gang_gets_its_places_at_once_and_they_are_nobody_elses():
    pool = policy(4)
    assert ask(pool, "a", 3) == [Grant("a", (0, 1, 2)), Resume("a")]
    assert ask(pool, "b", 2) == []
    assert pool.free == 1
    assert pool.release("a", 1.0) == [Grant("b", (0, 1)), Resume("b")]
    assert pool.free == 2


def test_a_gang_that_can_never_fit_is_refused_at_once():
    error = refusal(ask(policy(4), "a", 5))
    assert isinstance(error, GangTooLarge)
    assert (error.asked, error.workers) == (5, 4)


def test_full_pool_queues_to_limit_and_reports_queue_length():
    pool = policy(1, queue=2)
    ask(pool, "a")
    assert ask(pool, "b") == ask(pool, "c") == []
    error = refusal(ask(pool, "d"))
    assert isinstance(error, PoolFull)
    assert error.waiting == 2
    assert pool.queue == ["b", "c"]


def test_pool_without_queue_grants_free_workers():
    pool = policy(1, queue=0)
    assert granted(ask(pool, "a")) == ["a"]
    assert isinstance(refusal(ask(pool, "b")), PoolFull)


def test_clients_take_turns_in_the_queue_whoever_came_first():
    pool = policy(1)
    for session, client in (("x", "x"), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        ask(pool, session, client=client)
    assert pool.queue == ["a1", "b1", "a2", "a3"]
    order = []
    last = "x"
    for _ in range(4):
        (last,) = granted(pool.release(last, 1.0))
        order.append(last)
    assert order == ["a1", "b1", "a2", "a3"]


def test_waiting_gang_is_not_overtaken():
    pool = policy(4)
    ask(pool, "a", 3)
    ask(pool, "gang", 4)
    assert ask(pool, "small", 1) == []
    assert granted(pool.release("a", 1.0)) == ["gang"]
    assert granted(pool.release("gang", 2.0)) == ["small"]


@pytest.mark.parametrize(
    ("quota", "workers", "what", "numbers"),
    [
        (Quota(sessions=1), 1, "sessions", (1, 1, 1)),
        (Quota(workers=3), 2, "workers", (2, 2, 3)),
        (Quota(cores=3), 2, "cores", (2, 2, 3)),
    ],
)
def test_request_over_quota_reports_numbers(quota, workers, what, numbers):
    pool = policy(8, quotas={"k": quota})
    ask(pool, "first", workers if what != "sessions" else 1, client="k")
    error = refusal(ask(pool, "second", workers, client="k"))
    assert isinstance(error, OverQuota)
    assert (error.what, (error.wanted, error.used, error.limit)) == (what, numbers)
    assert granted(ask(pool, "other", workers, client="another")) == ["other"]


def test_over_its_memory_the_largest_session_of_a_client_ends():
    pool = policy(4, quotas={"k": Quota(memory=100)})
    for session in ("small", "large"):
        ask(pool, session, client="k")
    ask(pool, "other")
    assert pool.memory_used({"small": 10, "large": 60, "other": 900}, {"k": 30}, 1.0) == []
    steps = pool.memory_used({"small": 10, "large": 61, "other": 900}, {"k": 30}, 2.0)
    (end,) = [step for step in steps if isinstance(step, EndSession)]
    assert end.session == "large"
    assert isinstance(end.error, OverQuota)
    assert (end.error.wanted, end.error.used, end.error.limit) == (61, 40, 100)
    assert "quota of 100 bytes of memory" in str(end.error)


def test_a_session_outlives_its_connection_for_its_grace_and_its_places_stay_its_own():
    pool = policy(1, grace=60.0)
    ask(pool, "a", grace=10.0)
    ask(pool, "b")
    assert pool.client_gone("a", False, 5.0) == []
    assert pool.seconds_to_next(5.0) == 10.0
    assert pool.tick(14.9) == []
    (end,) = pool.tick(15.0)
    assert isinstance(end, EndSession)
    assert isinstance(end.error, SessionEnded)
    assert pool.tick(16.0) == []
    assert granted(pool.release("a", 16.0)) == ["b"]


def test_session_survives_return_of_client_within_grace():
    pool = policy(1)
    ask(pool, "a", grace=10.0)
    pool.client_gone("a", False, 5.0)
    pool.client_back("a")
    assert pool.tick(1000.0) == []


def test_no_grace_is_longer_than_the_pools():
    pool = policy(1, grace=3.0)
    ask(pool, "a", grace=1e9)
    pool.client_gone("a", False, 0.0)
    assert pool.seconds_to_next(0.0) == 3.0


@pytest.mark.parametrize(("grace", "for_good"), [(0.0, False), (60.0, True)])
def test_without_grace_or_without_its_client_a_session_ends_at_once(grace, for_good):
    pool = policy(1)
    ask(pool, "a", grace=grace)
    (end,) = pool.client_gone("a", for_good, 0.0)
    assert isinstance(end, EndSession)


def test_a_detached_session_lives_until_it_is_evicted_or_expires():
    pool = policy(2, expiry=1000.0)
    for session in ("a", "b"):
        ask(pool, session, grace=1.0, detach=True)
        pool.client_gone(session, True, 0.0)
    assert pool.tick(999.0) == []
    (end,) = pool.evict("a", 999.0)
    assert "evict" in str(end.error)
    (end,) = pool.tick(1000.0)
    assert end.session == "b"


def test_departed_client_leaves_queue():
    pool = policy(1)
    for session in ("a", "b", "c"):
        ask(pool, session)
    assert pool.client_gone("b", True, 1.0) == []
    assert pool.queue == ["c"]
    (refused,) = pool.evict("c", 1.0)
    assert isinstance(refused, Refuse)
    assert pool.queue == []


def test_drained_pool_refuses_new_and_queued_sessions_and_keeps_running_ones():
    pool = policy(1)
    for session in ("a", "b"):
        ask(pool, session)
    assert isinstance(refusal(pool.drain()), PoolDraining)
    assert isinstance(refusal(ask(pool, "c")), PoolDraining)
    assert pool.release("a", 2.0) == []
    assert pool.leases == {}


def test_two_busy_clients_alternate_on_one_slot():
    pool = policy(2, at_once=1)
    assert Resume("a") in ask(pool, "a")
    assert granted(ask(pool, "b")) == ["b"]
    assert pool.load("a", 1, 0, 0.001) == []
    assert pool.load("b", 0, 1, 0.001) == []
    # a has used up its time, but its next run is with its workers already
    assert pool.ran("a", 0.2, 0.2) == [Pause("a")]
    assert pool.load("a", 0, 1, 0.3) == [Resume("b")]
    assert not pool.turns.passes("a")


def test_pool_errors_survive_pickling():
    errors = [
        PoolError("why"), PoolFull(2, 8), PoolDraining(), GangTooLarge(9, 8),
        OverQuota("memory", 1, 2, 3), SessionEnded("s", "it expired"),
    ]  # fmt: skip
    for error in errors:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


# -- drawn events ------------------------------------------------------------------------------

SESSIONS, CLIENTS = [f"s{n}" for n in range(8)], ["k0", "k1", "k2"]
QUOTAS = {"k0": Quota(sessions=2, workers=3, cores=4)}
SECONDS = st.floats(0.0, 0.3)
#: (method of the policy, its arguments without the time)
EVENTS = st.one_of(
    st.tuples(st.just("request"), st.builds(
        SessionRequest, st.sampled_from(SESSIONS), st.sampled_from(CLIENTS), st.integers(0, 5),
        st.integers(1, 5), SECONDS, st.booleans(),
    )),
    st.tuples(st.just("release"), st.sampled_from(SESSIONS)),
    st.tuples(st.just("load"), st.sampled_from(SESSIONS), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("ran"), st.sampled_from(SESSIONS), SECONDS),
    st.tuples(st.just("client_gone"), st.sampled_from(SESSIONS), st.booleans()),
    st.tuples(st.just("client_back"), st.sampled_from(SESSIONS)),
    st.tuples(st.just("evict"), st.sampled_from(SESSIONS)),
    st.just(("tick",)),
)  # fmt: skip


class Model:
    """What the instructions add up to, and what must be true of it at any time."""

    def __init__(self, pool):
        self.pool = pool
        self.asked = {}
        self.slots = {}
        self.resumed = set()
        self.ended = set()

    def handle(self, event, now):
        kind, *arguments = event
        if kind == "request":
            self.asked.setdefault(arguments[0].session, arguments[0])
        waits = arguments and arguments[0] in set(self.asked) - set(self.slots)
        if kind == "release" or (kind == "client_gone" and arguments[1] and waits):
            self.forget(arguments[0])
        if kind == "client_back":
            self.pool.client_back(*arguments)
        else:
            for step in getattr(self.pool, kind)(*arguments, now):
                self.follow(step, event)
        self.check()

    def follow(self, step, event):
        session = step.session
        match step:
            case Grant(_, slots):
                assert session not in self.slots
                self.slots[session] = slots
            case Refuse():
                again = event[0] == "request" and event[1].session == session
                twice = again and event[1] is not self.asked.get(session)
                if not twice:
                    self.forget(session)
            case EndSession():
                assert session in self.slots
                assert session not in self.ended
                self.ended.add(session)
                self.resumed.discard(session)
            case Resume():
                assert session in self.slots
                assert session not in self.resumed
                self.resumed.add(session)
            case Pause():
                self.resumed.remove(session)

    def forget(self, session):
        self.asked.pop(session, None)
        self.slots.pop(session, None)
        self.resumed.discard(session)
        self.ended.discard(session)

    def check(self):
        taken = [slot for slots in self.slots.values() for slot in slots]
        assert len(taken) == len(set(taken)) <= self.pool.rules.workers
        assert set(taken) <= set(range(self.pool.rules.workers))
        for session, slots in self.slots.items():
            assert len(slots) == self.asked[session].workers
        for client, quota in QUOTAS.items():
            theirs = [self.asked[s] for s in self.slots if self.asked[s].client == client]
            assert len(theirs) <= quota.sessions
            assert sum(asked.workers for asked in theirs) <= quota.workers
            assert sum(asked.cores for asked in theirs) <= quota.cores
        at_once = self.pool.rules.at_once
        assert sum(min(len(self.slots[s]), at_once) for s in self.resumed) <= at_once
        assert len(self.pool.queue) <= self.pool.rules.queue


@given(st.lists(st.tuples(EVENTS, SECONDS), max_size=80), st.integers(1, 4), st.integers(0, 3))
def test_random_events_keep_policy_invariants(events, at_once, queue):
    model = Model(policy(4, at_once=at_once, queue=queue, grace=0.5, expiry=1.0, quotas=QUOTAS))
    now = 0.0
    for event, pause in events:
        model.handle(event, now)
        now += pause
    # Whatever state that was: once all sessions have ended, the pool is as new.
    for session in SESSIONS:
        model.handle(("evict", session), now)
    for session in SESSIONS:
        model.handle(("release", session), now)
    assert model.pool.free == 4
    assert model.pool.leases == {}
    assert model.pool.queue == []
    model.handle(("request", SessionRequest("s0", "k1", 4, 4)), now)
    assert model.slots == {"s0": (0, 1, 2, 3)}
    assert model.resumed == {"s0"}


@given(
    st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 4)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_queue_wait_is_bounded(asks, random):
    """A client's nth session in the queue waits for at most n rounds of the clients."""
    pool = policy(4)
    waits, granted_now = {}, []
    for number, (client, workers) in enumerate(asks):
        session = f"s{number}"
        ahead = sum(1 for s in pool.queue if pool.leases[s].request.client == client)
        granted_now += granted(ask(pool, session, workers, client))
        if session in pool.queue:
            waits[session] = (ahead + 1) * len(CLIENTS)
    running = list(granted_now)
    while running:
        leaves = running.pop(random.randrange(len(running)))
        for session in granted(pool.release(leaves, 1.0)):
            running.append(session)
            for other in set(pool.queue) & set(waits):
                waits[other] -= 1
                assert waits[other] >= 0
    assert pool.queue == []
    assert pool.leases == {}
