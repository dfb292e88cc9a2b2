"""The wire: what is sent arrives, and what is not of the schema is refused as such."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

import lazygt
from lazygt.errors import ProtocolError
from lazygt.graph import Graph, Node, Ref
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.runtime import graph_codec, wire
from lazygt.runtime.messages import TO_CLIENT, Put, Run, Ship, Update
from lazygt.runtime.plan import Plan
from lazygt.runtime.wire import DeltaCodec, decode, encode
from lazygt.runtime.worker.worker import Worker
from tests.runtime import nonsense

META = intern((4,), contiguous_stride((4,)), torch.float32)
GRAPH = Graph((META,), (), (Node("aten.exp.default", (Ref(0),), (), (META,)),), (1,))


def ship(graph: Graph) -> list[bytes]:
    """The message that brings a plan."""
    template, sizes = Plan(graph).template, Plan(graph).sizes
    message = Ship(Plan(graph).digest, True, template.digest, sizes)
    return [bytes(frame) for frame in encode(message, [template.encoded])]


def messages() -> list[list[bytes]]:
    """A plan, and a run of it."""
    run = Run(1, Plan(GRAPH).digest, 10, (0, (7,)), None, (), [Put(7, META)], (), (10,))
    return [ship(GRAPH), [bytes(frame) for frame in encode(run, [bytes(16)])]]


def test_worker_runs_sent_plan() -> None:
    worker = Worker()
    plan, run = messages()
    assert worker.handle(list(plan)) == []
    [reply] = worker.handle(list(run))
    done = decode(reply, TO_CLIENT)
    assert done.seq == 1
    assert not done.failures
    assert torch.frombuffer(bytearray(reply[1]), dtype=torch.float32).tolist() == [1.0] * 4


def test_extensions_are_short_since_they_are_remembered() -> None:
    most = intern((1 << 62,) * 64, (1 << 62,) * 64, torch.float32, 1 << 62)
    assert wire.unpack(wire.pack(most), TensorMeta) == most
    before = len(wire._VALUES)
    for code in range(1, 8):
        with pytest.raises(ProtocolError, match="an extension of 4096 bytes; 2048 are the most"):
            wire.unpack(msgpack.encode(msgpack.Ext(code, bytes(4096))), TensorMeta)
    assert len(wire._VALUES) == before


@given(st.binary(max_size=200), st.binary(max_size=50))
def test_noise_is_refused(header: bytes, buffer: bytes) -> None:
    with pytest.raises(ProtocolError):
        Worker().handle([header, buffer])


@given(st.integers(0, 1), st.data())
def test_a_damaged_message_is_refused_or_harmless(which: int, data: st.DataObject) -> None:
    """A flipped byte raises ProtocolError, or changed nothing that the schema can see."""
    worker = Worker()
    plan, run = messages()
    if which == 1:
        worker.handle(list(plan))
    message = [bytearray(frame) for frame in (plan, run)[which]]
    frame = message[data.draw(st.integers(0, len(message) - 1))]
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    try:
        worker.handle([bytes(part) for part in message])
    except ProtocolError:
        assert len(worker.store) <= 1


ONE = intern((1,), (1,), torch.float32)


@pytest.mark.parametrize(
    ("graph", "match"),
    [
        (Graph((ONE,), (), (Node("aten.no_such_op.default", (Ref(0),), (), (ONE,)),), (1,)),
         "unknown op"),
        (Graph((ONE,), (), (Node("os.system.default", (Ref(0),), (), (ONE,)),), (1,)),
         "unknown op"),
        (Graph((ONE,), (), (Node("aten.exp.default", (Ref(5),), (), (ONE,)),), (1,)),
         "not defined before"),
    ],
)  # fmt: skip
def test_a_plan_that_breaks_the_rules_is_refused(graph: Graph, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        Worker().handle(nonsense.ship(graph_codec.encode_graph(graph)))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_codec, "VERSION", 99)
    encoded = graph_codec.encode_graph(GRAPH)
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match="version 99"):
        graph_codec.decode_graph(encoded)


def test_a_forgotten_plan_is_asked_for_and_sent_again() -> None:
    with lazygt.session(launcher="inline") as s:
        for _ in range(2):
            assert torch.ones(3).exp().sum().item() > 8
        s._link._worker.plans.executors.clear()
        if s._link._worker.known_runs is not None:
            s._link._worker.known_runs.forget()
        assert torch.ones(3).exp().sum().item() > 8
        stats = s.stats()
    assert stats["plans_sent"] == stats["plans_built"] + 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 9)), max_size=8))
def test_both_sides_predict_the_same_ids(runs: list[tuple[list[int], int]]) -> None:
    ours, theirs, base = DeltaCodec(), DeltaCodec(), 0
    for ids, step in runs:
        base += step
        update = wire.unpack(wire.pack(ours.encode(ids, base)), Update | None)
        assert theirs.decode(update, base) == ids
        assert ours.moving == theirs.moving


def test_a_steady_loop_sends_no_ids() -> None:
    prediction = DeltaCodec()
    updates = [prediction.encode([3, 10 + 5 * k, 11 + 5 * k], 15 + 5 * k) for k in range(5)]
    assert updates[2:] == [None, None, None]
