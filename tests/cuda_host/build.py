"""Build of the stubs: a library that is loaded before CUDA's, and a driver.

Functions of CUDA's libraries that torch needs and the sources lack are generated: a product of
cuBLAS is a kernel like others, anything else is not supported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("memory", "runtime", "streams", "modules", "blas", "nccl")
LIBRARIES = re.compile(r"^(__)?(cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl)\w+$")
#: Of cuBLAS what sets or makes something, and computes nothing.
SETTING = re.compile(r"^cublas(Lt)?\w*(Set|Get|Create|Destroy|Init)")
FLAGS = ("-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-pthread")


def symbols(library: Path, kind: str) -> set[str]:
    """Names of the functions that a library defines, or needs, by ``nm``."""
    told = subprocess.run(
        ["nm", "--dynamic", f"--{kind}-only", str(library)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {line.split()[-1].partition("@")[0] for line in told.splitlines()}


def needed() -> set[str]:
    """Names of the functions of CUDA's libraries that torch's call."""
    folder = Path(torch.__file__).parent / "lib"
    return {
        name
        for library in folder.glob("*.so")
        for name in symbols(library, "undefined")
        if LIBRARIES.match(name)
    }


def generated(names: set[str]) -> str:
    """Source of the functions that no source has."""
    lines = [
        'extern "C" {',
        "int stub_missing(const char* name);",
        "int stub_product(void* handle);",
    ]
    for name in sorted(names):
        if SETTING.match(name):
            lines.append(f"int {name}() {{ return 0; }}")
        elif name.startswith("cublas"):
            lines.append(f"int {name}(void* handle) {{ return stub_product(handle); }}")
        else:
            lines.append(f'int {name}() {{ return stub_missing("{name}"); }}')
    return "\n".join([*lines, "}", ""])


def compiled(sources: list[Path], library: Path, *more: str) -> None:
    """Compile sources into a library."""
    headers = next(
        Path(place) / "nvidia" / "cu13" / "include"
        for place in sys.path
        if (Path(place) / "nvidia" / "cu13" / "include" / "cuda.h").exists()
    )
    places = [f"-I{headers}", f"-I{headers.parents[1] / 'nccl' / 'include'}"]
    command = ["g++", *FLAGS, *places, *map(str, sources), "-o", str(library), *more]
    subprocess.run(command, check=True)


def build(folder: Path) -> None:
    """Build ``libstub.so``, ``libcuda.so.1`` and ``libnvidia-ml.so.1`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [HERE / "stub" / f"{name}.cpp" for name in SOURCES]
    whole = folder / "libstub.so"
    compiled(sources, whole)
    rest = folder / "rest.cpp"
    rest.write_text(generated(needed() - symbols(whole, "defined")))
    compiled([*sources, rest], whole)
    for name, library in (("driver", "libcuda.so.1"), ("nvml", "libnvidia-ml.so.1")):
        source = HERE / "stub" / f"{name}.cpp"
        compiled([source], folder / library, f"-Wl,-soname,{library}")
    for_linkers = folder / "libcuda.so"
    for_linkers.unlink(missing_ok=True)
    for_linkers.symlink_to("libcuda.so.1")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
