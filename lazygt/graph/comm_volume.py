"""Communication volume of a transformer's training step, by kind of parallelism.

    data        gradients all-reduced                                   P
      ZeRO-1/2  gradients reduce-scattered, new weights gathered        2 P
      ZeRO-3    (FSDP) weights gathered for the forward and, unless they stay gathered, again for
                the backward, gradients reduce-scattered                3 P, or 2 P
    tensor      (Megatron) 2 all-reduces a layer forward, 2 backward    4 B S H a layer
      sequence  each of them a reduce-scatter and an all-gather         8 B S H a layer
    pipeline    sent to the next stage, and gradients back              B S H a boundary, each way
    context
      ring      keys and values sent around, forward and backward, and
                their gradients returned (Liu et al., 2023)             6 B S V a layer
      Ulysses   queries, keys, values and results exchanged,
                forward and backward (Jacobs et al., 2023)              4 B S (H + V) a layer
    expert      all-to-all there and back, forward and backward         4 K B S H a layer

The figures follow from the model's sizes, without a program. P: the parameters' bytes. B: sequences
that one replica computes at once, S: their length, H: the hidden size, V: the width of a token's
keys (H, or less if heads share keys), K: experts a token. B x S x H is a number of elements, which
the dtype's itemsize turns into bytes.

A step of M microbatches exchanges activations M times. Each rank accumulates its gradients, which
are reduced once, unless gradients or weights are sharded (ZeRO-2 and 3): then each microbatch
gathers the weights and scatters its gradients. Ranks along the context have the same weights, and
reduce gradients together with the ranks of data.

*Logical* is the payload. ``graph.collectives.ring_bytes`` gives the bytes that the ranks of a ring
send for it: 2 (N - 1) / N of an all-reduce's payload, (N - 1) / N of a gather's, a scatter's or an
exchange's, and the whole payload from one rank to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lazygt.graph.collectives import ring_bytes, ring_limit

DATA, TENSOR, PIPELINE, CONTEXT, EXPERT = "data", "tensor", "pipeline", "context", "expert"
#: Names of mesh axes for each kind of parallelism.
_AXES = {
    DATA: "data dp ddp fsdp batch replica replicate shard",
    TENSOR: "model tensor tp mp",
    PIPELINE: "stage stages pipeline pipe pp",
    CONTEXT: "context sequence seq cp sp",
    EXPERT: "expert experts ep",
}
_BY_AXIS = {axis: kind for kind, axes in _AXES.items() for axis in axes.split()}
_GATHER, _SCATTER, _REDUCE = "all_gather", "reduce_scatter", "all_reduce"
_EXCHANGE, _SEND = "all_to_all", "send_recv"
#: Algorithms of attention over keys on several ranks.
RING, ULYSSES = "ring", "ulysses"


def parallelism_of(axis: str) -> str:
    """Return the kind of parallelism that an axis' name stands for; "" for an unknown name."""
    return _BY_AXIS.get(axis.lower(), "")


class Volume(NamedTuple):
    """Collectives of one kind in one step."""

    parallelism: str  # the kind that they belong to
    ranks: int  # the number that meet
    kind: str  # as in ``Communication``
    what: str  # the sent values, in words
    times: int  # number of collectives in the model
    elements: int  # elements of each collective's full payload
    itemsize: int  # bytes of an element
    rank_elements: int  # elements of all payloads that one rank participates in

    @property
    def logical(self) -> int:
        """Bytes of all payloads."""
        return self.times * self.elements * self.itemsize

    @property
    def limit(self) -> int:
        """Bytes in a ring of very many ranks, which is the rule of thumb: 2 P for an all-reduce."""
        return ring_limit(self.kind, self.logical)

    @property
    def ring(self) -> int:
        """Bytes that one rank sends."""
        return round(ring_bytes(self.kind, self.rank_elements * self.itemsize, self.ranks))


