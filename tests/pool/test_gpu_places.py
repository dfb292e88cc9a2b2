"""Which GPUs a session in a pool gets: those of its slots, which are nobody else's."""

from __future__ import annotations

import random

import pytest
import torch

from lazygt.pool.hosted import Terms
from lazygt.pool.policy import Grant, Policy, SessionRequest
from lazygt.pool.requests import Rules
from lazygt.runtime.cluster.protocol import spec_of, spec_text
from lazygt.runtime.launch.start_plan import LinkSpec, StartPlan


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """A machine with so many GPUs, as far as this process can see; and what ranks see there."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")

    def machine(count, visible=None):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

        def seen(spec):
            plan = StartPlan(spec, tmp_path, b"token")
            return [plan.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in spec.here]

        return seen

    return machine


def granted(slots, device="cuda"):
    terms = Terms(len(slots), 1, device, "/cache", slots)
    return terms.apply(spec_of(spec_text(LinkSpec(world_size=len(slots), device=device))))


def test_the_workers_of_a_session_get_the_gpus_of_its_places(gpus):
    assert gpus(8)(granted((2, 3, 6))) == ["2", "3", "6"]
    assert gpus(4, "7,5,GPU-b3,1")(granted((1, 2))) == ["5", "GPU-b3"]


def test_places_beyond_the_gpus_share_them_in_turn(gpus):
    assert gpus(2)(granted((1, 2, 3))) == ["1", "0", "1"]


def test_a_client_does_not_choose(gpus):
    terms = Terms(2, 1, "cuda", "/cache", (4, 5))
    wish = LinkSpec(world_size=2, device="cuda", gpus=(0, 1))
    assert gpus(8)(terms.apply(spec_of(spec_text(wish)))) == ["4", "5"]
    assert granted((4, 5), "cpu").gpus is None


def test_at_home_workers_take_the_gpus_from_the_first_on(gpus):
    assert gpus(4)(LinkSpec(world_size=3, device="cuda")) == ["0", "1", "2"]
    assert gpus(4)(LinkSpec(world_size=4, ranks=(2, 3), device="cuda")) == ["0", "1"]


def test_one_that_is_replaced_gets_the_same_gpu_again(gpus):
    """Recovery asks the same plan once more."""
    seen = gpus(8)
    spec = granted((5, 7))
    assert seen(spec) == seen(spec) == ["5", "7"]


@pytest.mark.parametrize(
    ("slots", "count", "between"), [((4, 5), 8, 2), ((1, 3), 2, 1), ((0,), 0, 0), (None, 8, 8)]
)
def test_gpus_shared_by_ranks(slots, count, between):
    assert LinkSpec(world_size=2, device="cuda", gpus=slots).gpus_here(count) == between


def test_no_two_sessions_ever_have_the_same_gpu(gpus):
    """Sessions come and go at random on a pool of as many slots as there are GPUs."""
    seen, chance = gpus(8), random.Random(0)
    policy = Policy(Rules(workers=8, at_once=8, queue=16))
    living, grants = {}, 0
    for number in range(400):
        if living and chance.random() < 0.5:
            leaves = chance.choice(sorted(living))
            del living[leaves]
            steps = policy.release(leaves, float(number))
        else:
            workers = chance.randint(1, 5)
            asked = SessionRequest(f"s{number}", f"k{number % 3}", workers, workers)
            steps = policy.request(asked, float(number))
        for step in steps:
            if isinstance(step, Grant):
                living[step.session] = seen(granted(step.slots))
                grants += 1
        taken = [gpu for theirs in living.values() for gpu in theirs]
        assert len(taken) == len(set(taken)) <= 8
    assert grants > 100
