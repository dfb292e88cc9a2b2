"""Places in lazygt's code that read, or make files: found by syntax, so that none is missed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lazygt"
#: Functions of ``lazygt.host.files`` that give descriptors.
SAFE = frozenset({"create", "open_own", "open_output"})
#: Functions of these names that load, handed on or called.
_LOADERS = frozenset(
    f"{module}.{name}"
    for module in ("torch", "np", "pickle", "cloudpickle", "json", "marshal")
    for name in ("load", "loads")
)
_READING = frozenset({
    "loads", "treespec_loads", "unpackb", "Unpacker", "Decoder", "Unpickler", "mmap", "memmap",
    "fromfile", "read_text", "read_bytes", "load_library", "ExtensionFileLoader", "literal_eval",
    "spec_from_file_location", "exec_module", "run_path", "run_module", "exec", "eval",
    "__import__", "safe_open", "load_file",
})  # fmt: skip
_MAKING = frozenset({
    "write_text", "write_bytes", "mkdir", "makedirs", "mkfifo", "mknod", "mkdtemp", "mkstemp",
    "mktemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "SpooledTemporaryFile",
    "symlink", "symlink_to", "hardlink_to", "shm_open", "FileHandler", "memmap", "tofile",
    "copyfile", "copy2", "copytree",
})  # fmt: skip
#: Those that take a path as well as an open file, which is called ``file``.
_SAVING = frozenset({"savefig", "ZipFile", "TarFile", "savez"})


def _named(call: ast.Call) -> tuple[str, str]:
    """The owner of a function that is called, and its name."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    return owner, name


def _mode(call: ast.Call, position: int) -> str:
    """The mode of a file that is opened; "w", if it is not constant."""
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[position:]
    if not given:
        return "r"
    value = given[0].value if isinstance(given[0], ast.Constant) else None
    return value if isinstance(value, str) else "w"


def _writes(call: ast.Call) -> bool:
    """Whether a call of ``os.open`` says that it writes."""
    return any(flag in ast.unparse(call) for flag in ("WR", "CREAT", "TRUNC", "APPEND"))


def _is_safe(call: ast.Call) -> bool:
    first = call.args[0]
    return isinstance(first, ast.Call) and ast.unparse(first.func) in SAFE


def reads(node: ast.AST, source: str) -> bool:
    """Whether it reads, decodes, imports or runs something that others may have made or named."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in _LOADERS
    if not isinstance(node, ast.Call):
        return False
    owner, name = _named(node)
    match name:
        case "decode":  # not of bytes into text
            return not owner or owner.startswith("msgspec.")
        case "open" if owner == "os":
            return "RDWR" in ast.unparse(node) or not _writes(node)
        case "open":
            return not owner and "r" in _mode(node, 1)
        case "import_module" | "CDLL" | "PyDLL" | "find_spec":
            return not isinstance(node.args[0], ast.Constant)
        case "getattr":
            return not isinstance(node.args[1], ast.Constant)
    return name in _READING


def makes(node: ast.AST, source: str) -> bool:
    """Whether it makes a file, a folder or a name by itself, or opens one for writing."""
    if not isinstance(node, ast.Call):
        return False
    owner, name = _named(node)
    match name:
        case "open" if owner == "os":
            return _writes(node)
        case "open" if not owner:
            return not set(_mode(node, 1)).isdisjoint("wax+") and not _is_safe(node)
        case "open":
            constant = bool(node.args) and isinstance(node.args[0], ast.Constant)
            return constant and not set(_mode(node, 0)).isdisjoint("wax+")
        case "touch":
            return not node.args
        case "link" | "SharedMemory":
            return owner in ("os", "shared_memory")
        case "bind":
            is_path = bool(owner) and not isinstance(node.args[0], ast.Tuple)
            return "AF_UNIX" in source and is_path
    return name in _MAKING or (name in _SAVING and ast.unparse(node.args[0]) != "file")


def places(which: Callable[[ast.AST, str], bool], package: Path = PACKAGE) -> dict[str, list[str]]:
    """The names of such functions, by file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if which(node, source):
                name = _named(node)[1] if isinstance(node, ast.Call) else ast.unparse(node)
                found[str(path.relative_to(package))].append(name)
    return dict(found)
