"""After an op that failed on one rank only: the ranks form a new group, and the session goes on."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard

import lazygt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

S0 = Shard(0)
Placements = list[Shard] | dict[str, Shard]


def on(values: torch.Tensor, placements: Placements) -> torch.Tensor:
    return lazygt.distribute(values.to("lazygt"), placements)


def host(values: object) -> torch.Tensor:
    return torch.tensor(values, device="cpu")


class Lookup:
    """Rows of a table, summed: a collective. Row 99 is on the last rank's block, and not there."""

    def __init__(self, ranks: int, placements: Placements) -> None:
        self.table = torch.arange(10.0).reshape(5, 2)
        self.good = [1] * (2 * ranks)
        self.bad = [*self.good[:-1], 99]
        self.placements = placements

    def rows(self, ids: list[int]) -> torch.Tensor:
        return F.embedding(on(host(ids), self.placements), self.table)

    def total(self, ids: list[int]) -> float:
        return float(self.rows(ids).sum().item())

    def works(self) -> None:
        assert self.total(self.good) == 5.0 * len(self.good)

    def fails(self) -> lazygt.ExecutionError:
        with pytest.raises(
            lazygt.ExecutionError, match=r"embedding.*worker \d: IndexError"
        ) as caught:
            self.total(self.bad)
        assert caught.value.where.startswith(__file__)
        return caught.value


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ({"data": 2}, [S0]),
        ({"data": 4}, [S0]),
        ({"data": 2, "model": 2}, [S0, S0]),
        ({"data": 2, "model": 2}, {"data": S0}),
    ],
)
@pytest.mark.parametrize("runs_before", [0, 3])
def test_the_session_goes_on(
    mesh: Mapping[str, int], placements: Placements, runs_before: int
) -> None:
    """Also where the run that breaks is the first of its plan."""
    with lazygt.session(mesh=mesh, workers=lazygt.Workers(threads=1)) as s:
        lookup = Lookup(s.mesh.world_size, placements)
        plain = torch.arange(24.0, device="cpu").reshape(8, 3)
        healthy = on(plain, placements)
        s.flush()
        for _ in range(runs_before):
            lookup.works()
        for _ in range(2):
            lookup.fails()
            assert torch.equal(healthy.cpu(), plain), "a value in blocks"
            assert healthy.sum().item() == plain.sum().item(), "the first collective after it"
            lookup.works()
        lookup.fails()
        lookup.fails()
        lookup.works()


def test_a_failed_value_raises_its_own_error_whenever_it_is_used() -> None:
    """Rank 0 has its block of it and rank 1 has not: that parts them again, and again ends well."""
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        lookup = Lookup(2, [S0])
        bad = lookup.rows(lookup.bad)
        with pytest.raises(lazygt.ExecutionError, match="embedding") as first:
            s.synchronize()
        for _ in range(3):
            lookup.works()
            for use in (bad.sum().item, bad.cpu, (bad * 2).sum().tolist):
                with pytest.raises(lazygt.ExecutionError) as again:
                    use()
                assert again.value is first.value
        lookup.works()
        s.synchronize()


def test_a_value_that_failed_on_all_ranks_is_used_in_a_collective() -> None:
    """No rank waits for another there, and none may think that the others still meet."""
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        lookup = Lookup(2, [S0])
        for _ in range(2):
            with pytest.raises(lazygt.ExecutionError, match="IndexError"):
                lookup.total([99, 1, 99, 1])
            lookup.works()


def test_runs_sent_before_failure_name_cause_and_later_runs_work() -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        lookup = Lookup(2, [S0])
        lookup.works()
        kept = lookup.table + 1
        os.kill(s.worker_pids[0], signal.SIGSTOP)  # so nothing is answered before all is sent
        values = []
        for ids in (lookup.bad, lookup.good, lookup.good):
            values.append(lookup.rows(ids).sum())
            s.flush()
        os.kill(s.worker_pids[0], signal.SIGCONT)
        with pytest.raises(lazygt.ExecutionError, match=r"embedding.*IndexError") as cause:
            s.synchronize()
        lookup.works()
        assert kept.sum().item() == 25.0 + 30.0
        for late in values[1:]:
            why = r"had left its process group, since aten\.embedding\.default failed on worker 1"
            with pytest.raises(lazygt.ExecutionError, match=why) as after:
                late.item()
            assert after.value.__cause__ is cause.value
        lookup.works()


class Model(nn.Module):
    """Tokens to scores. ``size`` 640: layers whose blocks are too large for the ranks' sockets."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, size)
        self.layers = nn.ModuleList([nn.Linear(size, size) for _ in range(3)])
        self.head = nn.Linear(size, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def sharded(model: Model) -> Model:
    for layer in model.layers:
        lazygt.fully_shard(layer)
    lazygt.fully_shard(model)
    return model


def batches() -> Iterator[tuple[list[int], list[int]]]:
    for step in range(6):
        ids = [(step + place) % 8 for place in range(8)]
        yield (ids if step not in (2, 3) else [*ids[:-1], 99]), [n % 4 for n in ids]


def train(model: nn.Module, placements: Placements | None) -> list[float]:
    """Losses of the batches that could be taken; the others are skipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in batches():
        x, y = host(ids), host(labels)
        if placements is not None:
            x, y = on(x, placements), on(y, placements)
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
        except (IndexError, lazygt.ExecutionError):
            continue
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [8, 640])
@pytest.mark.parametrize("how", ["data parallel", "fully sharded"])
def test_a_training_skips_bad_batches_as_eager_does(size: int, how: str) -> None:
    def build() -> Model:
        torch.manual_seed(0)
        return Model(size)

    with torch.device("cpu"):
        plain = build()
    expected = train(plain, None)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        model = build()
        if how == "fully sharded":
            sharded(model)
        losses = train(model, [S0])
        state = {name: value.cpu() for name, value in model.state_dict().items()}
    assert len(losses) == 4
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


