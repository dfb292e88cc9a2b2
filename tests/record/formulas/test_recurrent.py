"""Recurrent layers give eager torch's bits, over packed sequences whatever their lengths are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import lazygt
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.timeout(120)

#: name -> (lengths of 4 samples on a device, whether they are sorted)
LENGTHS: dict[str, tuple[Callable[[str], Any], bool]] = {
    "list": (lambda device: [5, 4, 4, 1], True),
    "cpu": (lambda device: torch.tensor([5, 4, 4, 1], device="cpu"), True),
    "lazy": (lambda device: torch.tensor([5, 4, 4, 1], device=device), True),
    "unsorted": (lambda device: torch.tensor([1, 5, 4, 4], device=device), False),
}
LAYERS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"proj_size": 2, "bidirectional": True, "num_layers": 2, "bias": False}),
    (nn.GRU, {"bidirectional": True, "num_layers": 2, "dropout": 0.5}),
    (nn.GRU, {"bias": False}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
]


def step(device: str, kind: type[nn.RNNBase], sizes: dict[str, Any], name: str) -> Any:
    """Outputs, lengths, states and gradients of one forward and backward pass."""
    lengths, is_sorted = LENGTHS[name]
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, x = kind(3, 4, **sizes), torch.randn(5, 4, 3)
    model.to(device)
    x = x.to(device).requires_grad_()
    torch.manual_seed(1)  # for dropout
    packed = pack_padded_sequence(x, lengths(device), enforce_sorted=is_sorted)
    out, state = model(packed)
    padded, found = pad_packed_sequence(out)
    states = state if isinstance(state, tuple) else (state,)
    (padded.square().sum() + sum(part.sum() for part in states)).backward()
    grads = [p.grad for p in model.parameters()]
    return [t.detach().cpu() for t in (padded, found, x.grad, *states, *grads)]


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("kind", "sizes"), LAYERS)
def test_layers_over_packed_sequences(kind: Any, sizes: dict[str, Any], name: str) -> None:
    expected = step("cpu", kind, sizes, name)
    with lazygt.session(launcher="inline"):
        found = step("lazygt", kind, sizes, name)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


WHOLE: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"num_layers": 2, "dropout": 0.5, "bidirectional": True},
]


@pytest.mark.parametrize("sizes", WHOLE)
@pytest.mark.parametrize("nonlinearity", ["tanh", "relu", None])
def test_layers_over_whole_sequences(nonlinearity: str | None, sizes: dict[str, Any]) -> None:
    """The input of all steps is one product: 8 rows of one have other bits than 4 and 4."""

    def whole(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        kind: Any = nn.GRU if nonlinearity is None else nn.RNN
        chosen = sizes if nonlinearity is None else {"nonlinearity": nonlinearity, **sizes}
        with torch.device("cpu"):
            model, x = kind(8, 8, **chosen), torch.randn(5, 4, 8)
            states = model.num_layers * (2 if model.bidirectional else 1)
            first = torch.randn(states, 5 if model.batch_first else 4, 8)
        model.to(device)
        leaves = [x.to(device).requires_grad_(), first.to(device).requires_grad_()]
        torch.manual_seed(1)  # for dropout
        out, last = model(*leaves)
        (out.square().sum() + last.sum()).backward()
        results = [out, last, *(t.grad for t in (*leaves, *model.parameters()))]
        return [t.detach().cpu() for t in results]

    expected = whole("cpu")
    with lazygt.session(launcher="inline"):
        found = whole("lazygt")
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_lengths_of_the_client_cost_no_sync_point() -> None:
    with lazygt.session(launcher="inline") as s:
        packed = pack_padded_sequence(torch.randn(3, 4, 2), [4, 3, 1], batch_first=True)
        nn.GRU(2, 2)(packed)
        assert s.stats()["flushes"] == {}
        assert packed.batch_sizes.device.type == "cpu"
        pack_padded_sequence(torch.randn(4, 3, 2), torch.tensor([4, 3, 1]))
        assert s.stats()["flushes"] == {"pack_padded_sequence": 1}


def test_sequences_packed_in_a_session() -> None:
    with lazygt.session(launcher="inline"):
        packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
        assert packed.data.tolist() == [0, 0, 1, 1, 2]
        assert pad_packed_sequence(packed)[0].tolist() == [[0, 0], [1, 1], [2, 0]]


@pytest.mark.parametrize("lengths", [[1, 2, 3], [3, 2, 0], [3, 2]])
def test_wrong_lengths_raise_torchs_error(lengths: list[int]) -> None:
    def message() -> str:
        with pytest.raises(RuntimeError) as caught:
            pack_padded_sequence(torch.ones(4, 3, 2), lengths)
        return str(caught.value)

    expected = message()
    with lazygt.session(launcher="inline"):
        assert message() == expected
