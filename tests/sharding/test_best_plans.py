"""Small programs whose best plan is known: what ranks send, and that the numbers are right.

Bytes are those that a rank sends around a ring. ``S(d)`` of a tensor is how it lies before,
``place`` says how a result is wanted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.best import (
    PARTIAL,
    PRODUCT,
    Place,
    Programs,
    R,
    S,
    check_numbers,
    draw,
    moved,
    reduced,
    sent,
    weight,
    whole_numbers,
)

Tensor = torch.Tensor

KNOWN = Programs()
known = KNOWN.known

MADE = 256 * 256 * 4
COLUMNS = 256 * 4

# -- behind what is wanted in blocks ------------------------------------------------------------


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n))
def relu_of_a_sum(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.relu(a @ b), S(0))


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n), fixed=True)
def relu_of_a_fixed_sum(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.relu(a @ b), S(0))


@known((*PRODUCT, draw(256, 256)), (*PARTIAL, R), lambda n: sent(MADE, n))
def product_with_a_value(place: Place, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return place(torch.tanh(a @ b) * c, S(1))


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n))
def cast_of_a_sum(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.relu(a @ b).double(), S(0))


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n))
def rows_added_up(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.relu(a @ b).sum(1), S(0))


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n))
def rows_sorted(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place((a @ b).sort(1).values, S(0))


@known(PRODUCT, PARTIAL, lambda n: sent(MADE, n))
def softmax_of_a_sum(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.softmax(a @ b, -1), S(0))


def clipped(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient)
    return gradient * (1.0 / (norm + 1e-6)).clamp(max=1.0)


@known((draw(1024, 512), draw(512, 1024)), PARTIAL, lambda n: sent(1 << 22, n) + reduced(4, n))
def clipped_gradient(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(clipped(a @ b), S(0))


@known(
    (whole_numbers(4096, 8192), draw(8192, 256)),
    (S(0), S(0)),
    lambda n: sent(1 << 22, n) + reduced(4, n),
)
def clipped_gradient_of_a_table(place: Place, tokens: Tensor, gradient: Tensor) -> Tensor:
    table = torch.ops.aten.embedding_dense_backward(gradient, tokens, 4096, -1, False)
    return place(clipped(table), S(0))


# -- whole, because it is small there -----------------------------------------------------------


@known((draw(1, 1024), draw(1024, 1024)), (S(1), S(0)), lambda n: sent(4096, n))
def a_small_operand_expanded(place: Place, small: Tensor, x: Tensor) -> Tensor:
    return x + torch.relu(small).expand(1024, 1024)


@known((draw(1024), draw(1024, seed=1)), (S(0), R), lambda n: sent(4096, n))
def a_column_broadcast(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.relu(a[:, None] + b[None]), R)


@known((whole_numbers(1000, 512),), (S(0),), lambda n: sent(512 * 8, n))
def one_of_many(place: Place, tokens: Tensor) -> Tensor:
    return place(F.one_hot(tokens, 1000).float(), R)


@known((draw(2048), draw(2048, seed=1)), (S(0), S(0)), lambda n: 2 * sent(2048 * 4, n))
def all_pairs(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.exp(-(a[:, None] - b[None]).square()), R)


@known((draw(64), draw(1024, 64)), (S(0), R), lambda n: sent(256, n))
def a_row_broadcast(place: Place, small: Tensor, x: Tensor) -> Tensor:
    return place(torch.sigmoid(torch.relu(small) * x), R)


@known((draw(4096, 256), weight(256, 256)), (S(0), S(0)), lambda n: 2 * sent(MADE, n))
def a_weight_of_two_products(place: Place, x: Tensor, w: Tensor) -> Any:
    y = torch.relu(x @ w.t()) @ w.t()
    return place(torch.autograd.grad(y.square().sum(), [w])[0], S(0))


@known(
    (draw(8192, 256).requires_grad_(), weight(256, 256)), (S(0), S(0)), lambda n: 2 * sent(MADE, n)
)
def a_weight_forward_and_backward(place: Place, x: Tensor, w: Tensor) -> Any:
    of_x, of_w = torch.autograd.grad(torch.tanh(x @ w.t()).square().sum(), [x, w])
    return of_x, place(of_w, S(0))


# -- numbers and partial sums -------------------------------------------------------------------

MASK = draw(256, 256, seed=7) > 0


@known((*PRODUCT, MASK), (*PARTIAL, R), lambda n: reduced(COLUMNS, n))
def a_number_filled_in(place: Place, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return (a @ b).masked_fill(mask, 0.5).sum(0)


@known((*PRODUCT, MASK), (*PARTIAL, R), lambda n: reduced(COLUMNS, n))
def nothing_filled_in(place: Place, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return (a @ b).masked_fill(mask, 0).sum(0)


@known(PRODUCT, PARTIAL, lambda n: reduced(COLUMNS, n))
def a_number_added(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return (2 + (a @ b) - 0.5).sum(0)


@known(PRODUCT, PARTIAL, lambda n: reduced(COLUMNS, n))
def a_number_less_a_sum(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return (1.0 - (a @ b)).sum(0)


@known(PRODUCT, PARTIAL, lambda n: reduced(COLUMNS + 8, n))
def a_number_around(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return F.pad(a @ b, (1, 1), value=2.0).sum(0)


@known((*PRODUCT, MASK), (*PARTIAL, R), lambda n: reduced(COLUMNS, n))
def numbers_in_place(place: Place, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    return (a @ b).masked_fill_(mask, 0.25).add_(2.0).sub_(1).sum(0)


# -- losses of logits that are cut by words -----------------------------------------------------

TOKENS, WORDS = 512, 4096
LOGITS = (weight(TOKENS, WORDS), whole_numbers(WORDS, TOKENS))
OF_TOKENS = TOKENS * 4


def with_gradient(loss: Tensor, *of: Tensor) -> Any:
    return loss, *torch.autograd.grad(loss, of)


@known(LOGITS, (S(1), R), lambda n: reduced(3 * OF_TOKENS + 4, n))
def cross_entropy(place: Place, logits: Tensor, target: Tensor) -> Any:
    return with_gradient(F.cross_entropy(logits, target), logits)


@known(LOGITS, (S(1), R), lambda n: reduced(4 * OF_TOKENS + 4, n))
def cross_entropy_smoothed(place: Place, logits: Tensor, target: Tensor) -> Any:
    return with_gradient(F.cross_entropy(logits, target, label_smoothing=0.1), logits)


@known(LOGITS, (S(1), R), lambda n: reduced(3 * OF_TOKENS + 4, n))
def cross_entropy_added_up(place: Place, logits: Tensor, target: Tensor) -> Any:
    return with_gradient(F.cross_entropy(logits, target, ignore_index=7, reduction="sum"), logits)


@known(LOGITS, (S(1), R), lambda n: reduced(3 * OF_TOKENS + 4, n))
def cross_entropy_and_z_loss(place: Place, logits: Tensor, target: Tensor) -> Any:
    z = torch.logsumexp(logits, -1).square().mean()
    return with_gradient(F.cross_entropy(logits, target) + 1e-4 * z, logits)


# -- once -------------------------------------------------------------------------------------


@known((draw(2048, 2048),), (S(0),), lambda n: reduced(8192, n))
def a_sum_made_twice(place: Place, x: Tensor) -> Tensor:
    return torch.tanh(x.sum(0)).sum() + torch.exp(-x.sum(0)).sum()


@known((draw(2048, 2048),), (S(0),), lambda n: reduced(2 * 8192, n))
def a_mean_and_a_deviation(place: Place, x: Tensor) -> Tensor:
    return ((x - x.mean(0)) / x.std(0)).sum(1)


# -- by exchange, not by gathering --------------------------------------------------------------

ROWS = (draw(1024, 512),)
OF_ROWS = 1024 * 512 * 4


@known(ROWS, (S(0),), lambda n: moved(OF_ROWS, n))
def sorted_along(place: Place, x: Tensor) -> Tensor:
    return x.sort(0).values


@known(ROWS, (S(0),), lambda n: moved(OF_ROWS, n))
def median_along(place: Place, x: Tensor) -> Tensor:
    return x.median(0).values


@known(ROWS, (S(0),), lambda n: moved(OF_ROWS, n))
def kthvalue_along(place: Place, x: Tensor) -> Tensor:
    return x.kthvalue(5, 0).values


@known((draw(1 << 16),), (S(0),), lambda n: sent(n * 10 * 12, n))
def a_few_of_the_smallest(place: Place, x: Tensor) -> Tensor:
    return x.kthvalue(10).values


@known(ROWS, (S(0),), lambda n: moved(OF_ROWS, n) + reduced(4, n))
def many_of_the_largest_along(place: Place, x: Tensor) -> Tensor:
    return x.topk(512, 0).values.sum()


@known(ROWS, (S(0),), lambda n: moved(OF_ROWS, n))
def quantile_along(place: Place, x: Tensor) -> Tensor:
    return torch.quantile(x, 0.3, dim=0)


@known((draw(1024, 256), draw(1024, 256, seed=1)), (S(0), S(0)), lambda n: reduced(COLUMNS, n))
def rows_joined(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(torch.cat([a, b])).sum(0)


@known(
    (draw(1024, 256), draw(1024, 256, seed=1)),
    (S(0), S(0)),
    lambda n: 2048 * 256 * 4 / n / 2,
)
def rows_joined_in_blocks(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.cat([a, b]), S(0))


@known((draw(2048, 256), draw(512, 256), draw(512, 256, seed=1)), (R, S(0), S(0)), lambda n: 0)
def weights_side_by_side(place: Place, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    a, b = (x @ torch.cat([gate, up]).t()).chunk(2, -1)
    return F.silu(a) * b


@known((draw(2048, 256), draw(512, 256), draw(512, 256, seed=1)), (R, S(0), S(0)), lambda n: 0)
def weights_side_by_side_sliced(place: Place, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    both = x @ torch.cat([gate, up]).t()
    return F.silu(both[:, :512]) * both[:, 512:]


@known(
    (draw(4, 256, 256), draw(768, 256), draw(256, 256)),
    (R, S(0), S(1)),
    lambda n: 2 * moved(1024 * 768 * 4, n) + reduced(1024 * 256 * 4, n),
)
def heads_of_a_packed_weight(place: Place, x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    parts = (x @ qkv.t()).split(256, -1)
    query, key, value = (each.unflatten(-1, (8, 32)).transpose(1, 2) for each in parts)
    mixed = F.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(1, 2).flatten(2) @ out.t()


@known((draw(256, 1024),), (S(1),), lambda n: reduced(4, n))
def all_elements_in_a_row(place: Place, x: Tensor) -> Tensor:
    return torch.relu(x.reshape(-1)).sum()


@known((draw(256, 1024),), (S(1),), lambda n: moved(256 * 1024 * 4, n))
def all_elements_in_a_row_in_blocks(place: Place, x: Tensor) -> Tensor:
    return place(x.reshape(-1), S(0))


# -- rows that other ranks lack, from the ranks that have them ------------------------------------

LONG = (draw(4096, 256),)
ROW = 256 * 4


@known(LONG, (S(0),), lambda n: ROW)
def rolled(place: Place, x: Tensor) -> Tensor:
    return x.roll(1, 0)


@known(LONG, (S(0),), lambda n: 3 * ROW)
def rolled_back(place: Place, x: Tensor) -> Tensor:
    return x.roll(-3, 0)


@known(LONG, (S(0),), lambda n: 1024 * ROW if n == 4 else 512 * ROW if n == 8 else 1500 * ROW)
def rolled_far(place: Place, x: Tensor) -> Tensor:
    return x.roll((1500, 7), (0, 1))


@known(LONG, (S(0),), lambda n: 2 * ROW)
def rolled_both_ways(place: Place, x: Tensor) -> Tensor:
    return x.roll(1, 0) + x.roll(-1, 0) - 2 * x


@known((draw(4095, 256),), (S(0),), lambda n: 4096 * ROW / n)
def turned_round(place: Place, x: Tensor) -> Tensor:
    return place(x.flip(0), S(0))


@known(LONG, (S(0),), lambda n: ROW)
def differences(place: Place, x: Tensor) -> Tensor:
    return x[1:] - x[:-1]


@known(LONG, (S(0),), lambda n: ROW + reduced(4, n))
def squares_of_differences(place: Place, x: Tensor) -> Tensor:
    return torch.diff(x, dim=0).square().sum()


@known(LONG, (S(0),), lambda n: 2 * ROW)
def second_differences(place: Place, x: Tensor) -> Tensor:
    return torch.diff(x, n=2, dim=0)


@known(LONG, (S(0),), lambda n: 2 * ROW)
def every_third_row(place: Place, x: Tensor) -> Tensor:
    return x[::3].relu()


@known((draw(4, 1024, 64).requires_grad_(),), (S(1),), lambda n: 2 * 4 * 64 * 4 + reduced(4, n))
def the_place_before(place: Place, x: Tensor) -> Any:
    loss = (x - F.pad(x, (0, 0, 1, -1))).square().sum()
    return loss, *torch.autograd.grad(loss, [x])


@known((draw(1, 1, 64), draw(8, 256, 64)), (R, S(1)), lambda n: 8 * 64 * 4)
def one_place_more(place: Place, token: Tensor, x: Tensor) -> Tensor:
    return place(torch.cat([token.expand(8, 1, 64), x], 1), S(1))


@known((draw(1024, 256), draw(512, 256)), (S(0), S(0)), lambda n: 1536 * ROW / n)
def unequal_rows_joined_in_blocks(place: Place, a: Tensor, b: Tensor) -> Tensor:
    return place(torch.cat([a, b]), S(0))


@known(LONG, (S(0),), lambda n: 4096 * ROW / n)
def unequal_pieces_in_blocks(place: Place, x: Tensor) -> Any:
    a, b = x.split([1200, 2896])
    return place(a, S(0)), place(b, S(0))


PICTURES = draw(2, 8, 64, 64)
PICTURE_ROWS = 2 * 8 * 64 * 4


@known((PICTURES, draw(16, 8, 3, 3)), (S(2), R), lambda n: (1 if n == 2 else 2) * PICTURE_ROWS)
def convolution_of_rows(place: Place, x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


@known(
    (PICTURES.clone().requires_grad_(), weight(16, 8, 3, 3)),
    (S(2), R),
    lambda n: 2 * 3 * PICTURE_ROWS + reduced(16 * 72 * 4, n),
)
def convolution_of_rows_trained(place: Place, x: Tensor, w: Tensor) -> Any:
    y = F.conv2d(x, w, padding=1)
    return y, *torch.autograd.grad(y.square().sum(), [x, w])


@known((draw(2, 64, 4096), draw(64, 1, 4)), (S(2), R), lambda n: 2 * 64 * 3 * 4)
def convolution_of_what_was_before(place: Place, x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (3, 0)), w, groups=64)


@known((PICTURES,), (S(2),), lambda n: 0)
def maxima_of_rows(place: Place, x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


@known((PICTURES.clone().requires_grad_(),), (S(2),), lambda n: 0)
def maxima_of_rows_trained(place: Place, x: Tensor) -> Any:
    y = F.max_pool2d(x, 2)
    return y, *torch.autograd.grad(y, [x], torch.ones_like(y))


@known((PICTURES.clone().requires_grad_(),), (S(3),), lambda n: 2 * PICTURE_ROWS)
def maxima_of_columns_that_overlap(place: Place, x: Tensor) -> Any:
    y = F.max_pool2d(x, 3, 2, 1)
    return y, *torch.autograd.grad(y.square().sum(), [x])


@known((PICTURES,), (S(2),), lambda n: 0)  # the first rank mirrors rows of its own
def mirrored_rows(place: Place, x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="reflect")


@known(LONG, (S(0),), lambda n: ROW)
def windows_of_rows(place: Place, x: Tensor) -> Tensor:
    return x.unfold(0, 4, 1).mean(-1)


@known((PICTURES,), (S(2),), lambda n: (1 if n == 2 else 2) * PICTURE_ROWS)
def averages_of_rows(place: Place, x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1)


@known((PICTURES, draw(8, 4, 4, 4)), (S(2), R), lambda n: (1 if n == 2 else 2) * PICTURE_ROWS)
def picture_made_larger_by_a_convolution(place: Place, x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, stride=2, padding=1)


@known((PICTURES,), (S(2),), lambda n: 0)
def rows_repeated(place: Place, x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


@known((PICTURES,), (S(2),), lambda n: (1 if n == 2 else 2) * PICTURE_ROWS)
def picture_made_smoothly_larger(place: Place, x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


# -- attention along a cut sequence -----------------------------------------------------------

#: batch, heads, length, features of a head
QUERIES = draw(1, 8, 512, 16)
HEADS = tuple(draw(1, 8, 512, 16, seed=seed).requires_grad_() for seed in (1, 2, 3))
_ALL = QUERIES.nbytes


@known(HEADS, (S(2), S(2), S(2)), lambda n: 4 * moved(_ALL, n))
def attention_of_a_cut_sequence(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return place(F.scaled_dot_product_attention(q, k, v, is_causal=True), S(2))


@known(HEADS, (S(2), S(2), S(2)), lambda n: 8 * moved(_ALL, n))
def attention_of_a_cut_sequence_trained(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Any:
    y = place(F.scaled_dot_product_attention(q, k, v, is_causal=True), S(2))
    made = torch.autograd.grad(y.square().sum(), [q, k, v])
    return y, *[place(gradient, S(2)) for gradient in made]


@known(HEADS, (S(2), S(2), S(2)), lambda n: 8 * moved(_ALL, n))
def attention_without_a_mask_trained(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Any:
    y = place(F.scaled_dot_product_attention(q, k, v), S(2))
    made = torch.autograd.grad(y.square().sum(), [q, k, v])
    return y, *[place(gradient, S(2)) for gradient in made]


def repeated(keys: Tensor, times: int) -> Tensor:
    """As transformers' models repeat the keys that heads share."""
    batch, heads, length, size = keys.shape
    wide = keys[:, :, None].expand(batch, heads, times, length, size)
    return wide.reshape(batch, heads * times, length, size)


