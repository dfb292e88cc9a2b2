"""Displays of notebooks: the values that print shows, with a card; sessions over several cells."""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lazygt

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def s() -> Iterator[lazygt.Session]:
    with lazygt.session(launcher="inline") as session:
        yield session


def _cells(html: str) -> dict[str, str]:
    """The rows of a table."""
    return dict(re.findall(r"<tr><th[^>]*>(.*?)</th><td[^>]*>(.*?)</td></tr>", html))


def _line(offset: int = 0) -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_html_of_recorded_tensor(s: lazygt.Session) -> None:
    x = torch.ones(3)
    y = x + 1
    line = _line(-1)
    assert _cells(y._repr_html_()) == {
        "shape": "(3,)", "dtype": "torch.float32", "bytes": "12", "requires_grad": "False",
        "value": "on the workers", "made at": line,
    }  # fmt: skip
    shown = "tensor([2., 2., 2.], device='lazygt:0')"
    assert y._repr_mimebundle_() == {"text/html": y._repr_html_(), "text/plain": shown}
    assert y._repr_html_().startswith(f"<pre>{shown.replace(chr(39), '&#x27;')}</pre><table>")
    assert repr(y) == shown


Maker = Callable[[lazygt.Session], torch.Tensor]


def _computed(s: lazygt.Session) -> torch.Tensor:
    y = torch.ones(3).exp()
    s.flush()
    return y


def _replayed(s: lazygt.Session) -> torch.Tensor:
    for _ in range(3):
        z = torch.zeros(2).exp()
        y = torch.ones(3).exp()
        s.flush()
    del z
    return y


def _uploaded(s: lazygt.Session) -> torch.Tensor:
    return torch.rand(3, device="cpu").to("lazygt")


def _view(s: lazygt.Session) -> torch.Tensor:
    x = torch.ones(3, 2)
    return x[:, 0]


def _written(s: lazygt.Session) -> torch.Tensor:
    y = torch.zeros(3)
    y += 1
    return y


def _chosen(s: lazygt.Session) -> torch.Tensor:
    x = torch.ones(3)
    return torch.nonzero(x)[:, 0]


@pytest.mark.parametrize(
    ("make", "value", "offset"),
    [
        (_computed, "on the workers", 1),
        (_replayed, "on the workers", 3),
        (_uploaded, "on the workers", 1),
        (_view, "on the workers", 2),
        (_written, "on the workers", 2),
        (_chosen, "on the workers", 2),
    ],
)
def test_a_tensor_names_its_line_wherever_it_is(
    make: Maker, value: str, offset: int, s: lazygt.Session
) -> None:
    y = make(s)
    cells = _cells(y._repr_html_())
    assert cells["value"] == value
    assert cells["made at"] == f"{__file__}:{make.__code__.co_firstlineno + offset}"
    assert cells["shape"] == "(3,)"


def test_gradients_and_parameters(s: lazygt.Session) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    line = _line(-1)
    assert "<caption>Parameter</caption>" in layer.weight._repr_html_()
    assert _cells(layer.weight._repr_html_())["requires_grad"] == "True"
    assert _cells(layer.weight.grad._repr_html_())["made at"] == line


def test_html_of_values_without_worker(s: lazygt.Session) -> None:
    number = torch.tensor(2.0, device="cpu").to("lazygt")
    assert _cells(number._repr_html_())["value"] == "a number in the client"
    kept = torch.ones(3)
    s.close()
    cells = _cells(kept._repr_html_())
    assert (cells["value"], cells["made at"]) == ("lost: the session is closed", "?")


def test_html_of_session(s: lazygt.Session) -> None:
    kept = torch.ones(3)
    cells = _cells(s._repr_html_())
    assert cells["flushes"] == "none"
    assert cells["ops recorded"] == "2"
    assert s.stats()["messages_sent"] == 0
    kept.tolist()
    cells = _cells(s._repr_html_())
    assert cells["flushes"] == "to cpu 1"
    assert cells["plans built"] == "1"
    assert "<caption>&lt;lazygt.session open: 1 cpu worker(s)" in s._repr_html_()


def test_ipython_output_matches_print_with_one_fetch(
    s: lazygt.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    formatters.DisplayFormatter().format(s)
    assert s.stats()["fetches"] == 0
    y = torch.ones(3) + 1
    shown, _ = formatters.DisplayFormatter().format(y)
    assert s.stats()["fetches"] == 1
    print(y)
    assert shown["text/plain"] == capsys.readouterr().out.rstrip()
    assert "<table>" in shown["text/html"]


# -- sessions over several cells -------------------------------------------------------------


def test_cells_run_in_one_open_session() -> None:
    cells = [
        "s = lazygt.session(launcher='inline').open()",
        "x = torch.ones(3)",
        "s.open()",
        "y = (x + 1).tolist()",
        "s.close()",
        "z = torch.ones(3)",
    ]
    names: dict[str, Any] = {"torch": torch, "lazygt": lazygt}
    for cell in cells:
        exec(cell, names)
    assert names["x"].device.type == "lazygt"
    assert names["y"] == [2.0, 2.0, 2.0]
    assert names["z"].device.type == "cpu"
    assert "closed" in repr(names["s"])
    names["s"].close()


def test_close_raises_errors_of_opened_session() -> None:
    s = lazygt.session(launcher="inline").open()
    kept = torch.ones(3)[torch.tensor([7])]
    with pytest.raises(lazygt.ExecutionError, match="index 7 is out of bounds"):
        s.close()
    assert (torch.ones(1).device.type, kept.device.type) == ("cpu", "lazygt")
    with pytest.raises(lazygt.NoSession, match="closed"):
        s.open()


def test_open_session_in_a_block_ends_with_close() -> None:
    s = lazygt.session(launcher="inline").open()
    with s:
        torch.ones(3)
    assert torch.ones(1).device.type == "lazygt"
    s.close()
    assert torch.ones(1).device.type == "cpu"
