"""Code blocks and commands of the documentation, and their execution."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks_in(text: str, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(text) if kind == language]


def commands_in(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of each line that begins with ``$``."""
    found = []
    for body in blocks_in(text, "console"):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def scrubbed(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{12}\b", "DIGEST", text)
    text = re.sub(r"\d+ bytes; run", "N bytes; run", text)
    text = re.sub(r"\d+\.\d ms", "N ms", text)
    return "\n".join(row.rstrip() for row in text.strip().splitlines())


def shell(command: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A line of shell; what `lazygt` prints goes on to what stands behind it."""
    for part in command.split(" && "):
        call = re.fullmatch(r"((?:\w+=\S+ )*)lazygt ([^|>]*)(.*)", part)
        if call is None:
            done = run(["bash", "-c", part], folder, env)
        else:
            variables, arguments, rest = call.groups()
            given = env | dict(variable.split("=", 1) for variable in variables.split())
            program = [sys.executable, "-m", "lazygt.cli", *shlex.split(arguments)]
            done = run(program, folder, given)
            if rest:
                done = run(["bash", "-c", f"cat {rest}"], folder, env, input=done.stdout)
        if done.returncode:
            break
    return done


def run(
    program: list[str], folder: Path, env: dict[str, str], input: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program,
        cwd=folder,
        env=env,
        input=input,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
