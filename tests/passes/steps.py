"""Random programs with much for the passes to do: the steps of ``tests.property`` and more.

Their own are twins, neutral operations, casts there and back, copies, chains of views, draws that
die, in several dtypes; long pointwise chains, reductions at their end, and optimizer steps on many
tensors, one by one and horizontally, small ones and large ones.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.property import programs
from tests.property.programs import SYNCS, State, Step, inplace, keep, unary

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64,
          torch.uint8, torch.bool)  # fmt: skip
NEUTRAL: tuple[Any, ...] = (
    lambda x: x * torch.ones_like(x),
    lambda x: torch.ones_like(x) * x,
    lambda x: x / torch.ones_like(x),
    lambda x: x + torch.zeros_like(x),
    lambda x: torch.zeros_like(x) + x,
    lambda x: x - torch.zeros_like(x),
    lambda x: x + -torch.zeros_like(x),
    lambda x: x - -torch.zeros_like(x),
    lambda x: x * 1,
    lambda x: x + 0,
    lambda x: x - 0,
    lambda x: x / 1,
    lambda x: x + -0.0,
    lambda x: x.neg().neg(),
)
CONSTANT: tuple[Any, ...] = (
    lambda x: torch.ones_like(x) + torch.ones_like(x),
    lambda x: torch.zeros_like(x) / torch.zeros_like(x),
    lambda x: -torch.ones_like(x) * 3,
    lambda x: torch.ones_like(x).expand(2, *x.shape) - 2,
    lambda x: torch.full_like(x, 2) * torch.ones_like(x),
)
ROUND: tuple[Any, ...] = (
    lambda x: x.transpose(0, -1).transpose(0, -1),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.view(-1).view(1, -1).view(-1, 1),
    lambda x: x[:].detach().view_as(x),
    lambda x: x.flip(0).flip(0),
    lambda x: x.conj().conj(),
    lambda x: x.t().clone().view(-1),
)
#: Pointwise: an operand, another of the same shape, a number.
LINKS: tuple[Any, ...] = (
    lambda x, y, n: x * n,
    lambda x, y, n: x + y,
    lambda x, y, n: n - x,
    lambda x, y, n: -x,
    lambda x, y, n: x.abs(),
    lambda x, y, n: torch.maximum(x, y),
    lambda x, y, n: torch.where(x > n, x, y),
    lambda x, y, n: x.relu(),
    lambda x, y, n: x.addcmul(x, y, value=n),
    lambda x, y, n: x.lerp(y, n),
    lambda x, y, n: x**2,
    lambda x, y, n: x.sigmoid(),
    lambda x, y, n: (x + 1).add_(y).mul_(n),
    lambda x, y, n: (x - 1).copy_(y).add_(x, alpha=n),
)
#: So many of them are worth one call, even on tensors of a few elements.
LINKS_OF_A_CHAIN = 12
ENDS: tuple[Any, ...] = (
    lambda x: x.sum(),
    lambda x: x.mean(-1),
    lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x.amin(),
    lambda x: x / x.norm(),
)
#: Elements of a tensor that foreach takes for a large one.
LARGE = 4100


def twin(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is not None:
        one, other = (x.tanh(), x.tanh()) if x.is_floating_point() else (x + x, x + x)
        keep(s, [one, other, one * other][step.b % 3])
        keep(s, other)


def cast(x: torch.Tensor, step: Step) -> torch.Tensor:
    """torch warns when a cast drops an imaginary part, so complex numbers stay what they are."""
    return x.real if x.is_complex() else x.detach().to(DTYPES[step.b % len(DTYPES)])


def there_and_back(x: torch.Tensor, step: Step) -> torch.Tensor:
    return x if x.is_complex() else x.to(DTYPES[step.b % len(DTYPES)]).to(x.dtype)


def through(x: torch.Tensor, step: Step) -> torch.Tensor:
    if x.is_complex():
        return x.to(torch.complex128).to(x.dtype)
    wide = torch.float64 if x.is_floating_point() else torch.int64
    return x.to(wide).to(DTYPES[step.b % len(DTYPES)])


def dead_draw(s: State, step: Step) -> None:
    x = s.get(step.a)
    if x is not None:
        torch.rand_like(x.detach(), dtype=torch.float32)
        keep(s, torch.rand(3, device=s.device))


def saved_and_written(x: torch.Tensor, s: State, step: Step) -> None:
    """A row saved, then its matrix written."""
    keep(s, (x[0] if x.dim() else x).clone())
    x.add_(step.b)


def add_from(x: torch.Tensor, s: State, step: Step) -> None:
    """With a whole number as alpha: others fail for whole tensors, and only when they run."""
    source = s.get(step.b)
    assert source is not None
    x.add_(source.detach().clone(), alpha=step.b)


def copy_from(x: torch.Tensor, s: State, step: Step) -> None:
    source = s.get(step.b)
    assert source is not None
    source = source.detach().clone()
    x.copy_(source.real if source.is_complex() and not x.is_complex() else source)


def chain(x: torch.Tensor, step: Step) -> torch.Tensor:
    """A chain whose links depend on the step."""
    y = x = x if x.is_floating_point() or x.is_complex() else x.float()
    for place in range(LINKS_OF_A_CHAIN):
        x = LINKS[(step.b * (place + 1) + place) % len(LINKS)](x, y, step.number)
    return x


def written_chain(x: torch.Tensor, s: State, step: Step) -> None:
    """A chain that ends in the memory it began in, whose old version is read on the way."""
    made = chain(x.detach(), step)
    x.add_(made).mul_(step.number).sub_(made)
    keep(s, made)


def some(x: torch.Tensor, step: Step) -> list[torch.Tensor]:
    """Tensors like the parameters of a model: small ones and, often, two large ones."""
    x = x.detach() if x.is_floating_point() or x.is_complex() else x.float()
    made = [view.clone() for view in (x, x.unsqueeze(0), x.reshape(-1), x)]
    return [*made, *(x.new_full((LARGE,), n) for n in range(2))] if step.b % 2 else made


def keep_all(s: State, tensors: list[torch.Tensor]) -> None:
    """Keep one of them, and something that depends on each."""
    keep(s, tensors[0])
    keep(s, torch.stack([t.sum() for t in tensors]))


def optimizer(s: State, step: Step) -> None:
    """A step of Adam, tensor by tensor."""
    x = s.get(step.a)
    if x is None:
        return
    params = some(x, step)
    for param in params:
        grad = param * step.number
        mean = torch.zeros_like(param).lerp_(grad, 0.1)
        square = torch.zeros_like(param).addcmul_(grad, grad, value=0.01)
        param.addcdiv_(mean, square.sqrt().add_(1e-8), value=-0.1)
    keep_all(s, params)


def horizontal(s: State, step: Step) -> None:
    """A step with clipped gradients and momentum, all tensors at once."""
    x = s.get(step.a)
    if x is None:
        return
    params, grads = some(x, step), some(x * 2, step)
    norms = torch._foreach_norm(grads)
    torch._foreach_mul_(grads, norms[0].clamp(max=1.0))
    torch._foreach_add_(grads, params, alpha=step.number)
    one, other = params[0], params[3]
    torch._foreach_add_([one, other], [other, one])  # the second reads what the first wrote
    made = torch._foreach_sqrt(torch._foreach_addcmul(params, grads, grads, step.number))
    keep_all(s, [*params, *made])


OWN: dict[str, Any] = {
    "cast": unary(cast),
    "complex": unary(lambda x, step: x.to(torch.complex64)),
    "neutral": unary(lambda x, step: NEUTRAL[step.b % len(NEUTRAL)](x)),
    "neutral_too": unary(lambda x, step: NEUTRAL[-1 - step.b % len(NEUTRAL)](x)),
    "constant": unary(lambda x, step: CONSTANT[step.b % len(CONSTANT)](x)),
    "round": unary(lambda x, step: ROUND[step.b % len(ROUND)](x)),
    "there_and_back": unary(there_and_back),
    "through": unary(through),
    "twin": twin,
    "dead_draw": dead_draw,
    "imag": unary(lambda x, step: x.conj().imag),
    "bits": unary(lambda x, step: x.detach().view(torch.int32)),
    "copy": unary(lambda x, step: x[step.b % 2 : 1 + step.b].clone()),
    "saved": inplace(saved_and_written),
    "add_from_": inplace(add_from),
    "copy_": inplace(copy_from),
}
CHAINS: dict[str, Any] = {
    "chain": unary(chain),
    "ended": unary(lambda x, step: ENDS[step.b % len(ENDS)](chain(x, step))),
    "chain_": inplace(written_chain),
}
OPTIMIZERS: dict[str, Any] = {
    "optimizer": optimizer,
    "horizontal": horizontal,
}


class PassStep(Step):
    """A step of this module."""

    def run(self, s: State) -> None:
        (OWN | CHAINS | OPTIMIZERS)[self.name](s, self)


NAMES = sorted(set(programs.ACTIONS) - SYNCS - set(OWN))
OPERANDS = (st.integers(0, 7), st.integers(0, 15), programs.NUMBERS)
STEPS = st.one_of(
    st.builds(PassStep, st.sampled_from(sorted(OWN)), *OPERANDS),
    st.builds(Step, st.sampled_from(NAMES), *OPERANDS),
)


def start(device: str) -> State:
    """What a program finds: its graph's inputs."""
    ramp = torch.arange(6.0, device=device).view(2, 3)
    return State(device, [ramp, ramp.half() + 1, ramp.long(), ramp[0] + 0.5, ramp.t() * 2])


def accepted(program: list[Step]) -> list[Step]:
    """The steps that eager torch takes: shapes fit, and there is a kernel."""
    state, taken = start("cpu"), []
    for step in program:
        before = list(state.tensors)
        try:
            step.run(state)
        except (RuntimeError, IndexError, ValueError, TypeError):
            state.tensors = before
            continue
        taken.append(step)
    return taken


#: Programs that no sync point cuts: each is one graph.
PROGRAMS = st.tuples(
    st.lists(STEPS, min_size=6, max_size=20),
    st.builds(PassStep, st.sampled_from(sorted(OPTIMIZERS)), *OPERANDS).map(lambda s: [s]),
    st.lists(STEPS, max_size=4),
    st.builds(PassStep, st.sampled_from(sorted(CHAINS)), *OPERANDS).map(lambda s: [s]),
    st.lists(STEPS, max_size=4),
).map(lambda parts: accepted([step for part in parts for step in part]))
