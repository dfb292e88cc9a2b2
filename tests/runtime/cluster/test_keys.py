"""Keys that are made of a token: the same for the same, others for any other."""

from __future__ import annotations

import pytest
import zmq

from lazygt.runtime.cluster.keys import derived

TOKEN = bytes(range(32))


def test_both_ends_make_the_same_keys() -> None:
    keys = derived(TOKEN, "store")
    assert keys == derived(bytes(range(32)), "store")
    assert zmq.curve_public(keys.secret.encode()).decode() == keys.public
    assert len(keys.public) == len(keys.secret) == 40


def test_another_token_or_role_has_other_keys() -> None:
    pairs = {derived(token, role) for token in (TOKEN, bytes(32)) for role in ("store", "client")}
    assert len({keys.public for keys in pairs} | {keys.secret for keys in pairs}) == 8


@pytest.mark.parametrize("size", [0, 65])
def test_a_token_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"a token of {size} bytes"):
        derived(bytes(size), "store")