@dataclass(frozen=True, slots=True)
class TransformerStep:
    """A training step, in numbers."""

    params: int  # number of parameters of the model
    itemsize: int  # bytes of a parameter, and of a gradient
    activation_itemsize: int  # bytes of an element of an activation
    #: data, tensor, pipeline, context, expert: number of ranks of each kind; experts are on ranks
    #: of ``data``
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    zero: int = 0  # 0: all is replicated; 1 and 2: optimizer and gradients sharded; 3: weights, too
    reshard: bool = True  # under ZeRO-3 weights are gathered again for the backward
    sequence_parallel: bool = False  # activations between tensor-parallel layers are sharded
    layers: int = 0  # layers, hidden, batch, sequence: see above; 0: not known
    hidden: int = 0
    batch: int = 0
    sequence: int = 0
    experts_per_token: int = 1  # K
    microbatches: int = 1  # M, each of ``batch`` sequences
    context: int = 1
    attention: str = RING  # ``ring`` or ``ulysses``, between ranks of ``context``
    kv_hidden: int = 0  # V; 0: as much as H

    def volumes(self) -> tuple[Volume, ...]:
        """Return the exchanged volumes, kind by kind; nothing for a kind of one rank."""
        return (*self._data(), *self._tensor(), *self._pipeline(), *self._context(),
                *self._expert())  # fmt: skip

    @property
    def activation(self) -> int:
        """Elements: B x S x H."""
        return self.batch * self.sequence * self.hidden

    @property
    def keys(self) -> int:
        """Elements of all keys: B x S x V."""
        return self.batch * self.sequence * (self.kv_hidden or self.hidden)

    def _data(self) -> Iterator[Volume]:
        """Yield the volumes of data parallelism."""
        ranks = self.data * self.context
        if ranks == 1:
            return
        rank_params = -(-self.params // (self.tensor * self.pipeline))
        for kind, name, times in self._state_collectives():
            yield Volume(
                DATA, ranks, kind, name, times, self.params, self.itemsize, times * rank_params
            )

    def _state_collectives(self) -> Iterator[tuple[str, str, int]]:
        """Yield (kind, name of the sent values, times a step) of gradients and weights."""
        if self.zero == 0:
            yield _REDUCE, "gradients", 1
            return
        if self.zero == 3:
            yield _GATHER, "weights, forward", self.microbatches
            if self.reshard:
                yield _GATHER, "weights, backward", self.microbatches
        yield _SCATTER, "gradients", self.microbatches if self.zero > 1 else 1
        if self.zero < 3:
            yield _GATHER, "new weights", 1

    def _tensor(self) -> Iterator[Volume]:
        """Yield the volumes of tensor parallelism."""
        if self.tensor == 1:
            return
        kinds = (_SCATTER, _GATHER) if self.sequence_parallel else (_REDUCE,)
        for direction in ("forward", "backward"):
            for kind in kinds:
                yield self._layers(
                    TENSOR, self.tensor, kind, f"activations, {direction}", 2, self.activation
                )

    def _expert(self) -> Iterator[Volume]:
        """Yield the volumes of expert parallelism."""
        if self.expert == 1:
            return
        tokens = self.experts_per_token * self.activation
        for direction in ("forward", "backward"):
            yield self._layers(EXPERT, self.expert, _EXCHANGE, f"tokens, {direction}", 2, tokens)

    def _context(self) -> Iterator[Volume]:
        """Yield the volumes of context parallelism."""
        if self.context == 1:
            return
        if self.attention == ULYSSES:
            for direction in ("forward", "backward"):
                for name, elements in (("queries, results", self.activation),
                                       ("keys, values", self.keys)):  # fmt: skip
                    yield self._layers(
                        CONTEXT, self.context, _EXCHANGE, f"{name}, {direction}", 2, elements
                    )
            return
        for name in ("keys, values, forward", "keys, values, backward", "their gradients"):
            volume = self._layers(CONTEXT, self.context, _SEND, name, 2, self.keys)
            # a rank forwards every block but one around the ring
            yield volume._replace(rank_elements=volume.rank_elements * (self.context - 1))

    def _layers(
        self, parallelism: str, ranks: int, kind: str, name: str, times: int, elements: int
    ) -> Volume:
        """Return the volume of ``times`` collectives in each layer."""
        rank_layers = -(-self.layers // self.pipeline)
        return Volume(
            parallelism, ranks, kind, name, times * self.layers * self.microbatches, elements,
            self.activation_itemsize,
            times * rank_layers * self.microbatches * -(-elements // self.context),
        )  # fmt: skip

    def _pipeline(self) -> Iterator[Volume]:
        """Yield the volumes of pipeline parallelism."""
        if self.pipeline == 1:
            return
        for name in ("activations, forward", "gradients, backward"):
            yield Volume(
                PIPELINE, self.pipeline, _SEND, name, (self.pipeline - 1) * self.microbatches,
                self.activation, self.activation_itemsize,
                self.microbatches * -(-self.activation // self.context),
            )  # fmt: skip
