"""Wrong calls in a session raise eager torch's exceptions, with its text and the user's line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import lazygt
from lazygt.graph.meta import intern
from lazygt.graph.node import Ref
from lazygt.graph.ops import facts
from lazygt.graph.shapes import meta_run
from lazygt.record.tensor import NATIVE

pytestmark = pytest.mark.timeout(120)

f32 = torch.rand
i64 = torch.arange


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


#: name -> a call that torch refuses, whatever the values
CALLS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(f32(3, 5), f32(4, 2)),
    "matmul": lambda: f32(3, 5) @ f32(4, 2),
    "mm of large ones": lambda: torch.empty(4096, 8192) @ torch.empty(4096, 8192),
    "mm of huge ones": lambda: f32(1).expand(70_000, 70_000) @ f32(1).expand(70_001, 3),
    "matmul of batches": lambda: f32(2, 3, 5) @ f32(2, 4, 2),
    "matmul of other batches": lambda: f32(2, 3, 5) @ f32(3, 5, 2),
    "mm of dtypes": lambda: f32(3, 5) @ f32(5, 2).double(),
    "mm of dims": lambda: torch.mm(f32(3, 5), f32(5)),
    "mv": lambda: torch.mv(f32(3, 5), f32(4)),
    "dot": lambda: torch.dot(f32(3), f32(4)),
    "dot of dtypes": lambda: torch.dot(f32(3), i64(3)),
    "bmm": lambda: torch.bmm(f32(2, 3, 5), f32(2, 4, 2)),
    "bmm of batches": lambda: torch.bmm(f32(2, 3, 5), f32(3, 5, 2)),
    "baddbmm": lambda: torch.baddbmm(f32(2, 3, 2), f32(2, 3, 5), f32(2, 4, 2)),
    "addmm": lambda: torch.addmm(f32(2), f32(3, 5), f32(4, 2)),
    "addmm of another sum": lambda: torch.addmm(f32(7), f32(3, 5), f32(5, 2)),
    "linear": lambda: F.linear(f32(3, 5), f32(2, 4), f32(2)),
    "nn.Linear": lambda: nn.Linear(784, 10)(f32(64, 28)),
    "linear of half": lambda: nn.Linear(4, 2)(f32(3, 4).half()),
    "bilinear": lambda: F.bilinear(f32(3, 4), f32(3, 5), f32(2, 4, 6)),
    "conv1d": lambda: F.conv1d(f32(1, 3, 8), f32(4, 2, 3)),
    "conv2d": lambda: nn.Conv2d(3, 4, 3)(f32(2, 1, 8, 8)),
    "conv2d of dims": lambda: nn.Conv2d(3, 4, 3)(f32(8, 8)),
    "conv2d of a small picture": lambda: nn.Conv2d(3, 4, 5)(f32(2, 3, 4, 4)),
    "conv2d of bytes": lambda: nn.Conv2d(3, 4, 3)(ints(2, 3, 8, 8, dtype=torch.uint8)),
    "cat": lambda: torch.cat([f32(2, 3), f32(2, 4)]),
    "cat of dims": lambda: torch.cat([f32(2, 3), f32(2)]),
    "cat of none": lambda: torch.cat([]),
    "cat of a wrong dim": lambda: torch.cat([f32(2, 3), f32(2, 3)], dim=2),
    "stack": lambda: torch.stack([f32(2, 3), f32(2, 4)]),
    "stack of none": lambda: torch.stack([]),
    "hstack": lambda: torch.hstack([f32(2, 3), f32(3, 3)]),
    "embedding of floats": lambda: nn.Embedding(5, 2)(f32(3)),
    "embedding of dims": lambda: F.embedding(i64(3), f32(5)),
    "embedding_bag": lambda: F.embedding_bag(f32(3), f32(5, 2), i64(1)),
    "cross_entropy of float labels": lambda: F.cross_entropy(f32(3, 5), f32(3)),
    "cross_entropy of another batch": lambda: F.cross_entropy(f32(3, 5), i64(4)),
    "cross_entropy of weights": lambda: F.cross_entropy(f32(3, 5), i64(3), f32(4)),
    "cross_entropy of probabilities": lambda: F.cross_entropy(f32(3, 5), f32(3, 4)),
    "nll_loss": lambda: F.nll_loss(f32(3, 5), ints(3, 1)),
    "nll_loss of float labels": lambda: F.nll_loss(f32(3, 5), f32(3)),
    "nll_loss of another batch": lambda: F.nll_loss(f32(3, 5), i64(2)),
    "mse_loss": lambda: F.mse_loss(f32(3), f32(4)),
    "l1_loss": lambda: F.l1_loss(f32(3, 2), f32(4, 3)),
    "binary_cross_entropy": lambda: F.binary_cross_entropy(f32(3), f32(4)),
    "bce with logits": lambda: F.binary_cross_entropy_with_logits(f32(3), f32(4)),
    "kl_div": lambda: F.kl_div(f32(3, 2), f32(4, 3)),
    "multi_margin_loss": lambda: F.multi_margin_loss(f32(3, 5), i64(4)),
    "ctc_loss": lambda: F.ctc_loss(f32(5, 2, 3), ints(2, 2), (5, 6, 7), (2, 2)),
    "view": lambda: f32(3, 4).view(5),
    "view of strides": lambda: f32(3, 4).t().view(12),
    "reshape": lambda: f32(3, 4).reshape(5, 2),
    "reshape to two unknowns": lambda: f32(3, 4).reshape(-1, -1),
    "unflatten": lambda: f32(3, 4).unflatten(1, (3, 2)),
    "flatten": lambda: f32(3, 4).flatten(1, 0),
    "expand": lambda: f32(3, 4).expand(3, 5),
    "expand to fewer dims": lambda: f32(3, 4).expand(4),
    "repeat": lambda: f32(3, 4).repeat(2),
    "index_select of a wrong dim": lambda: f32(3, 4).index_select(2, i64(2)),
    "gather of int16": lambda: f32(3, 4).gather(1, ints(3, 1, dtype=torch.int16)),
    "gather of dims": lambda: f32(3, 4).gather(1, i64(3)),
    "gather of sizes": lambda: f32(3, 4).gather(1, ints(5, 1)),
    "take_along_dim": lambda: torch.take_along_dim(f32(3, 4), f32(3, 1), 1),
    "scatter of floats": lambda: f32(3, 4).scatter(1, f32(3, 1), 1.0),
    "scatter of dims": lambda: f32(3, 4).scatter(1, i64(3), f32(3)),
    "scatter of dtypes": lambda: f32(3, 4).scatter(1, ints(3, 1), f32(3, 1).double()),
    "scatter of a small source": lambda: f32(3, 4).scatter(1, ints(3, 2), f32(3, 1)),
    "scatter_add": lambda: f32(3, 4).scatter_add(1, ints(5, 1), f32(5, 1)),
    "index_copy": lambda: f32(3, 4).index_copy(0, i64(2), f32(3, 4)),
    "masked_fill of ints": lambda: f32(3).masked_fill(i64(3), 0.0),
    "masked_fill of a value": lambda: f32(3).masked_fill(f32(3) > 1, f32(2)),
    "index by floats": lambda: f32(3, 4)[f32(2)],
    "index of too many": lambda: f32(3)[0, 0],
    "index out of range": lambda: f32(3)[3],
    "index by a mask of another size": lambda: f32(3, 4)[f32(2) > 0],
    "set a slice": lambda: f32(3, 4)[:, :2].copy_(f32(3, 3)),
    "add": lambda: f32(3, 4) + f32(3, 5),
    "add of three": lambda: f32(2, 3, 4) * f32(4, 3),
    "add_": lambda: f32(3).add_(f32(4)),
    "add_ to a smaller one": lambda: f32(3).add_(f32(2, 3)),
    "mul_ of an int": lambda: i64(3).mul_(0.5),
    "div_ of an int": lambda: i64(3).div_(2),
    "sub of bools": lambda: (f32(3) > 0) - (f32(3) > 0),
    "neg of bools": lambda: -(f32(3) > 0),
    "where of floats": lambda: torch.where(f32(3), f32(3), f32(3)),
    "where of sizes": lambda: torch.where(f32(3) > 0, f32(4), f32(3)),
    "not of floats": lambda: ~f32(3),
    "shift of floats": lambda: f32(3) << f32(3),
    "clamp of nothing": lambda: f32(3).clamp(),
    "lerp": lambda: torch.lerp(f32(3), f32(4), 0.5),
    "addcmul": lambda: torch.addcmul(f32(3), f32(4), f32(3)),
    "layer_norm": lambda: nn.LayerNorm(4)(f32(3, 5)),
    "layer_norm of weights": lambda: F.layer_norm(f32(3, 4), (4,), f32(3)),
    "rms_norm": lambda: nn.RMSNorm(4)(f32(3, 5)),
    "batch_norm": lambda: nn.BatchNorm1d(4)(f32(3, 5)),
    "batch_norm of one": lambda: nn.BatchNorm1d(4)(f32(1, 4)),
    "batch_norm of dims": lambda: nn.BatchNorm2d(4)(f32(3, 4)),
    "group_norm": lambda: nn.GroupNorm(2, 4)(f32(3, 5)),
    "group_norm of groups": lambda: F.group_norm(f32(3, 5), 2),
    "instance_norm": lambda: nn.InstanceNorm2d(4, affine=True)(f32(3, 5, 2, 2)),
    "max_pool2d": lambda: F.max_pool2d(f32(1, 3, 4, 4), 5),
    "max_pool2d of padding": lambda: F.max_pool2d(f32(1, 3, 4, 4), 2, padding=2),
    "max_pool2d of dims": lambda: F.max_pool2d(f32(4), 2),
    "avg_pool1d": lambda: F.avg_pool1d(f32(1, 3, 4), 5),
    "adaptive_avg_pool2d": lambda: F.adaptive_avg_pool2d(f32(4), 2),
    "transpose": lambda: f32(3, 4).transpose(0, 2),
    "permute": lambda: f32(3, 4).permute(0, 0),
    "permute of too few": lambda: f32(3, 4).permute(0),
    "squeeze": lambda: f32(3, 4).squeeze(2),
    "unsqueeze": lambda: f32(3, 4).unsqueeze(4),
    "t of three": lambda: f32(2, 3, 4).t(),
    "unfold": lambda: f32(3, 4).unfold(1, 5, 1),
    "F.unfold": lambda: F.unfold(f32(1, 3, 4, 4), 5),
    "F.fold": lambda: F.fold(f32(1, 12, 5), (4, 4), 2),
    "pad": lambda: F.pad(f32(3, 4), (1,)),
    "pad of too many": lambda: F.pad(f32(3), (1, 1, 1, 1)),
    "pad reflect": lambda: F.pad(f32(1, 3, 4), (5, 5), mode="reflect"),
    "pad to nothing": lambda: F.pad(f32(3), (-2, -2)),
    "chunk": lambda: f32(3, 4).chunk(0),
    "split": lambda: f32(3, 4).split([1, 1]),
    "narrow": lambda: f32(3, 4).narrow(1, 3, 3),
    "select": lambda: f32(3, 4).select(2, 0),
    "diagonal": lambda: f32(3).diagonal(),
    "tril": lambda: f32(3).tril(),
    "flip": lambda: f32(3, 4).flip(0, 0),
    "roll": lambda: f32(3, 4).roll((1, 1), 0),
    "movedim": lambda: f32(3, 4).movedim(0, 3),
    "cholesky": lambda: torch.linalg.cholesky(f32(3, 4)),
    "solve": lambda: torch.linalg.solve(f32(3, 3), f32(4, 2)),
    "solve of oblong": lambda: torch.linalg.solve(f32(3, 4), f32(4)),
    "inv": lambda: torch.linalg.inv(f32(3, 4)),
    "inv of ints": lambda: torch.linalg.inv(ints(3, 3)),
    "det": lambda: torch.linalg.det(f32(3, 4)),
    "eigh": lambda: torch.linalg.eigh(f32(3, 4)),
    "qr": lambda: torch.linalg.qr(f32(3)),
    "svd of ints": lambda: torch.linalg.svd(ints(3, 3)),
    "triangular_solve": lambda: torch.linalg.solve_triangular(f32(3, 3), f32(4, 2), upper=True),
    "cross": lambda: torch.linalg.cross(f32(3, 4), f32(3, 4)),
    "norm of ints": lambda: torch.linalg.norm(i64(3)),
    "cdist": lambda: torch.cdist(f32(3, 4), f32(3, 5)),
    "cosine_similarity": lambda: F.cosine_similarity(f32(3, 4), f32(3, 5)),
    "einsum": lambda: torch.einsum("ij,jk->ik", f32(3, 5), f32(4, 2)),
    "einsum of dims": lambda: torch.einsum("ijk->i", f32(3, 5)),
    "tensordot": lambda: torch.tensordot(f32(3, 5), f32(4, 2), 1),
    "attention": lambda: F.scaled_dot_product_attention(
        f32(1, 2, 3, 8), f32(1, 2, 3, 4), f32(1, 2, 3, 4)
    ),
    "attention of masks": lambda: F.scaled_dot_product_attention(
        f32(1, 2, 3, 8), f32(1, 2, 3, 8), f32(1, 2, 3, 8), f32(4, 4)
    ),
    "attention of heads": lambda: F.scaled_dot_product_attention(
        f32(1, 2, 3, 8), f32(1, 3, 3, 8), f32(1, 3, 3, 8)
    ),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2)(f32(3, 8), f32(3, 4), f32(3, 4)),
    "LSTM": lambda: nn.LSTM(4, 3)(f32(5, 2, 6)),
    "dropout": lambda: torch.dropout(f32(3), 2.0, True),
    "randperm": lambda: torch.randperm(-1),
    "one_hot": lambda: F.one_hot(f32(3)),
    "argmax of nothing": lambda: f32(0).argmax(),
    "sum": lambda: f32(3, 4).sum(2),
    "sum of a dim twice": lambda: f32(3, 4).sum((0, 0)),
    "mean of ints": lambda: i64(3).mean(),
    "cumsum": lambda: f32(3).cumsum(1),
    "prod": lambda: f32(3).prod(1),
    "kthvalue": lambda: f32(3).kthvalue(4),
    "topk": lambda: f32(3).topk(4),
    "topk of a dim": lambda: f32(3).topk(1, 1),
    "logsumexp": lambda: f32(3).logsumexp(1),
    "quantile": lambda: f32(3).quantile(f32(2).double()),
    "searchsorted": lambda: torch.searchsorted(f32(2, 3), f32(3, 1)),
    "histc": lambda: f32(3).histc(0),
    "bincount": lambda: torch.bincount(f32(3)),
    "repeat_interleave": lambda: f32(3).repeat_interleave(i64(2)),
    "interpolate": lambda: F.interpolate(f32(1, 3, 4), size=(5, 5)),
    "interpolate of a mode": lambda: F.interpolate(f32(1, 3, 4), size=5, mode="bilinear"),
    "interpolate to nothing": lambda: F.interpolate(f32(1, 3, 4, 4), size=(0, 5)),
    "grid_sample": lambda: F.grid_sample(f32(1, 3, 4, 4), f32(1, 4, 4, 3), align_corners=False),
    "pixel_shuffle": lambda: F.pixel_shuffle(f32(1, 3, 4, 4), 2),
    "glu": lambda: F.glu(f32(3)),
    "prelu": lambda: F.prelu(f32(2, 3), f32(2)),
    "view_as_complex": lambda: torch.view_as_complex(f32(3)),
    "fft": lambda: torch.fft.fft(f32(3), dim=1),
    "stft": lambda: torch.stft(f32(3), 8, return_complex=True),
    "view as a dtype": lambda: f32(3).view(torch.int64),
    "zeros": lambda: torch.zeros(-1),
    "arange": lambda: torch.arange(0, 3, -1),
    "eye": lambda: torch.eye(-1),
    "linspace": lambda: torch.linspace(0, 1, -1),
    "tensor": lambda: torch.tensor([[1, 2], [3]]),
    "cov": lambda: torch.cov(f32(2, 2, 2)),
    "_foreach_add": lambda: torch._foreach_add([f32(3)], [f32(4)]),
    "backward of a constant": lambda: f32(3).backward(),
    "backward of a gradient": lambda: f32(3, requires_grad=True).exp().backward(f32(4)),
}

#: Calls that meta kernels take, and kernels refuse: numbers are given to plans when they run, and
#: torch's meta kernels do not check all that its kernels do.
LATE: dict[str, Callable[[], Any]] = {
    "conv2d of groups": lambda: F.conv2d(f32(1, 4, 8, 8), f32(3, 2, 3, 3), groups=2),
    "conv2d of another bias": lambda: F.conv2d(f32(1, 3, 8, 8), f32(4, 3, 3, 3), f32(3)),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(3, 4, 3)(f32(2, 1, 8, 8)),
    "cross_entropy of int32 labels": lambda: F.cross_entropy(f32(3, 5), ints(3, dtype=torch.int32)),
    "cross_entropy of pictures": lambda: F.cross_entropy(f32(2, 5, 4, 4), ints(2, 4, 3)),
    "bce of int labels": lambda: F.binary_cross_entropy(f32(3), i64(3)),
    "index_select of floats": lambda: f32(3, 4).index_select(0, f32(2)),
    "index_select of dims": lambda: f32(3, 4).index_select(0, ints(2, 2)),
    "index_add": lambda: f32(3, 4).index_add(0, i64(2), f32(2, 3)),
    "index_put of another size": lambda: f32(3, 4).index_put((i64(2),), f32(3, 4)),
    "and of floats": lambda: f32(3) & f32(3),
    "pow of a negative int": lambda: i64(3) ** -1,
    "adaptive_avg_pool2d of bools": lambda: F.adaptive_avg_pool2d(f32(1, 4, 4) > 0, 2),
    "softmax": lambda: f32(3, 4).softmax(2),
    "softmax of ints": lambda: i64(3).softmax(0),
    "bernoulli": lambda: f32(3).bernoulli_(2.0),
    "normal_": lambda: f32(3).normal_(0, -1),
    "uniform_": lambda: f32(3).uniform_(1, 0),
    "multinomial": lambda: torch.multinomial(i64(3), 2),
    "multinomial of too many": lambda: torch.multinomial(f32(3), 4),
    "randint": lambda: torch.randint(5, 3, (2,)),
    "max of nothing": lambda: f32(0).max(),
    "max of an empty dim": lambda: f32(3, 0).max(1),
    "var of ints": lambda: i64(3).var(),
    "median of an empty dim": lambda: f32(3, 0).median(1),
    "sort": lambda: f32(3).sort(1),
    "bucketize": lambda: torch.bucketize(f32(3), f32(2, 2)),
    "complex": lambda: torch.complex(f32(3), f32(3).double()),
}


class Outcome(NamedTuple):
    kind: type[BaseException]
    text: str

    @property
    def is_named(self) -> bool:
        return "\n  at " in self.text

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


def outcome(call: Callable[[], Any]) -> Outcome:
    def read() -> None:
        for t in tree_leaves(call()):
            t.cpu()

    with pytest.raises(Exception) as caught:
        read()
    return Outcome(caught.type, str(caught.value))


def line_of(call: Any) -> str:
    return f"{__file__}:{call.__code__.co_firstlineno}"


@pytest.fixture(scope="module", name="s")
def _session() -> Iterator[lazygt.Session]:
    eager.update({name: outcome(call) for name, call in (CALLS | LATE).items()})
    with lazygt.session(launcher="inline") as s:
        yield s


eager: dict[str, Outcome] = {}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_call_raises_error_of_eager_torch(s: lazygt.Session, name: str) -> None:
    ours, theirs = outcome(CALLS[name]), eager[name]
    assert (ours.kind, ours.first_line) == (theirs.kind, theirs.first_line)
    if ours.is_named:
        assert ours.text.endswith(f"\n  at {line_of(CALLS[name])}")


@pytest.mark.parametrize("name", LATE)
def test_call_that_only_its_kernel_refuses(s: lazygt.Session, name: str) -> None:
    ours, theirs = outcome(LATE[name]), eager[name]
    assert issubclass(ours.kind, lazygt.ExecutionError)
    assert issubclass(ours.kind, theirs.kind)
    assert theirs.first_line in ours.first_line
    assert f"recorded at {line_of(LATE[name])}\n" in ours.text


def test_number_of_wrong_calls(s: lazygt.Session) -> None:
    assert (len(CALLS), len(LATE)) == (187, 28)
    # the others are refused by torch's own code above the device
    assert sum(outcome(call).is_named for call in CALLS.values()) == 131


def refused(call: Callable[[], Any], **settings: Any) -> str:
    with lazygt.session(**settings):
        return outcome(call).text


META_TEXT = "a and b must have same reduction dim, but got [3, 5] X [4, 2].\n  at "


def test_other_devices_keep_the_text_of_the_meta_kernel() -> None:
    text = refused(CALLS["mm"], launcher="dry", device="cuda")
    assert text == META_TEXT + line_of(CALLS["mm"])


def test_kernel_of_a_large_call_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_run, "_MAX_ELEMENTS", 3)
    text = refused(CALLS["cat"], launcher="inline")
    assert text.startswith("Sizes of tensors must match except in dimension 0. Expected 3 in dim")
    monkeypatch.setattr(meta_run, "_CHECK_FIRST", frozenset())
    assert refused(CALLS["mm"], launcher="inline").startswith(META_TEXT)


def test_operands_beyond_every_address_space_keep_the_text_of_the_meta_kernel() -> None:
    large = intern((1 << 40, 1 << 24), (1 << 24, 1), torch.float32)
    small = intern((3, 3), (3, 1), torch.float32)
    mm, metas = facts(torch.ops.aten.mm.default), {0: large, 1: small}
    assert meta_run.cpu_error(mm, (Ref(0), Ref(1)), (), metas, []) is None


def test_call_that_the_kernel_takes_is_refused_by_the_meta_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meta_run, "_zeros", lambda meta: torch.zeros(3, 3))
    assert refused(CALLS["mm"], launcher="inline").startswith(META_TEXT)


def test_handler_of_the_error_may_go_on() -> None:
    with lazygt.session(launcher="inline"):
        x = torch.ones(3, 3)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                x @ torch.ones(4, 2)
            x = x + 1
        assert x.sum().item() == 36


QUANTIZED = (
    "quantized tensors are not supported on device 'lazygt'. Quantize on the CPU: take the tensor "
    "there with .cpu() before, and .dequantize() what comes back before .to('lazygt'). Or stay "
    "here with torch.fake_quantize_per_tensor_affine, or with int8 tensors and a scale of your "
    "own: (x / scale).round().clamp(-128, 127).to(torch.int8)."
)
NESTED = (
    "nested tensors are not supported on device 'lazygt'. Pad them: "
    "torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) and a mask. Or make them on the "
    "CPU (device='cpu') of tensors taken there with .cpu()."
)
SPARSE = (
    "device 'lazygt' has dense strided tensors only, no sparse ones and none of mkldnn. Leave the "
    "tensor dense, or take it to the CPU with .cpu() before."
)
ANY = (
    "device 'lazygt' has dense strided tensors only, no sparse, quantized or nested ones. Make "
    "such a tensor on the CPU (device='cpu') and .to_dense() it before .to('lazygt')."
)


def cpu_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4, device="cpu"), 0.1, 0, torch.qint8)


#: name -> what is said, and a call
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "per tensor": (
        QUANTIZED, lambda: torch.quantize_per_tensor(f32(4), 0.1, 0, torch.qint8)),
    "per tensor, lazy scale": (
        QUANTIZED, lambda: torch.quantize_per_tensor(f32(4), f32(()), ints(), torch.quint8)),
    "per tensor, a list": (
        QUANTIZED, lambda: torch.quantize_per_tensor([f32(4)], f32(1), ints(1), torch.quint8)),
    "per channel": (
        QUANTIZED, lambda: torch.quantize_per_channel(f32(2, 4), f32(2), ints(2), 0, torch.qint8)),
    "dynamic": (
        QUANTIZED, lambda: torch.quantize_per_tensor_dynamic(f32(4), torch.qint8, False)),
    "and back": (
        QUANTIZED, lambda: torch.quantize_per_tensor(f32(4), 0.1, 0, torch.qint8).dequantize()),
    "of ints": (
        QUANTIZED, lambda: torch._make_per_tensor_quantized_tensor(
            ints(4, dtype=torch.int8), 0.1, 0)),
    "int_repr": (QUANTIZED, lambda: f32(4).int_repr()),
    "a quantized one": (QUANTIZED, lambda: cpu_quantized().to("lazygt")),
    "nested_tensor": (NESTED, lambda: torch.nested.nested_tensor([f32(2), f32(3)])),
    "as_nested_tensor": (NESTED, lambda: torch.nested.as_nested_tensor([f32(2), f32(3)])),
    "from a mask": (
        NESTED, lambda: torch._nested_tensor_from_mask(f32(2, 3, 4), f32(2, 3) >= 0)),
    "a nested one": (ANY, lambda: nested().to("lazygt")),
    "to_sparse": (SPARSE, lambda: f32(3, 3).to_sparse()),
    "to_sparse_csr": (SPARSE, lambda: f32(3, 3).to_sparse_csr()),
    "to_mkldnn": (SPARSE, lambda: f32(3, 3).to_mkldnn()),
    "a sparse one": (ANY, lambda: torch.ones(3, 3, device="cpu").to_sparse().to("lazygt")),
}  # fmt: skip


def nested() -> torch.Tensor:
    tensors = [torch.ones(2, device="cpu"), torch.ones(3, device="cpu")]
    return torch.nested.nested_tensor(tensors, device="cpu")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_ch:UserWarning")
@pytest.mark.parametrize("name", KINDS)
def test_tensors_of_other_kinds_are_refused_on_their_line(s: lazygt.Session, name: str) -> None:
    said, call = KINDS[name]
    ours = outcome(call)
    assert ours.kind is NotImplementedError
    assert ours.text.partition(": ")[2] == f"{said}\n  at {line_of(call)}"


@pytest.mark.skipif(NATIVE is not None, reason="the recorder in C++ takes jagged tensors")
def test_jagged_tensors_are_refused_by_the_recorder_in_python(s: lazygt.Session) -> None:
    def call() -> None:
        torch.nested.as_nested_tensor([f32(2), f32(3)], layout=torch.jagged)

    assert NESTED in outcome(call).text


def test_int8_arithmetic_that_the_refusal_names_runs() -> None:
    with lazygt.session(launcher="inline"):
        x, scale = torch.tensor([-1.0, 0.26, 20.0]), 0.1
        assert (x / scale).round().clamp(-128, 127).to(torch.int8).tolist() == [-10, 3, 127]
        fake = torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)
        assert fake.tolist() == pytest.approx([-1.0, 0.3, 12.7])
