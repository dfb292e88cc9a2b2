"""Words of the code, its docs and its tests.

Local names say the thing: six names that say only where a value came from stand in comprehensions
alone, where the thing is one word away. A docstring begins with a noun or an imperative, as in
torch and the standard library, and so do the headings of the docs and the help texts of commands.
The name of a test states a fact, with its subject.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path

import pytest

import lazygt
from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.node import FUSED
from lazygt.passes.sharding.marks import PLACE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lazygt"
NAMES = frozenset({"found", "made", "one", "each", "own", "mine"})
SHORT = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda


def bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The six names that a function itself binds, as a parameter or a variable."""
    names: set[str] = set()
    todo: list[ast.AST] = [function.args, *function.body]
    while todo:
        node = todo.pop()
        if isinstance(node, SHORT | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return names & NAMES


def functions(path: Path) -> list[str]:
    """The functions of a file that bind one of the names, with the names."""
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {', '.join(sorted(names))}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (names := bound(node))
    ]


def test_local_names_say_the_thing() -> None:
    lines = [line for path in sorted(PACKAGE.rglob("*.py")) for line in functions(path)]
    assert not lines, "\n".join(lines)


def test_reader_sees_bound_names() -> None:
    source = "def f(found):\n    made, x = g()\n    return [one for one in x]"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert bound(function) == {"found", "made"}


# -- prose -----------------------------------------------------------------------------------------

QUESTION = re.compile(r"(what|who|whose|whom|which|whether|how|where|when)\b", re.IGNORECASE)
RELATIVE = re.compile(r"\b(what|who|whoever|whose|whom)\b", re.IGNORECASE)
WORD = re.compile(r"[\w']+")
# Relative pronouns per 1,000 words of docstrings, at most.
MOST_RELATIVES = 2.0
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a file, each with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def test_docstrings_begin_with_a_noun_or_an_imperative() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(path)
        if QUESTION.match(text)
    ]
    assert not lines, "\n".join(lines)


def test_docstrings_have_few_relative_clauses() -> None:
    texts = [text for path in PACKAGE.rglob("*.py") for _, text in docstrings(path)]
    relatives = sum(len(RELATIVE.findall(text)) for text in texts)
    words = sum(len(WORD.findall(text)) for text in texts)
    assert 1000 * relatives / words <= MOST_RELATIVES


# -- names of modules in prose ---------------------------------------------------------------------

OPERATORS = frozenset({FUSED, PLACE, WRITE_BACK})
DOTTED = re.compile(r"(?<!`)``([a-z_]\w*(?:\.\w+)+)``")


@cache
def bound_in(path: Path) -> frozenset[str]:
    """The names that a module and its classes define, import or assign."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return frozenset(names)


def resolves(name: str) -> bool:
    """Whether the dotted name is a module of the package, in one, or public."""
    path, parts = PACKAGE, name.removeprefix("lazygt.").split(".")
    if parts[0] in lazygt.__all__ and not (path / parts[0]).is_dir():
        return callable(reduce(getattr, parts, lazygt))
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    is_file = bool(parts) and (path / f"{parts[0]}.py").exists()
    module = path / (f"{parts.pop(0)}.py" if is_file else "__init__.py")
    return all(part in bound_in(module) for part in parts)


def is_of_lazygt(name: str) -> bool:
    """Whether the dotted name begins with lazygt, or with one of its rooms."""
    head = name.partition(".")[0]
    return (PACKAGE / head / "__init__.py").exists() or head == PACKAGE.name


def test_dotted_names_of_modules_exist() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in enumerate(path.read_text().splitlines(), 1)
        for name in DOTTED.findall(text)
        if is_of_lazygt(name) and name not in OPERATORS and not resolves(name)
    ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("transfer.copier.Copier", True),
        ("lazygt.net.listening", True),
        ("transfer.copier.Copyist", False),
        ("runtime.heap", False),
        ("lazygt.Pool.publish", True),
        ("lazygt.net.listening.Listener.hear", False),
    ],
)
def test_reader_resolves_dotted_names(name: str, exists: bool) -> None:
    assert resolves(name) == exists


# -- headings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")], ids=lambda path: path.name
)
def test_headings_are_nouns(path: Path) -> None:
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
    assert [heading for heading in headings if QUESTION.search(heading.partition(": ")[2])] == []
    assert [heading for heading in headings if QUESTION.match(heading)] == []


# -- help texts ------------------------------------------------------------------------------------

HELP_FOLDERS = ("cli", "observe/top")


def help_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the constant texts of ``help=`` arguments, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help":
            text = node.value.values[0] if isinstance(node.value, ast.JoinedStr) else node.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield node.value.lineno, text.value


def test_help_texts_begin_with_a_noun_or_an_imperative() -> None:
    lines = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for folder in HELP_FOLDERS
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for line, text in help_texts(path.read_text())
        if QUESTION.match(text)
    ]
    assert not lines, "\n".join(lines)


def test_reader_sees_help_texts() -> None:
    source = 'f(help="what " "is it")\ng(help=f"which {x}", other="how")\nh(help=text)'
    assert [text for _, text in help_texts(source)] == ["what is it", "which "]


# -- names of tests --------------------------------------------------------------------------------

QUESTION_WORDS = frozenset({"what", "who", "whose", "whom", "which", "whether", "how"})
TEST_FILES = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def question_names(source: str) -> list[str]:
    """Test functions of a source text with a question word in their names."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and QUESTION_WORDS & set(node.name.split("_"))
    ]


def test_names_of_tests_state_facts() -> None:
    lines = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(TEST_FILES)
        for name in question_names(path.read_text())
    ]
    assert not lines, "\n".join(lines)


def test_question_word_in_name_of_test_is_noticed() -> None:
    names = ("test_what_is_sent", "test_shown_value", "told_who", "test_ranks_whose_keys_differ")
    source = "\n".join(f"def {name}(): ..." for name in names)
    assert question_names(source) == ["test_what_is_sent", "test_ranks_whose_keys_differ"]


# -- one name, one thing ---------------------------------------------------------------------------

#: Base names of files that occur in two rooms.
TWICE = frozenset({"lightning", "report", "stages", "views"})


def test_base_names_of_files_are_unique() -> None:
    names = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} == TWICE
    assert len(TWICE) <= 4


def test_public_class_names_are_unique() -> None:
    classes = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []
