"""Generators of the user's own: lazy draws follow their streams, with the bits of the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, random_split

import lazygt
from lazygt.record.tensor import NATIVE

pytestmark = pytest.mark.timeout(120)
native = pytest.mark.skipif(NATIVE is None, reason="torch lets no Python device have generators")
DEVICES = ["cpu", pytest.param("lazygt", marks=native)]

Draw = Callable[[torch.Generator, str], torch.Tensor]


def blank(*shape: int, device: str) -> torch.Tensor:
    return torch.zeros(*shape, device=device)


def transposed(g: torch.Generator, device: str) -> torch.Tensor:
    whole = blank(4, 5, device=device)
    whole.t()[1:3].normal_(generator=g)
    return whole


def dirichlet(g: torch.Generator, device: str) -> torch.Tensor:
    result: torch.Tensor = torch._sample_dirichlet(torch.ones(3, 4, device=device), generator=g)
    return result


def initialised(g: torch.Generator, device: str) -> torch.Tensor:
    weight = torch.empty(3, 5, device=device)
    nn.init.trunc_normal_(weight, generator=g)
    return nn.init.orthogonal_(weight, generator=g)


def resized(g: torch.Generator, device: str) -> torch.Tensor:
    out = torch.empty(0, dtype=torch.int64, device=device)
    return torch.randperm(6, generator=g, out=out) + out


DRAWS: dict[str, Draw] = {
    "rand": lambda g, d: torch.rand(3, 4, generator=g, device=d),
    "randn": lambda g, d: torch.randn(17, generator=g, device=d),
    "randn complex": lambda g, d: torch.randn(3, generator=g, device=d, dtype=torch.complex64),
    "randint": lambda g, d: torch.randint(0, 9, (5,), generator=g, device=d),
    "randperm": lambda g, d: torch.randperm(9, generator=g, device=d),
    "randperm out": resized,
    "normal": lambda g, d: torch.normal(0.5, 2.0, (3, 3), generator=g, device=d),
    "normal of tensors": lambda g, d: torch.normal(
        torch.arange(4.0, device=d), torch.ones(4, device=d), generator=g
    ),
    "normal_": lambda g, d: blank(3, 4, device=d).normal_(1, 2, generator=g),
    "uniform_": lambda g, d: blank(3, 4, device=d).uniform_(-1, 1, generator=g),
    "random_": lambda g, d: blank(5, device=d).random_(3, 90, generator=g),
    "exponential_": lambda g, d: blank(5, device=d).exponential_(generator=g),
    "geometric_": lambda g, d: blank(5, device=d).geometric_(0.3, generator=g),
    "cauchy_": lambda g, d: blank(5, device=d).cauchy_(generator=g),
    "log_normal_": lambda g, d: blank(5, device=d).log_normal_(generator=g),
    "bernoulli_": lambda g, d: blank(5, device=d).bernoulli_(0.3, generator=g),
    "bernoulli_ of a tensor": lambda g, d: blank(5, device=d).bernoulli_(
        torch.full((5,), 0.4, device=d), generator=g
    ),
    "bernoulli": lambda g, d: torch.bernoulli(torch.full((3, 4), 0.3, device=d).t(), generator=g),
    "multinomial": lambda g, d: torch.multinomial(torch.ones(2, 5, device=d), 3, generator=g),
    "poisson": lambda g, d: torch.poisson(torch.full((4,), 3.0, device=d), generator=g),
    "binomial": lambda g, d: torch.binomial(
        torch.full((4,), 9.0, device=d), torch.full((4,), 0.5, device=d), generator=g
    ),
    "randn_like": lambda g, d: torch.randn_like(torch.ones(2, 3, device=d).t(), generator=g),
    "dirichlet": dirichlet,
    "a view": transposed,
    "nn.init": initialised,
}  # fmt: skip


def drawn(draw: Draw, generator: torch.Generator, device: str) -> list[torch.Tensor]:
    results = [draw(generator, device) for _ in range(3)]
    assert {r.device.type for r in results} == {device}
    return [*(r.cpu() for r in results), generator.get_state()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_the_bits_of_the_cpu(name: str, device: str) -> None:
    expected = drawn(DRAWS[name], torch.Generator().manual_seed(7), "cpu")
    with lazygt.session(launcher="inline"):
        stream = torch.get_rng_state()
        ours = drawn(DRAWS[name], torch.Generator(device).manual_seed(7), "lazygt")
        assert torch.equal(torch.get_rng_state(), stream), "the session's own stream went on"
    for a, b in zip(ours, expected, strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_filling_draws_are_no_sync_point(device: str) -> None:
    with lazygt.session(launcher="inline") as s:
        g = torch.Generator(device).manual_seed(1)
        for _ in range(5):
            torch.randn(3, generator=g, device="lazygt").mul(2)
        assert s.stats()["flushes"] == {}


@pytest.mark.parametrize("device", DEVICES)
def test_repeated_steps_reuse_their_plan(device: str) -> None:
    with lazygt.session(launcher="inline") as s:
        g = torch.Generator(device).manual_seed(1)
        sums = [torch.randn(3, generator=g, device="lazygt").sum().item() for _ in range(8)]
        assert s.stats()["plans_built"] == 1
    g = torch.Generator().manual_seed(1)
    assert sums == [torch.randn(3, generator=g).sum().item() for _ in range(8)]


@native
def test_generator_of_the_device() -> None:
    host = torch.Generator()
    g = torch.Generator(device="lazygt")
    assert g.device == torch.device("lazygt", 0)
    assert isinstance(g, torch.Generator)
    assert g.initial_seed() == host.initial_seed()
    assert g.manual_seed(5) is g
    host.manual_seed(5)
    assert g.initial_seed() == 5
    assert torch.equal(g.get_state(), host.get_state())
    assert g.seed() == g.initial_seed()
    g.set_state(host.get_state())
    twin = g.clone_state()
    with lazygt.session(launcher="inline"):
        first = torch.rand(3, generator=g)
        assert first.device.type == "lazygt"
        assert torch.equal(first.cpu(), torch.rand(3, generator=host))
        assert torch.equal(torch.rand(3, generator=twin).cpu(), first.cpu())
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
            torch.rand(3, generator=g, device="cpu")
    with pytest.raises(RuntimeError, match="state"):
        g.set_state(torch.zeros(3, dtype=torch.uint8))
    g.set_offset(g.get_offset())
    with pytest.raises(RuntimeError, match="does not use offset"):
        g.set_offset(4)
    for copied in (copy.deepcopy(g), copy.copy(g)):
        assert copied.device.type == "lazygt"
        assert torch.equal(copied.get_state(), g.get_state())


@native
def test_generator_without_a_session() -> None:
    g = torch.Generator("lazygt").manual_seed(1)
    with pytest.raises(lazygt.NoSession):
        torch.rand(3, generator=g, device="lazygt")


@pytest.mark.skipif(NATIVE is not None, reason="of the recorder in Python")
def test_python_recorder_has_torchs_error() -> None:
    with pytest.raises(NotImplementedError, match="getNewGenerator"):
        torch.Generator(device="lazygt")


def shuffled(device: str) -> list[Any]:
    g = torch.Generator(device).manual_seed(3)
    data = torch.arange(10)
    loader = DataLoader(data, batch_size=3, shuffle=True, generator=g)
    # its module keeps torch's own randperm, on the CPU
    split = torch.Generator().manual_seed(3)
    parts = random_split(range(9), [4, 5], generator=split)
    return [
        *(batch.tolist() for batch in loader), [list(part) for part in parts],
        list(RandomSampler(range(7), generator=g)),
        torch.quasirandom.SobolEngine(2, scramble=True, seed=3).draw(2).tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_loaders_and_samplers(device: str) -> None:
    expected = shuffled("cpu")
    with lazygt.session(launcher="inline"):
        assert shuffled(device) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_default_stream_and_own_streams_interleave(device: str) -> None:
    def turns(g: torch.Generator, where: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = []
        for _ in range(3):
            out += [torch.rand(2, device=where), torch.rand(2, generator=g, device=where)]
        return [t.cpu() for t in out]

    expected = turns(torch.Generator().manual_seed(9), "cpu")
    with lazygt.session(workers=lazygt.Workers(1, threads=1)):
        ours = turns(torch.Generator(device).manual_seed(9), "lazygt")
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
