"""Steps that are added before a trace comes to them: as if they had been recorded, or forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, target
from hypothesis import strategies as st
from torch import Tensor, nn

import lazygt
from lazygt.record import repeats
from lazygt.record.repeats import Repeat
from lazygt.record.tensor import NATIVE
from lazygt.record.trie import TraceTrie, TrieNode
from tests.passes.sized import SIZED, accepted, start
from tests.property.programs import Step

#: the first sizes are recorded as they come, and the next ones once
SIZES = st.sampled_from([1, 2, 3, 5, 8, 24, 32, 33, 64])


def below(step: TrieNode) -> Iterator[TrieNode]:
    """A step and all below it."""
    yield step
    for child in step.children.values():
        yield from below(child)


def steps(session: lazygt.Session) -> dict[Any, Any]:
    """All that the trie knows, by the way that leads there."""
    found: dict[Any, Any] = {}
    for step in below(session.recorder.trie.root):
        way = tuple([passed.key for passed in step.path()])
        counts = step.ops, step.values, step.params, step.inputs, step.first, step.depth
        results = step.make, step.itself, step.numbers, step.pitch, step.moves
        found[way] = (step.node, step.input, step.facts, results, counts, step.nbytes, step.full,
                      step.placed, step.forward, step.backward, sorted(step.plans))  # fmt: skip
    assert len(found) == session.recorder.trie.steps + 1
    return found


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[TrieNode]:
    """The steps that were added ahead."""
    taken: list[TrieNode] = []
    add = TraceTrie.add_ahead

    def noted(trie: TraceTrie, step: TrieNode) -> bool:
        taken.append(step)
        return add(trie, step)

    monkeypatch.setattr(TraceTrie, "add_ahead", noted)
    return taken


@pytest.fixture
def missed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The keys of the steps that were looked for, when they were not there."""
    keys: list[Any] = []
    look = Repeat._next

    def noted(repeat: Repeat, parent: TrieNode, key: Any, fits: Any) -> Any:
        keys.append(key)
        return look(repeat, parent, key, fits)

    monkeypatch.setattr(Repeat, "_next", noted)
    return keys


# -- as if they had been recorded ----------------------------------------------------------------


def recorded(
    programs: list[tuple[list[Step], tuple[int, int]]], wanted: int
) -> tuple[dict[Any, Any], int]:
    """What the trie knows after a program in several sizes; how many steps were added ahead."""
    count = 0
    add = TraceTrie.add_ahead

    def counted(trie: TraceTrie, step: TrieNode) -> bool:
        nonlocal count
        count += 1
        return add(trie, step)

    with pytest.MonkeyPatch.context() as patch, lazygt.session(launcher="inline") as s:
        patch.setattr(repeats, "_FIRST_PREFETCH", wanted)
        patch.setattr(TraceTrie, "add_ahead", counted)
        for program, size in programs:
            state = start("lazygt", *size)
            s.flush()
            for step in program:
                step.run(state)
            s.flush()
        return steps(s), count


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(
    st.lists(SIZED, min_size=3, max_size=25),
    st.lists(st.tuples(SIZES, SIZES), min_size=2, max_size=4),
)
def test_prefetched_steps_equal_recorded_steps(
    program: list[Step], sizes: list[tuple[int, int]]
) -> None:
    programs = [(accepted(program, start("cpu", *size)), size) for size in sizes]
    ours, count = recorded(programs, wanted=16)
    theirs, none = recorded(programs, wanted=0)
    target(float(count), label="added")
    assert ours == theirs
    assert none == 0


# -- how few misses there are --------------------------------------------------------------------


