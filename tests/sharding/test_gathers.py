"""What was cut and is gathered for an op is said once, with line, bytes and what avoids it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import lazygt
from lazygt.passes.sharding import rules

pytestmark = pytest.mark.timeout(60)

WITHOUT_RULE = "aten.histc.default"


def _session() -> lazygt.Session:
    return lazygt.session(launcher="dry", mesh={"data": 4})


def _stored(s: lazygt.Session, *shape: int) -> torch.Tensor:
    x = lazygt.distribute(torch.randn(*shape), [Shard(0)])
    s.flush()
    return x


def test_gather_warning_comes_once_per_op_and_line() -> None:
    assert not rules.has_rule(WITHOUT_RULE)
    with _session() as s:
        x = _stored(s, 8, 16)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here = sys._getframe().f_lineno + 2
            for more in (0, 1):
                torch.histc(x + more).sum().item()
        text = lazygt.why(s)
    assert [each.category for each in caught] == [lazygt.GatherWarning]
    (said,) = [str(each.message) for each in caught]
    assert said.startswith(
        f"{WITHOUT_RULE} has no sharding rule for blocks along 'data': f32[8, 16] in S(0) (512 B) "
        f"is gathered on every worker that runs it, at {__file__}:{here}. The numbers are right."
    )
    assert "lazygt.redistribute" in said
    assert (caught[0].filename, caught[0].lineno) == (__file__, here)
    (row,) = [row for row in str(text).splitlines() if WITHOUT_RULE in row and "512 B" in row]
    assert row.strip().endswith(f"{Path(__file__).name}:{here}")


def test_gather_warning_comes_again_in_next_session() -> None:
    for _ in range(2):
        with _session() as s:
            x = _stored(s, 8, 16)
            with pytest.warns(lazygt.GatherWarning, match=WITHOUT_RULE):
                torch.histc(x).sum().item()


def _sort(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0].sort().values


def _attention(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.view(8, 2, 16, 4).transpose(0, 2) * n for n in (1, 2, 3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _deviation(x: torch.Tensor) -> torch.Tensor:
    return x.std().view(1)


def _cache(x: torch.Tensor) -> torch.Tensor:
    cache = torch.zeros(16, 128)
    cache[4:12] = x
    return cache


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (
            _sort,
            r"aten\.sort\.\w+ has no sharding rule for blocks along 'data': f32\[8\]\S* in S\(0\) "
            r"\(32 B\) is gathered ",
        ),
        (
            _attention,
            r"aten\._scaled_dot\S+ has no strategy for such blocks .* in S\(2\) \(8\.19 kB\) is "
            r"gathered .* It runs in blocks of S\(0\) or S\(1\): cut the value so",
        ),
        (
            _deviation,
            r"aten\.std\.correction takes less time on whole values .* \(4\.1 kB\) is gathered .* "
            r"fix the placement",
        ),
        (_cache, r"is gathered"),
    ],
)
def test_op_with_rule_may_give_gather_warning(
    use: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    with _session() as s:
        x = _stored(s, 8, 128)
        y = use(x)
        with pytest.warns(lazygt.GatherWarning, match=said) as caught:
            s.flush()
        (message,) = [str(each.message) for each in caught]
        assert y.dim()
        assert s.last_plan is not None
        assert "all_gather" in {each.kind for each in s.last_plan.collectives}
    line = int(message.partition(f", at {__file__}:")[2].partition(".")[0])
    first = use.__code__.co_firstlineno
    assert first < line <= first + 3


def test_gather_warning_names_remedy_for_plain_weight() -> None:
    with _session() as s:
        layer = nn.Linear(256, 512)
        lazygt.parallelize_module(layer, None, {"weight": [Shard(0)]})
        x = _stored(s, 4096, 256)
        said = r"aten\.addmm\.default takes .* \(524 kB\) is gathered .* lazygt\.fully_shard"
        with pytest.warns(lazygt.GatherWarning, match=said):
            layer(x).sum().item()


# -- what was asked for --------------------------------------------------------------------------


def _redistributed(s: lazygt.Session) -> torch.Tensor:
    x = _stored(s, 8, 16)
    whole = lazygt.redistribute(x, [Replicate()])
    return torch.histc(whole) + x.sort(1).values.sum()


def _network(lay: Callable[[nn.Module], object], s: lazygt.Session) -> torch.Tensor:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    lay(model)
    y: torch.Tensor = model(_stored(s, 8, 32, 64))
    y.square().mean().backward()
    return y


def _fully_sharded(s: lazygt.Session) -> torch.Tensor:
    return _network(lazygt.fully_shard, s)


def _in_blocks_of_the_sequence(s: lazygt.Session) -> torch.Tensor:
    blocks = Shard(1)
    plan = {
        "0": lazygt.SequenceParallel(),
        "1": lazygt.ColwiseParallel(input_layouts=blocks),
        "3": lazygt.RowwiseParallel(output_layouts=blocks),
    }
    return _network(lambda model: lazygt.parallelize_module(model, None, plan), s)


def _updated_in_blocks(s: lazygt.Session) -> torch.Tensor:
    model = nn.Linear(16, 16)
    lazygt.data_parallel(model)
    opt = lazygt.shard_optimizer_state(torch.optim.AdamW(model.parameters()))
    s.flush()
    y: torch.Tensor = model(_stored(s, 8, 16)).square().mean()
    y.backward()
    opt.step()
    return y


@pytest.mark.parametrize(
    "program", [_redistributed, _fully_sharded, _in_blocks_of_the_sequence, _updated_in_blocks]
)
def test_requested_gather_gives_no_warning(
    program: Callable[[lazygt.Session], torch.Tensor],
) -> None:
    with _session() as s, warnings.catch_warnings():
        warnings.simplefilter("error")
        program(s).sum().item()
        assert not lazygt.why(s).gathers
