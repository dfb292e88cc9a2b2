"""CUDA graphs: training with the bits of plain steps, and ops that can't be captured."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import lazygt
from benchmarks.gpu.rows import Row, text_of
from tests.models import zoo

STEPS = 12


def captured(device: str) -> Iterator[Row]:
    """Losses and weights of each model of the tests, with plans captured and without."""
    for name in zoo.MODELS:
        data, results = zoo.batches(name, STEPS), []
        for setting in ("off", "now"):
            with lazygt.session(compile="off", cuda_graphs=setting) as session:
                losses, state = zoo.train(name, "adamw", data, "lazygt")
                results.append([*losses, *state])
                graphs = session.stats()["cuda_graphs"]
        same = all(torch.equal(ours, plain) for ours, plain in zip(*results, strict=True))
        bits = "same bits" if same else "other bits"
        yield Row(name, f"{graphs} graphs, {bits}", goal="same bits", met=same and graphs > 0)


#: Ops that wait for the GPU, draw, or write, on 64 floats.
WAITING: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[torch.randperm(64)],
    "multinomial": lambda x: x[torch.multinomial(x.softmax(0), 64)],
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x, 0.3),
    "index_put_ with a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "masked_scatter_": lambda x: x.clone().masked_scatter_(x > 0, x * 2),
    "put_": lambda x: x.clone().put_(torch.arange(4), torch.ones(4)),
    "sort": lambda x: x.sort().values,
    "cholesky": lambda x: torch.linalg.cholesky(torch.eye(8) * 2 + x.sum() * 0).sum() + x,
    "inverse": lambda x: torch.linalg.inv(torch.eye(8) * 2).sum() + x,
    "svdvals": lambda x: torch.linalg.svdvals(x.view(8, 8)).sum() + x,
    "bincount": lambda x: torch.bincount(torch.arange(64)).sum() + x,
    "conv1d": lambda x: F.conv1d(x.view(1, 1, 64), torch.ones(1, 1, 3), padding=1).view(64),
    "median": lambda x: x.median() + x,
}


def waiting(device: str) -> Iterator[Row]:
    """Programs with an op that waits, draws or writes: no capture fails."""
    for name, op in WAITING.items():
        with lazygt.session(compile="off", cuda_graphs="now", recover="off") as session:
            try:
                finite = _run(session, op)
            except lazygt.LazyGTError as error:
                yield Row(name, text_of(error), goal="no failure", met=False)
                continue
            failed = [told.error for _, _, told in session.cuda_graphs() if told.failed]
            graphs = session.stats()["cuda_graphs"]
        met = finite and graphs > 0 and not failed
        figure = "; ".join([f"{graphs} graphs", *failed, *([] if finite else ["not finite"])])
        yield Row(name, figure, goal="no failure", met=met)


def _run(session: lazygt.Session, op: Callable[[Tensor], Tensor]) -> bool:
    """Run two plans until they are hot, one of them with the op; whether all numbers are finite."""
    x, y = torch.randn(64), torch.randn(64)
    for _ in range(10):
        x = op(((x.sin() * 0.5).exp() + 0.1).tanh()).cos().sin().tanh().cos()
        session.flush()
    for _ in range(8):
        y = ((y.sin() + 1).exp() * 0.1).tanh().cos()
        session.flush()
    return bool((x.isfinite() & y.isfinite()).all().item())


def seeds(device: str) -> Iterator[Row]:
    """Attention with dropout in a captured forward pass, its backward pass in another plan."""
    with lazygt.session(compile="off", cuda_graphs="now", recover="off"):
        start, numbers = torch.randn(2, 4, 16, 32), []
        for _ in range(STEPS):
            x = start.clone().requires_grad_()
            y = F.scaled_dot_product_attention(x.sin(), x.cos(), x.tanh(), dropout_p=0.2)
            loss = y.exp().square().mean()
            numbers.append(loss.item())  # the plan ends here
            loss.backward()
            assert x.grad is not None
            numbers.append(x.grad.square().sum().item())
    finite = all(torch.tensor(numbers, device="cpu").isfinite().tolist())
    yield Row("forward and backward apart", f"{STEPS} steps", goal="finite numbers", met=finite)
