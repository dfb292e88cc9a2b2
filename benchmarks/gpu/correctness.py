"""Numbers on the device: lazygt's against eager torch's there, bit for bit where that holds."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import lazygt
from benchmarks.gpu.rows import Make, Row, agreement, differences
from tests.gpu.attention import CASES, attend
from tests.models import zoo

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def drawn(device: str, *shape: int) -> Tensor:
    """Random numbers of the CPU's generator, the same for all devices."""
    return torch.randn(shape, device="cpu").to(device)


def start(device: str) -> Iterator[Row]:
    """Seconds until a new session has given its first number, and its first matrix product."""
    begin = time.perf_counter()
    with lazygt.session():
        (torch.ones(4) + 1).sum().item()
        yield Row("first number", f"{time.perf_counter() - begin:.2f} s")
        begin = time.perf_counter()
        total = (torch.ones(256, 256) @ torch.ones(256, 256)).sum().item()
        took = time.perf_counter() - begin
        yield Row("first product", f"{took:.2f} s", goal="256 ** 3", met=total == 256**3)


def models(device: str) -> Iterator[Row]:
    """Five steps of training of each model of the tests; losses, weights and buffers at the end."""
    names = [name for name in zoo.MODELS if name != "lstm" or device == "cpu"]
    cases: dict[str, Make] = {
        name: partial(zoo.train, name, "adamw", zoo.batches(name, 5)) for name in names
    }
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield from agreement(differences(cases, device), 1e-3)
    if "lstm" not in names:  # cuDNN draws the dropout between its layers from a state of its own
        yield Row("lstm", "left out: other draws than cuDNN's")


def attention(device: str) -> Iterator[Row]:
    """Outputs and gradients by mask, lengths, head size and dtype."""
    cases: dict[str, Make] = {
        f"{name}, {dtype}".replace("torch.", ""): partial(attend, dtype=dtype, case=case)
        for dtype in DTYPES
        for name, case in CASES.items()
    }
    yield from agreement(differences(cases, device), 1e-2)


def recurrent(device: str) -> Iterator[Row]:
    """Outputs, states and gradients of LSTM, GRU and RNN, over whole and packed sequences."""
    cases: dict[str, Make] = {
        f"{kind.__name__}, {name}, {dtype}".replace("torch.", ""): partial(
            _recurrent, kind, sizes, dtype
        )
        for dtype in (torch.float16, torch.float32, torch.float64)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for name, sizes in _RECURRENT.items()
    }
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield from agreement(differences(cases, device), 1e-2)


_RECURRENT: dict[str, dict[str, Any]] = {
    "one layer": {"batch_first": True},
    "no bias": {"bias": False},
    "two layers both ways": {"num_layers": 2, "bidirectional": True},
}


def _recurrent(
    kind: type[nn.RNNBase], sizes: dict[str, Any], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Two backward passes over whole sequences, then one over packed ones."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = kind(16, 32, **sizes)
    model.to(device, dtype)
    x = drawn(device, 12, 8, 16).to(dtype).requires_grad_()
    lengths = [12, 9, 9, 5, 4, 3, 1, 1]
    packed = pack_padded_sequence(drawn(device, 12, 8, 16).to(dtype), lengths)
    results: list[Tensor] = []
    for data, passes in ((x, 2), (packed, 1)):
        out, last = model(data)
        out = out.data if isinstance(out, PackedSequence) else out
        states = last if isinstance(last, tuple) else (last,)
        loss = out.float().square().mean() + sum(state.float().mean() for state in states)
        for _ in range(passes):
            loss.backward(retain_graph=True)
        results += [out, *states]
    grads = [x.grad, *(p.grad for p in model.parameters())]
    return [*results, *(grad for grad in grads if grad is not None)]


def autocast(device: str) -> Iterator[Row]:
    """Results and their dtypes under autocast to bfloat16."""

    def under(name: str, device: str) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return _CAST[name](drawn(device, 8, 8) @ drawn(device, 8, 8))

    cases: dict[str, Make] = {name: partial(under, name) for name in _CAST}
    yield from agreement(differences(cases, device), 1e-2)


_CAST: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x,
    "softmax": lambda x: x.softmax(-1),
    "exp": torch.exp,
    "sum": torch.sum,
    "pow": lambda x: x.pow(2),
    "norm": torch.linalg.vector_norm,
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, [8], torch.ones_like(x[0], dtype=torch.float32)),
    "rms_norm": lambda x: F.rms_norm(x, [8], torch.ones_like(x[0], dtype=torch.float32)),
    "gelu": F.gelu,
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(8, device=x.device)),
    "mv": lambda x: torch.mv(x.float(), x[0].float()),
    "cat": lambda x: torch.cat([x, x.float()]),
    "addcmul": lambda x: torch.addcmul(x, x, x.float()),
    "conv2d": lambda x: F.conv2d(x.float().view(1, 1, 8, 8), x.float().view(1, 1, 8, 8)),
    "group_norm": lambda x: F.group_norm(x, 2, torch.ones_like(x[0], dtype=torch.float32)),
    "lstm": lambda x: nn.LSTM(8, 8).to(x.device)(x.float().view(8, 1, 8))[0],
}