def test_a_whole_step_that_fails_leaves_no_model_harmed() -> None:
    """Its gathers and reductions are under way, in both backends, when the ranks part."""
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)):
        for _ in range(2):
            model = sharded(Model(640))
            optimizer = torch.optim.AdamW(model.parameters())
            ids, labels = host([1, 2, 3, 4]), on(host([0, 1, 2, 3]), [S0])
            for bad in (False, True):
                x = on(ids + 95 * (ids == 4) * bad, [S0])
                before = model.head.weight.cpu()
                loss = F.cross_entropy(model(x), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if bad:
                    with pytest.raises(lazygt.ExecutionError, match=r"embedding.*worker 1"):
                        loss.item()
                else:
                    assert loss.item() > 0
                assert torch.equal(model.head.weight.cpu(), before) is bad
            with pytest.raises(lazygt.ExecutionError, match="embedding"):
                loss.item()


@pytest.mark.parametrize("where", ["first stage", "last stage"])
def test_stages_go_on_after_one_has_failed(where: str) -> None:
    """What a stage was sending to another when they parted is nobody's any more."""
    with lazygt.session(mesh={"pipe": 2}, workers=lazygt.Workers(threads=1)) as s:
        torch.manual_seed(0)
        tokens, layer, head = nn.Embedding(8, 640), nn.Linear(640, 640), nn.Linear(640, 4)
        lazygt.stage(tokens, 0)
        lazygt.stage(layer, 0)
        lazygt.stage(head, 1)
        parameters = [*tokens.parameters(), *layer.parameters(), *head.parameters()]

        def loss(ids: list[int], labels: list[int]) -> float:
            for each in parameters:
                each.grad = None
            made = F.cross_entropy(
                head(torch.tanh(layer(tokens(torch.tensor(ids))))), torch.tensor(labels)
            )
            made.backward()
            return float(made.item())

        ids, labels = [n % 8 for n in range(600)], [n % 4 for n in range(600)]
        bad = ([99, *ids[1:]], labels) if where == "first stage" else (ids, [99, *labels[1:]])
        s.synchronize()
        expected = loss(ids, labels)
        for _ in range(3):
            with pytest.raises(lazygt.ExecutionError, match=r"out of (range|bounds)"):
                loss(*bad)
            assert loss(ids, labels) == expected


def test_a_line_that_meets_goes_on_while_another_breaks() -> None:
    """Rows are added up along ``model``: the first line of it never hears of the last block."""
    with lazygt.session(mesh={"data": 2, "model": 2}, workers=lazygt.Workers(threads=1)) as s:
        table = torch.arange(10.0).reshape(5, 2)
        places = {"data": S0, "model": Shard(1)}
        ids = host([[1, 2], [1, 2], [1, 2], [1, 99]])
        s.flush()
        sums = F.embedding(on(ids, places), table).sum(1)
        with pytest.raises(lazygt.ExecutionError, match=r"embedding.*worker 3: IndexError"):
            sums.cpu()
        good = F.embedding(on(ids.clamp(max=2), places), table).sum(1)
        assert torch.equal(good.cpu(), host([[6.0, 8.0]] * 4))
        with pytest.raises(lazygt.ExecutionError, match=r"embedding.*worker 3: IndexError"):
            sums.sum().item()
        assert good.sum().item() == 56.0


def test_twenty_breaks_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tempfile.mkdtemp(prefix="lg-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        lookup = Lookup(2, [S0])
        workers = [psutil.Process(pid) for pid in s.worker_pids]

        def held() -> list[tuple[int, int]]:
            lookup.works()
            s.synchronize()
            return [(worker.num_fds(), worker.num_threads()) for worker in workers]

        def resident() -> int:
            return sum(worker.memory_info().rss for worker in workers)

        for _ in range(3):
            lookup.fails()
        before, memory = held(), resident()
        for _ in range(20):
            lookup.fails()
            assert held() == before
        assert resident() - memory < 4 << 20
        places = [name for _, _, names in os.walk(base) for name in names if "group" in name]
        assert len(places) <= 2, "of the group there is, and perhaps of the last"
    os.rmdir(base)


def interrupted(delay: float, wait: Callable[[], object]) -> None:
    """Wait, with a Ctrl-C on its way."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    wait()


@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_an_interrupt_while_the_ranks_part(delay: float) -> None:
    with lazygt.session(mesh={"data": 2}, workers=lazygt.Workers(threads=1)) as s:
        lookup = Lookup(2, [S0])
        lookup.works()
        for _ in range(3):
            os.kill(s.worker_pids[1], signal.SIGSTOP)  # so the fetch does not end by itself
            bad = lookup.rows(lookup.bad).sum()
            s.flush()
            with pytest.raises(KeyboardInterrupt):
                interrupted(delay, bad.item)
            os.kill(s.worker_pids[1], signal.SIGCONT)
            with pytest.raises(lazygt.ExecutionError, match="embedding"):
                s.synchronize()
            lookup.works()
