"""Structures that workers tell of: their names import no module and call no function."""

from __future__ import annotations

import enum
import json
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from lazygt.errors import ProtocolError
from lazygt.runtime.executors.custom_functions import structure_of

MODULE = "never_imported_by_lazygt"


class Colour(enum.Enum):
    RED = 1


def told(kind: str, context: Any) -> str:
    return json.dumps([1, {"type": kind, "context": context, "children_spec": []}])


def factory(module: str, name: str) -> str:
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": []}
    return told("collections.defaultdict", context)


def of_enum(name: str) -> str:
    member = {"__enum__": True, "fqn": name, "name": "RED"}
    return told("builtins.dict", json.dumps([member]))


def test_pytree_structure_round_trip() -> None:
    value = [1, (2, None), {"a": 3, Colour.RED: OrderedDict(b=4)}, defaultdict(list, c=[5])]
    spec = pytree.tree_structure(value)
    assert structure_of(pytree.treespec_dumps(spec)) == spec


@pytest.mark.parametrize("text", [
    factory(MODULE, "Any"), factory("os", "abort"), factory("os", "nothing"),
    factory("builtins", ""),
    of_enum(f"{MODULE}:Colour"), of_enum("os:environ"), of_enum("os"),
    of_enum(f"{MODULE}:Colour").replace("__enum__", r"\\u005f_enum__"),
    "", "5", "[1, {}]", "[" * 100_000, told("builtins.dict", "[" * 100_000),
])  # fmt: skip
def test_other_texts_are_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import enum\nAny = list\nclass Colour(enum.Enum): RED = 1\n"
    (tmp_path / f"{MODULE}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProtocolError):
        structure_of(text)
    assert MODULE not in sys.modules
