"""docs/messages.md has the messages of every catalogue.

``python -m tests.docs.test_messages`` writes its tables.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest

from lazygt.pool import requests
from lazygt.runtime import messages
from lazygt.runtime.cluster import protocol
from lazygt.runtime.wire import Message
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "messages.md"

Kinds = tuple[type[Message], ...]
CATALOGUES: dict[str, Kinds] = {
    "from a client to a worker": messages.TO_WORKER,
    "from a worker to its client": messages.TO_CLIENT,
    "from a client to a host's agent": protocol.TO_AGENT,
    "from a host's agent to the client": protocol.TO_CLIENT,
    "from a client to a pool": requests.TO_POOL,
    "from a pool to a client": requests.TO_CLIENT,
}


def tag(kind: type[Message]) -> int:
    """The number that a message begins with."""
    number = kind.__struct_config__.tag
    assert isinstance(number, int)
    return number


def table(kinds: Kinds) -> str:
    """The messages of a catalogue, by tag, with their fields and the first line of their docs."""
    rows = ["| tag | message | fields | meaning |", "|---|---|---|---|"]
    for kind in sorted(kinds, key=tag):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        meaning = re.sub(r"``?([^`]+)``?", r"`\1`", (inspect.getdoc(kind) or "").split("\n")[0])
        rows.append(f"| {tag(kind)} | `{kind.__name__}` | {fields} | {meaning} |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """The page with the tables of today."""
    for title, kinds in CATALOGUES.items():
        heading = f"## Messages {title}\n\n"
        before, found, after = text.partition(heading)
        assert found, heading
        rest = re.sub(r"\A(\|.*\n)*", "", after)
        text = f"{before}{heading}{table(kinds)}\n{rest}"
    return text


def test_tables_are_those_of_the_catalogues() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text()


@pytest.mark.parametrize("title", CATALOGUES)
def test_every_message_of_a_catalogue_has_a_tag_of_its_own(title: str) -> None:
    kinds = CATALOGUES[title]
    assert max(Counter(map(tag, kinds)).values()) == 1
    assert all(0 <= tag(kind) < 128 for kind in kinds)  # one byte; `Message.begins` reads it alone


def test_every_message_with_a_tag_is_in_a_catalogue() -> None:
    listed = {kind for kinds in CATALOGUES.values() for kind in kinds}
    inner = {messages.Fetched, messages.Failure, messages.Made, messages.Several, messages.Plain}
    for module in (messages, protocol, requests):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message:
                has_tag = kind.__struct_config__.tag is not None
                assert kind in listed or kind in inner or not has_tag, kind


def test_pool_tells_its_own_messages_from_an_agents_by_the_tag() -> None:
    for title, kinds in CATALOGUES.items():
        for kind in kinds:
            assert requests.is_ours(bytes([0x91, tag(kind)])) is ("pool" in title)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
