"""What makes no sense is refused, and with one error: ProtocolError."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lazygt
from lazygt.errors import ProtocolError
from lazygt.graph.meta import contiguous_stride, intern
from lazygt.runtime import graph_codec, wire
from lazygt.runtime.messages import (
    TO_CLIENT,
    TO_WORKER,
    Done,
    Failure,
    Fetched,
    Left,
    Made,
    Message,
    Need,
    Plain,
    Put,
    Relaid,
    Renew,
    Reply,
    Run,
    Several,
    Ship,
    Swap,
    Swapped,
    Timings,
    Write,
    Wrote,
)
from lazygt.runtime.wire import decode, encode
from lazygt.runtime.worker.inline import InlineLink
from lazygt.runtime.worker.worker import Worker
from tests.runtime import nonsense
from tests.support.timeouts import DEEP

META = intern((4,), contiguous_stride((4,)), torch.float32)
GAPS = intern((4,), (2,), torch.float32)
NAME = bytes(range(16))

EVERY: tuple[Message, ...] = (
    Ship(NAME, False, NAME), Ship(NAME, True, NAME, (7, 3), (NAME,), NAME),
    Run(1), Run(2, NAME, 9, (0, (1, 2)), (1, (0, 5)), (0.5, True, 1 + 2j), [Put(1, META, 64)], (7,),
                (9,), True),
    Swap(NAME, ((0, "key"),)), Write(-3, ["a", [], None]), Renew(1, 0),
    Done(1),
    Done(2, [Failure(0, "ValueError", "so")], [4], [Fetched(META), Failure(1, "x", "y", 2)],
         Reply((Made(META, 1), Several((Plain(2.5), Plain())))),
         Timings(1, 2, ((0, 1, 1, 2),))),
    Done(3, reply=Reply(failure=Failure(-1, "KeyError", "", 3))),
    Need(0, NAME), Swapped(NAME), Swapped(NAME, "why"), Wrote(1, (2**64 - 1,), "", (b"handle",)),
    Left(0), Relaid(NAME, ((0, 1, (3, -1)),)),
)  # fmt: skip


@pytest.mark.parametrize("message", EVERY, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was(message: Message) -> None:
    assert decode(encode(message), (*TO_WORKER, *TO_CLIENT)) == message


def test_decoder_refuses_messages_of_other_direction() -> None:
    for message in EVERY:
        other = TO_CLIENT if isinstance(message, TO_WORKER) else TO_WORKER
        with pytest.raises(ProtocolError, match="unknown message kind"):
            decode(encode(message), other)


@pytest.mark.parametrize(
    ("make", "count"), [(nonsense.to_workers, 800), (nonsense.to_clients, 250 if DEEP else 40)]
)
def test_changed_messages_are_understood_or_refused(
    make: Callable[[int, random.Random], Iterator[Callable[[], object]]], count: int
) -> None:
    found = {"refused": 0, "understood": 0}
    for call in make(count, random.Random(0)):
        what = nonsense.outcome(call)
        assert what in found, call.message  # type: ignore[attr-defined]
        found[what] += 1
    assert min(found.values()) > count // 20, "both happen"


# -- a worker that answers nonsense ------------------------------------------------------------


class Answering(InlineLink):
    """Answers in place of its worker, once there is something to answer."""

    def __init__(self, answer: list[Any]) -> None:
        super().__init__(Worker(inline=True))
        self.answer = answer

    def receive(self, timeout: float | None, wake_fd: int | None = None) -> Any:
        found = super().receive(timeout, wake_fd)
        return found and (0, [memoryview(bytes(frame)) for frame in self.answer])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (encode(Done(99)), "answers run 99, which it was not asked"),
        (encode(Done(1)), "0 values came instead of 1"),
        (encode(Done(1, fetched=[Fetched(META)])), "came without its bytes"),
        (encode(Done(1, fetched=[Fetched(META)]), [bytes(15)]), "came without its bytes"),
        (encode(Done(1, fetched=[Fetched(META)]), [bytes(16), b""]), "belong to no value"),
        (encode(Done(1, fetched=[Fetched(GAPS)]), [bytes(16)]), "has gaps"),
        (encode(Done(1, fetched=[Fetched(META, 4096)])), "there is none"),
        (encode(Done(1, [Failure(9, "E", "e", 1)], [], [Fetched(META)]), [bytes(16)]), "step 9"),
        (encode(Done(1, [], [64], [Fetched(META)]), [bytes(16)]), "nothing lies in shared memory"),
        (encode(Need(1, NAME)), "plan that was never sent"),
        (encode(Left(3)), "left process group 3"),
        (encode(Run(1)), "unknown message kind 2"),
        ([wire.pack((3,))], "not a Done message"),
        ([wire.pack((3, 1, "x"))], "not a Done message"),
        ([wire.pack({3: 1})], "unknown message kind None"),
        ([b""], "not a message"),
        ([], "unknown message kind None"),
    ],
)
def test_a_worker_that_answers_nonsense_is_not_asked_again(answer: list[Any], said: str) -> None:
    told = raised(answer)
    assert len(told) == 3
    assert all("worker 0 sent what makes no sense" in text and said in text for text in told)


def raised(answer: list[Any]) -> list[str]:
    """What a session says when it reads a value, does so again, and ends."""
    told = []
    try:
        with nonsense.opened(Answering(answer)):
            x = torch.ones(4) + 1
            for _ in range(2):
                try:
                    x.tolist()
                except ProtocolError as error:
                    told.append(str(error))
    except ProtocolError as error:
        told.append(str(error))
    return told


def test_a_reply_of_another_op_is_refused() -> None:
    class Alternative(InlineLink):
        def receive(self, timeout: float | None, wake_fd: int | None = None) -> Any:
            found = super().receive(timeout, wake_fd)
            if found is None:
                return None
            done = decode(found[1], TO_CLIENT)
            assert isinstance(done, Done)
            done.reply = done.reply and Reply((Plain(1), Plain(2)))
            return 0, [memoryview(frame) for frame in encode(done, found[1][1:])]

    with (
        pytest.raises(ProtocolError, match=r"other results than aten\.nonzero"),
        nonsense.opened(Alternative(Worker(inline=True))),
    ):
        torch.ones(3).nonzero()


# -- a client that sends nonsense --------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (encode(Run(1, puts=[Put(1, META)])), "without its bytes"),
        (encode(Run(1, puts=[Put(1, GAPS)]), [bytes(28)]), "has gaps"),
        (encode(Run(1, puts=[Put(1, META, 4096)])), "there is none"),
        ([wire.pack((2, 1, b"short"))], "not a Run message"),
        ([wire.pack((2, 1, NAME, 0, (2, ())))], "not a Run message"),
        ([wire.pack((2, 1, NAME, 0, (0, (-1,))))], "not a Run message"),
        ([wire.pack((1, NAME, True, NAME, ([],))), b""], "not a Ship message"),
        ([wire.pack((5, NAME, ((0, 7),)))], "not a Swap message"),
        ([wire.pack((7,))], "not a Write message"),
        (encode(Ship(NAME, True, NAME)), "plan's content does not match its name"),
        (
            encode(Ship(graph_codec.plan_name(NAME, ()), True, NAME), [b"else"]),
            "template's content does not match its name",
        ),
    ],
)
def test_a_client_that_sends_nonsense_is_told(message: list[Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        Worker().handle(message)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (("aten.exp.default", (wire.Ref(0),), (("import os", 1),), (META,), (), (), False, None),
         "no name of an argument"),
        (("aten.exp.default", ({1: 2},), (), (META,), (), (), False, None), "takes no dict"),
        (("aten.exp.default", (wire.Ref(0),), (), ("f32",), (), (), False, None), "not a graph"),
        (("aten.exp.default", (wire.Ref(0),), (), (META,), (-1,), (), False, None), "not a graph"),
        (("aten.exp.default", (wire.Ref(0),), (), (META,), (), (), 0, None), "not a graph"),
        (("aten.exp.default", wire.Ref(0), (), (META,), (), (), False, None), "not a graph"),
    ],
)  # fmt: skip
def test_a_plan_of_nonsense_is_refused(node: Any, said: str) -> None:
    graph = wire.pack((graph_codec.VERSION, (META,), (), (node,), (1,)))
    with pytest.raises(ProtocolError, match=said):
        Worker().handle(nonsense.ship(graph))


def test_ids_that_do_not_fit_the_list_before_are_refused() -> None:
    plan, run = nonsense.conversation().to_worker[:2]
    told = decode(run, TO_WORKER)
    assert isinstance(told, Run)
    told.inputs = (1, (50, 1))
    worker = Worker()
    worker.handle(list(plan))
    with pytest.raises(ProtocolError, match="not an id update"):
        worker.handle([*encode(told), *run[1:]])


def test_next_session_is_unaffected_by_malformed_replies() -> None:
    """The next session knows nothing of the nonsense that the last one was told."""
    with pytest.raises(ProtocolError), nonsense.opened(Answering(encode(Done(99)))):
        torch.ones(4).tolist()
    with lazygt.session(launcher="inline"):
        assert torch.ones(4).tolist() == [1.0] * 4
