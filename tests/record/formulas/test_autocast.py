"""Autocast casts what eager torch casts on the workers' device, and follows that device's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import lazygt
from lazygt.record.formulas import autocast
from tests.support.bits import assert_same_bits

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
MACROS = {
    "LOWER_PRECISION_FP": autocast._to_lower_precision,
    "FP32": autocast._to_float32,
    "FP32_SET_OPT_DTYPE": autocast._float32_result,
    "PROMOTE": autocast._promote,
}
#: In ``autocast_mode.cpp`` alone.
NOT_IN_HEADER = {"cudnn_convolution", "cudnn_convolution_transpose"}


def aten_ops() -> set[str]:
    schemas = torch._C._jit_get_all_schemas()
    return {
        f"{each.name}.{each.overload_name}".rstrip(".").removeprefix("aten::")
        for each in schemas
        if each.name.startswith("aten::")
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tables_hold_the_ops_that_torch_casts(device: str) -> None:
    cast = {name for name in aten_ops() if autocast.torch_casts(name, device)}
    assert cast == {name for name in autocast.TABLES[device] if autocast.torch_casts(name, device)}
    assert len(cast) > 100


@pytest.mark.parametrize("macro", MACROS)
def test_policies_of_cuda_are_those_of_the_header(macro: str) -> None:
    body = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert body is not None
    listed = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    table = autocast.TABLES["cuda"]
    ours = {name for name, policy in table.items() if policy is MACROS[macro]} - NOT_IN_HEADER
    assert ours == {".".join(filter(None, names)) for names in listed}


def train(device: str, name: str) -> list[Tensor]:
    """A step whose ops are cast, kept, promoted, or made of others that are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(device)
    x, y = torch.randn(5, 8).to(device), torch.tensor([0, 1, 2, 3, 0]).to(device)
    made: list[Tensor] = []
    with torch.autocast(name, dtype=torch.bfloat16):
        out = model(x)
        mixed = torch.cat([out, out.float()]).var(0)
        product = torch.einsum("ij,kj->ik", out, x[:, :4])
        spectrum = torch.fft.fft2(out.float()).abs()
        with torch.autocast(name, enabled=False):
            made.append(x @ x.T)
        loss = F.cross_entropy(out, y) + mixed.sum() + product.sum() + spectrum.sum()
    loss.backward()
    made += [out, mixed, product, spectrum, loss, x @ x.T]
    return [each.detach().cpu() for each in made] + [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("name", ["cpu", "lazygt"])
def test_autocast_of_the_workers_device_has_the_bits_of_eager_torch(name: str) -> None:
    expected = train("cpu", "cpu")
    with lazygt.session(launcher="inline"):
        found = train("lazygt", name)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)


def test_decorated_functions_are_cast_in_the_sessions_that_they_are_called_in() -> None:
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def product(x: Tensor) -> Tensor:
        return x @ x

    host = torch.ones(2, 2)
    with lazygt.session(launcher="inline"):
        assert product(torch.ones(2, 2)).dtype == product(host).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("lazygt")
    assert product(host).dtype == torch.bfloat16


def test_block_around_a_session_is_of_the_host_and_a_session_may_end_inside_one() -> None:
    session = lazygt.session(launcher="inline")
    with session, torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        session.close()
    assert not torch.is_autocast_enabled("lazygt")
    assert not torch.is_autocast_enabled("cpu")


OF_CUDA: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "mv": (lambda a, b: torch.mv(a, a[0]), torch.bfloat16),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, a), torch.bfloat16),
    "softmax": (lambda a, b: b.softmax(-1), torch.float32),
    "softmax of a dtype": (lambda a, b: F.softmax(b, -1, dtype=torch.bfloat16), torch.bfloat16),
    "layer_norm": (lambda a, b: F.layer_norm(b, (4,), a[0], a[0]), torch.float32),
    "group_norm": (lambda a, b: F.group_norm(b[None], 2, a[0], a[0]), torch.float32),
    "cross_entropy": (
        lambda a, b: F.cross_entropy(b, torch.zeros(4, dtype=torch.long)),
        torch.float32,
    ),
    "sum": (lambda a, b: b.sum(0), torch.float32),
    "norm": (lambda a, b: b.norm(), torch.float32),
    "norm of a dim": (lambda a, b: torch.ops.aten.norm(b, 2, [0], False), torch.float32),
    "pow": (lambda a, b: b**2, torch.float32),
    "addcmul": (lambda a, b: torch.addcmul(b, b, a), torch.float32),
    "lower addcmul": (lambda a, b: torch.addcmul(b, b, b), torch.bfloat16),
    "add": (lambda a, b: b + b, torch.bfloat16),
    "float64": (lambda a, b: b.double().exp(), torch.float64),
}


@pytest.mark.parametrize("op", OF_CUDA)
def test_sessions_of_gpus_cast_as_cuda_does(op: str) -> None:
    act, expected = OF_CUDA[op]
    with lazygt.session(launcher="dry", device="cuda"):
        a, b = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bfloat16)
        for name in ("cuda", "lazygt"):
            with torch.autocast(name, dtype=torch.bfloat16):
                assert act(a, b).dtype == expected
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_gpus_are_cast_as_for_cudnn(
    kind: type[nn.RNNBase], packed: bool
) -> None:
    def dtypes(dtype: torch.dtype) -> set[torch.dtype]:
        model, x = kind(4, 3), torch.ones(5, 2, 4, dtype=dtype)
        data = pack_padded_sequence(x, torch.tensor([5, 3], device="cpu")) if packed else x
        with torch.autocast("lazygt", dtype=torch.bfloat16):
            out, state = model(data)
        out = out.data if packed else out
        out.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        states = state if isinstance(state, tuple) else (state,)
        return {t.dtype for t in (out, *states)}

    with lazygt.session(launcher="dry", device="cuda"):
        assert dtypes(torch.float32) == dtypes(torch.bfloat16) == {torch.float16}
        with torch.backends.cudnn.flags(enabled=False):
            assert torch.float16 not in dtypes(torch.float32)
    with lazygt.session(launcher="dry"):
        assert torch.float16 not in dtypes(torch.float32)


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with lazygt.session(launcher="dry", device="cuda"):
        p = torch.rand(4)
        with (
            torch.autocast("cuda", dtype=torch.bfloat16),
            pytest.raises(RuntimeError, match="unsafe to autocast"),
        ):
            F.binary_cross_entropy(p, p)