class Block(nn.Module):
    """Attention over a sequence, and what follows it."""

    def __init__(self, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def trained(device: str, lengths: list[int], clear: Callable[[], None] = lambda: None) -> Any:
    """Losses and a weight after steps on sequences of these lengths; ``clear`` is called before
    the last of them."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(Block(), nn.GELU(), Block(), nn.Linear(8, 5))
        data, labels = torch.randn(3, 40, 8), torch.randint(5, (3, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for place, length in enumerate(lengths):
        if place == len(lengths) - 1:
            clear()
        logits = model(data[:, :length])
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, :length].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model[3].weight.tolist()


def test_a_new_length_is_a_few_misses(missed: list[Any], added: list[TrieNode]) -> None:
    lengths = [20, 20, 20, 30, 31, 37, 29]

    def clear() -> None:
        missed.clear()
        added.clear()

    with lazygt.session(launcher="inline", compile="off") as s:
        ours = trained("lazygt", lengths, clear)
        trie = s.recorder.trie
        assert len(steps(s)) == trie.steps + 1
    assert ours == trained("cpu", lengths)
    assert len(added) > 100
    assert len(missed) < 20


def encoded(device: str, lengths: list[int], clear: Callable[[], None]) -> list[float]:
    """Losses of torch's transformer on sequences of these lengths; ``clear`` is called before the
    last of them."""
    torch.manual_seed(0)
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        data = torch.randn(3, 40, 8)
    losses = []
    for place, length in enumerate(lengths):
        if place == len(lengths) - 1:
            clear()
        model.zero_grad()
        loss = F.mse_loss(model(data[:, :length]), data[:, -length:].contiguous())
        loss.backward()
        losses.append(loss.item())
    return losses


def test_new_length_runs_no_meta_kernel() -> None:
    """The shape rules answer for each op of a transformer, also on strided operands."""
    counts: list[int] = []
    lengths = [20, 20, 20, 30, 31, 37, 29]
    with lazygt.session(launcher="inline", compile="off") as s:
        ours = encoded("lazygt", lengths, lambda: counts.append(s.stats()["ops_inferred"]))
        counts.append(s.stats()["ops_inferred"])
    assert ours == encoded("cpu", lengths, lambda: None)
    assert counts[0] == counts[1]


@pytest.mark.skipif(NATIVE is None, reason="every op is recorded in Python")
def test_new_length_is_found_by_the_native_recorder(ops_in_python: list[str]) -> None:
    """Prefetched steps are known to C++ too, also those whose arguments are sizes."""
    lengths = [20, 20, 20, 30, 31, 37, 29]
    with lazygt.session(launcher="inline", compile="off"):
        ours = trained("lazygt", lengths, ops_in_python.clear)
    assert ours == trained("cpu", lengths)
    assert len(ops_in_python) < 20, Counter(ops_in_python)


# -- what does not come true -----------------------------------------------------------------------


def dead_ends(session: lazygt.Session) -> list[TrieNode]:
    """Steps that lead to no plan."""
    all_steps = below(session.recorder.trie.root)
    return [step for step in all_steps if not step.children and not step.plans]


def after(x: Tensor, other: bool) -> Tensor:
    """A chain of ops, from its midst on another one."""
    for _ in range(6):
        x = x * 2 + 1
    for _ in range(6):
        x = x.tanh() if other else x.sin()
    return x.sum()


def test_a_program_that_changes_with_its_size_leaves_nothing_behind(added: list[TrieNode]) -> None:
    def work(device: str) -> list[float]:
        data = torch.linspace(-1, 1, 50, device=device)
        return [after(data[:size], size % 3 == 0).item() for size in [10, 11, 12, 13, 14, 15, 18]]

    with lazygt.session(launcher="inline") as s:
        ours = work("lazygt")
        assert not dead_ends(s)
        assert len(steps(s)) == s.recorder.trie.steps + 1
    assert added
    assert ours == work("cpu")


def test_a_shorter_program_leaves_nothing_behind(added: list[TrieNode]) -> None:
    def work(device: str) -> list[float]:
        data = torch.linspace(-1, 1, 50, device=device)
        read = []
        for size in [10, 11, 12, 13]:
            x = data[:size] * 2
            for _ in range(20 - size):
                x = x.sin() + 1
            read.append(x.sum().item())
        return read

    with lazygt.session(launcher="inline") as s:
        ours = work("lazygt")
        assert not dead_ends(s)
    assert added
    assert ours == work("cpu")


def test_an_error_of_the_user_comes_on_his_line_although_steps_were_added() -> None:
    with lazygt.session(launcher="inline") as s:
        data, weight = torch.ones(50, 4), torch.ones(4, 4)
        fits = torch.ones(12, 4)
        for size in (10, 11, 12):
            x = (data[:size] @ weight).sin().cos()
            if size == 12:
                x = x + fits
            x.sum().item()
        x = (data[:13] @ weight).sin().cos()
        with pytest.raises(RuntimeError, match=r"size of tensor a \(13\) must match"):
            x + fits
        assert x.sum().item() == (torch.ones(13, 4, device="cpu") * 4).sin().cos().sum().item()
        assert not dead_ends(s)


def test_steps_that_were_added_for_a_trace_that_is_given_up_are_found_again() -> None:
    with lazygt.session(launcher="inline") as s:
        data = torch.linspace(-1, 1, 50)
        for size in (10, 11, 12):
            after(data[:size], False).item()
        x = data[:13] * 2 + 1
        s.flush()
        assert not dead_ends(s)
        assert after(data[:13], False).item() == after(data[:13].cpu(), False).item()
        assert x.tolist() == (data[:13].cpu() * 2 + 1).tolist()
        assert not dead_ends(s)