#: Keys of 8 heads, for 16 heads of queries: exchanged before they are repeated.
FEWER = (draw(1, 16, 1024, 16), *(draw(1, 8, 1024, 16, seed=seed) for seed in (1, 2)))


@known(FEWER, (S(2), S(2), S(2)), lambda n: 3 * moved(FEWER[0].nbytes, n))
def attention_of_repeated_keys(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return place(F.scaled_dot_product_attention(q, repeated(k, 2), repeated(v, 2)), S(2))


#: Of 16 heads four share a key: to gather the keys and scatter their gradients is less than to
#: exchange heads.
SHARED = (
    draw(1, 16, 512, 16).requires_grad_(),
    *(draw(1, 4, 512, 16, seed=seed).requires_grad_() for seed in (1, 2)),
)
_KEYS = 2 * SHARED[1].nbytes


@known(SHARED, (S(2), S(2), S(2)), lambda n: 2 * sent(_KEYS, n))
def attention_of_shared_keys(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Any:
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    y = place(mixed, S(2))
    made = torch.autograd.grad(y.square().sum(), [q, k, v])
    return y, *[place(gradient, S(2)) for gradient in made]


# -- the tests ----------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", KNOWN)
def test_ranks_send_no_more_than_they_have_to(name: str, ranks: int) -> None:
    KNOWN.check_bytes(name, ranks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_are_those_of_one_device(name: str, ranks: int) -> None:
    check_numbers(KNOWN.program(name), ranks, 1e-3)
