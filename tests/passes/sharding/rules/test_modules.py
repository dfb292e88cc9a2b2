"""What torch.nn has, in a data-parallel step: nothing that grows with the batch is sent.

Counted is a step that is planned and never run. Every sample has more than a byte in any value of
the batch; gradients of all parameters together have less than one a sample.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import lazygt
from lazygt.passes.sharding import rules
from tests.passes.sharding.rules.modules import EXAMPLES, SAMPLES

#: Those for which something of the batch is put together, and why.
GATHERED = {
    "RReLU": "draws only where a number is negative, so what is drawn depends on all before it",
    "Embedding of a norm": "writes into the table the rows that any sample asks for",
    "Embedding by frequency": "counts how often a row stands in the whole batch",
    "EmbeddingBag": "where bags begin is data; the indices are put together, not the rows",
}
_DYNAMIC = "torch has no shape function for its kernels, so a step can't be planned as a whole"
LEFT_OUT = {
    "AdaptiveLogSoftmaxWithLoss": "picks samples by their class: sizes depend on values",
    "CTCLoss": _DYNAMIC,
    "FractionalMaxPool3d": _DYNAMIC,
    "MultiLabelMarginLoss": _DYNAMIC,
    "MultiMarginLoss": _DYNAMIC,
    "CrossMapLRN2d": "a loop over samples in Python",
    "SyncBatchNorm": "asks for torch's own process group; BatchNorm is synchronised already",
    "LinearCrossEntropyLoss": "new in torch 2.13",
    "NLLLoss2d": "the old name of NLLLoss",
    **dict.fromkeys(("Transformer", "TransformerDecoder", "TransformerDecoderLayer",
                     "TransformerEncoder"), "of the parts that are listed"),
}  # fmt: skip
_NO_LAYERS = {"Container", "LinearCrossEntropyOptions", "Module", "ModuleDict", "ModuleList",
              "ParameterDict", "ParameterList", "RNNBase", "RNNCellBase", "Sequential"}  # fmt: skip


def test_all_of_torch_nn_is_listed() -> None:
    names = {name for name in nn.modules.__all__ if not name.startswith("Lazy")} - _NO_LAYERS
    listed = {name.split()[0].rstrip(",") for name in EXAMPLES}
    assert sorted(names - listed - LEFT_OUT.keys()) == []
    assert GATHERED.keys() <= EXAMPLES.keys()


def differentiable(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made] if made.requires_grad else []
    return [t for item in made for t in differentiable(item)] if isinstance(made, tuple) else []


def grows(name: str) -> list[str]:
    """The collectives of a step that send at least a byte a sample."""
    make, inputs = EXAMPLES[name]
    with lazygt.session(launcher="dry", mesh={"data": 2}, compile="off") as s:
        model = make()
        batch = [lazygt.distribute(value, [Shard(0)]) for value in inputs()]
        if batch[0].is_floating_point():
            batch[0].requires_grad_()
        s.flush()
        sum(t.square().sum() for t in differentiable(model(*batch))).backward()  # type: ignore[union-attr]
        if parameters := list(model.parameters()):
            torch.optim.SGD(parameters, lr=0.1).step()
        s.flush()
        assert s.last_plan is not None
        return [f"{one.kind} of {one.nbytes}: {one.why}"
                for one in s.last_plan.collectives if one.nbytes >= SAMPLES]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_data_parallel_step(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is gathered, and of torch's own
        found = grows(name)
    assert bool(found) == (name in GATHERED), found


@pytest.mark.timeout(60)
def test_gradients_of_microbatches_are_summed_once() -> None:
    """The second one is added through a transpose of the first."""
    with lazygt.session(launcher="dry", mesh={"data": 4}, compile="off") as s:
        model = nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = torch.randn(4096, 1024), torch.randn(4096, 1024)
        s.flush()
        for batch in batches:
            model(lazygt.distribute(batch, [Shard(0)])).square().mean().backward()
        optimizer.step()
        assert s.last_plan is not None
        found = [(one.kind, one.nbytes) for one in s.last_plan.collectives]
    assert found == [("all_reduce", 4 * 1024**2)]


def test_a_rule_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rules.RULES, "aten.convolution.default")
    with pytest.warns(lazygt.GatherWarning, match="convolution"):
        assert grows("Conv2d") != []