def draws(device: str) -> Iterator[Row]:
    """Random numbers from the same seed."""
    cases: dict[str, Make] = {
        "rand": lambda d: torch.rand(7, 9, device=d),
        "randn": lambda d: torch.randn(1001, device=d),
        "randint": lambda d: torch.randint(10, (99,), device=d),
        "randperm": lambda d: torch.randperm(1000, device=d),
        "long randperm": lambda d: torch.randperm(50_000, device=d),
        "normal_": lambda d: torch.empty(77, device=d).normal_(),
        "bernoulli": lambda d: torch.full((999,), 0.3, device=d).bernoulli(),
        "multinomial": lambda d: torch.multinomial(drawn(d, 100).softmax(0), 20),
        "dropout": lambda d: F.dropout(drawn(d, 1000), 0.3),
        "three in turn": lambda d: [torch.rand(5, device=d), F.dropout(drawn(d, 9)),
                                    torch.rand(5, device=d)],
    }  # fmt: skip
    yield from agreement(differences(cases, device), 0.0)


def flags(device: str) -> Iterator[Row]:
    """Flags of precision and determinism, which are set in the client and hold in workers."""

    def under(flag: str, program: Callable[[str], Tensor], device: str) -> Tensor:
        with _FLAGS[flag]():
            return program(device).cpu()  # fetched while the flag holds

    programs: dict[str, Callable[[str], Tensor]] = {
        "product": lambda d: drawn(d, 512, 512) @ drawn(d, 512, 512),
        "conv2d": lambda d: F.conv2d(drawn(d, 4, 16, 32, 32), drawn(d, 32, 16, 3, 3)),
        "cumsum": lambda d: drawn(d, 4096).cumsum(0),
        "histc": lambda d: drawn(d, 99).histc(10),
    }
    cases: dict[str, Make] = {
        f"{name}, {flag}": partial(under, flag, program)
        for flag in _FLAGS
        for name, program in programs.items()
    }
    yield from agreement(differences(cases, device), 0.0)


@contextmanager
def _setting(setter: Callable[[Any], None], value: object, default: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(default)


_CUDNN = torch.backends.cudnn.flags
_FLAGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as they are": nullcontext,
    "high precision": partial(_setting, torch.set_float32_matmul_precision, "high", "highest"),
    "deterministic": partial(_setting, torch.use_deterministic_algorithms, True, False),
    "cuDNN without TF32": partial(_CUDNN, enabled=True, allow_tf32=False),
    "cuDNN deterministic": partial(_CUDNN, enabled=True, deterministic=True),
}


def synchronize(device: str) -> Iterator[Row]:
    """Time of `synchronize`: until products are there, not until they are launched."""
    size = 8192 if device == "cuda" else 256
    with lazygt.session(compile=lazygt.Compile("off", cuda_graphs="off")) as session:
        x = torch.randn(size, size, dtype=torch.bfloat16)
        for _ in range(2):  # the second counts: the plan is known then
            begin = time.perf_counter()
            y = x
            for _ in range(20):
                y = y @ x
            session.synchronize()
            waited = time.perf_counter() - begin
            y.sum().item()
            share = waited / (time.perf_counter() - begin)
    yield Row("share of the time until a number", f"{share:.2f}", goal=">= 0.8", met=share >= 0.8)
