"""Random torch programs: drawn as lists of small steps, run on any device, printed as code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support import values

Tensor = torch.Tensor


@dataclass
class State:
    """The tensors of a running program, and what it has read so far."""

    device: str
    tensors: list[Tensor] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)

    def get(self, which: int) -> Tensor | None:
        return self.tensors[which % len(self.tensors)] if self.tensors else None


@dataclass(frozen=True)
class Step:
    """One line: ``name`` of the action and small integers that choose its operands."""

    name: str
    a: int
    b: int
    number: float

    def __repr__(self) -> str:
        return f"{self.name}(t[{self.a}], t[{self.b}], {self.number!r})"

    def run(self, s: State) -> None:
        """Do it; a step that does not fit the shapes raises what torch raises."""
        ACTIONS[self.name](s, self)


def keep(s: State, t: Tensor) -> None:
    s.tensors.append(t)
    del s.tensors[:-8]


def make(s: State, step: Step) -> None:
    shape = [(2, 3), (3,), (), (2, 1, 3), (4, 2), (0, 3)][step.a % 6]
    keep(s, torch.full(shape, step.number, device=s.device))


def extreme(s: State, step: Step) -> None:
    kind = values.EXTREME[step.a % len(values.EXTREME)]
    generator = torch.Generator("cpu").manual_seed(step.b)
    keep(s, values.draw((2, 3), torch.float32, kind, generator).to(s.device))


def ramp(s: State, step: Step) -> None:
    keep(s, torch.arange(6.0, device=s.device).view(2, 3) + step.a)


def leaf(s: State, step: Step) -> None:
    keep(s, torch.full((2, 3), step.number, device=s.device).requires_grad_())


def random(s: State, step: Step) -> None:
    keep(s, [torch.randn, torch.rand][step.b % 2](2, 3, device=s.device))


def binary(op: str) -> Any:
    def action(s: State, step: Step) -> None:
        x, y = s.get(step.a), s.get(step.b)
        if x is not None and y is not None:
            keep(s, getattr(torch, op)(x, y))

    return action


def unary(call: Any) -> Any:
    def action(s: State, step: Step) -> None:
        x = s.get(step.a)
        if x is not None:
            keep(s, call(x, step))

    return action


def inplace(call: Any) -> Any:
    def action(s: State, step: Step) -> None:
        x = s.get(step.a)
        if x is None or written_twice(x):
            return
        with torch.no_grad():
            call(x, s, step)

    return action


def written_twice(x: Tensor) -> bool:
    """Whether two elements share memory: what a write does then, torch leaves open."""
    return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


def drop(s: State, step: Step) -> None:
    if s.tensors:
        del s.tensors[step.a % len(s.tensors)]


def read(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is not None:
        s.read.append(x.detach().sum().item() if step.b % 2 else x.detach().cpu().tolist())


def look_at_data(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is not None:
        keep(s, x.data)


def positive(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is not None:
        x = x.detach()
        keep(s, x[x > step.number])
        s.read.append(list(s.tensors[-1].shape))


def backward(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is None or not x.requires_grad:
        return
    x.sum().backward(retain_graph=True)
    for t in s.tensors:
        if t.is_leaf and t.grad is not None:
            s.read.append(t.grad.cpu().tolist())


def descend(s: State, step: Step) -> None:
    for t in s.tensors:
        if t.is_leaf and t.requires_grad and t.grad is not None:
            with torch.no_grad():
                t.add_(t.grad, alpha=-step.number)
                t.grad.zero_()


def at_edge(x: Tensor, step: Step) -> int:
    """A valid index into the first dimension."""
    if x.dim() == 0 or x.shape[0] == 0:
        raise IndexError("nothing to index")
    return step.b % x.shape[0]


def copy_from(x: Tensor, s: State, step: Step) -> None:
    source = s.get(step.b)
    assert source is not None
    x.copy_(source.detach().clone())  # eager torch refuses overlapping memory


def add_from(x: Tensor, s: State, step: Step) -> None:
    source = s.get(step.b)
    assert source is not None
    x.add_(source.detach().clone(), alpha=step.number)


ACTIONS: dict[str, Any] = {
    "full": make,
    "extreme": extreme,
    "ramp": ramp,
    "leaf": leaf,
    "random": random,
    "add": binary("add"),
    "mul": binary("mul"),
    "maximum": binary("maximum"),
    "scale": unary(lambda x, step: x * step.number),
    "shift": unary(lambda x, step: x + step.b),
    "tanh": unary(lambda x, step: x.tanh()),
    "mean": unary(lambda x, step: x.mean()),
    "sum_dim": unary(lambda x, step: x.sum(0)),
    "softmax": unary(lambda x, step: x.softmax(-1)),
    "dropout": unary(lambda x, step: torch.nn.functional.dropout(x, 0.5)),
    "clone": unary(lambda x, step: x.clone()),
    "detach": unary(lambda x, step: x.detach()),
    "slice": unary(lambda x, step: x[step.b % 2 :]),
    "select": unary(lambda x, step: x.select(0, at_edge(x, step))),
    "t": unary(lambda x, step: x.transpose(0, -1)),
    "flat": unary(lambda x, step: x.view(-1)),
    "unsqueeze": unary(lambda x, step: x.unsqueeze(0)),
    "expand": unary(lambda x, step: x.expand(2, *x.shape)),
    "diagonal": unary(lambda x, step: x.diagonal()),
    "half": unary(lambda x, step: x.split(2, -1)[0]),
    "reshape": unary(lambda x, step: x.reshape(-1)),
    "cat": binary("outer"),
    "add_": inplace(lambda x, s, step: x.add_(step.number)),
    "mul_": inplace(lambda x, s, step: x.mul_(step.number)),
    "zero_": inplace(lambda x, s, step: x.zero_()),
    "bernoulli_": inplace(lambda x, s, step: x.bernoulli_(0.5)),
    "copy_": inplace(copy_from),
    "add_from_": inplace(add_from),
    "setitem": inplace(lambda x, s, step: x.__setitem__(at_edge(x, step), step.number)),
    "masked_fill_": inplace(lambda x, s, step: x.masked_fill_(x > step.number, 0.0)),
    "drop": drop,
    "read": read,
    "data": look_at_data,
    "mask": positive,
    "backward": backward,
    "descend": descend,
}
#: Steps whose results have shapes that only the values tell, or that read a value.
SYNCS = frozenset({"read", "data", "mask", "backward"})

NUMBERS = st.sampled_from(values.NUMBERS)
STEPS = st.builds(
    Step, st.sampled_from(sorted(ACTIONS)), st.integers(0, 7), st.integers(0, 7), NUMBERS
)
PROGRAMS = st.lists(STEPS, min_size=1, max_size=25)


def run(program: list[Step], device: str) -> tuple[list[Tensor], list[Any], list[str]]:
    """Run a program: its live tensors as CPU tensors, what it read, and which errors it met."""
    torch.manual_seed(11)
    state, errors = State(device), []
    for step in program:
        try:
            step.run(state)
        except (RuntimeError, IndexError, ValueError) as error:
            errors.append(f"{step}: {type(error).__name__}")
    return [t.detach().cpu() for t in state.tensors], state.read, errors
