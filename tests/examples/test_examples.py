"""Each example, in a short form, as a user starts it; lazy and eager must print one result."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import lazygt
from tests.examples.running import ROOT, SECONDS, run_example

pytestmark = pytest.mark.slow

TINY_GPT = "--steps 6 --batch-size 2 --length 16 --dim 16 --layers 1 --heads 2 --log-every 2"


def losses(output: str) -> list[str]:
    found = re.findall(r"loss (\d+\.\d+)", output)
    assert found, output
    return found


def accuracy(output: str) -> float:
    match = re.search(r"test accuracy (\d\.\d+)", output)
    assert match, output
    return float(match[1])


def writing(output: str) -> str:
    """What the model wrote, between the two rules."""
    return output.split("-" * 40)[1]


@pytest.mark.parametrize(("model", "bound"), [("mlp", 0.85), ("cnn", 0.9)])
def test_digits_learns_and_agrees_with_eager(model: str, bound: float) -> None:
    short = f"--model {model} --epochs 4"
    lazy = run_example("train_digits.py", short)
    eager = run_example("train_digits.py", f"{short} --eager")
    assert accuracy(lazy) >= bound
    assert losses(lazy) == losses(eager)
    assert accuracy(lazy) == accuracy(eager)


def test_digits_inline_and_two_workers() -> None:
    inline = run_example("train_digits.py", "--epochs 1 --launcher inline")
    two = run_example("train_digits.py", "--epochs 1 --workers 2")
    assert losses(inline) == losses(two)


def test_digits_replays_its_plans() -> None:
    output = run_example("train_digits.py", "--epochs 3")
    built, replayed = re.search(r"(\d+) plans built, ([\d,]+) replayed", output).groups()
    # 24 batches an epoch, the last one smaller, and the test set: few plans for many steps.
    assert int(built) <= 16
    assert int(replayed.replace(",", "")) >= 2 * 24


def test_gpt_agrees_with_eager() -> None:
    lazy = run_example("train_gpt.py", f"{TINY_GPT} --sample 12")
    eager = run_example("train_gpt.py", f"{TINY_GPT} --sample 12 --eager")
    assert losses(lazy) == losses(eager)
    assert writing(lazy) == writing(eager)


def test_gpt_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = run_example("train_gpt.py", f"{TINY_GPT} --sample 0")
    checkpoint = f"--checkpoint {tmp_path / 'run'} --sample 0"
    run_example("train_gpt.py", f"{TINY_GPT} {checkpoint} --steps 4 --schedule-steps 6")
    rest = run_example("train_gpt.py", f"{TINY_GPT} {checkpoint} --schedule-steps 6")
    assert "resumed at step 4" in rest
    assert losses(rest) == losses(whole)[-1:]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["--launcher inline", "--workers 1", "--mesh data=2 --fsdp"])
def test_gpt_killed_at_random_ends_with_the_same_weights(tmp_path: Path, kind: str) -> None:
    draw = random.Random(seed := random.SystemRandom().randrange(1 << 32))
    print(f"seed {seed}")  # of a test that has failed
    command = f"{TINY_GPT} --steps 24 --log-every 1 --sample 0 {kind} --checkpoint"
    run_example("train_gpt.py", f"{command} {tmp_path / 'calm'}")
    for _ in range(2):
        kill_example("train_gpt.py", f"{command} {tmp_path / 'killed'}", draw)
    run_example("train_gpt.py", f"{command} {tmp_path / 'killed'}")
    calm, killed = (lazygt.resume(tmp_path / name) for name in ("calm", "killed"))
    assert calm.step == killed.step == 24
    assert set(calm) == set(killed) == {"model", "optimizer", "schedule", "batches"}
    for name in calm:
        assert digest(calm[name]) == digest(killed[name]), name


def kill_example(name: str, arguments: str, draw: random.Random) -> None:
    """Start an example, and kill it at some moment of some step."""
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / name), *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "LAZYGT_CHECKPOINT_EVERY": "2",
             "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert program.stdout is not None
        steps = (line for line in program.stdout if line.startswith("step"))
        for _ in zip(steps, range(draw.randrange(1, 12)), strict=False):
            pass
        with suppress(subprocess.TimeoutExpired):
            program.wait(timeout=draw.uniform(0, 0.05))
    finally:
        program.kill()
        program.communicate()


def digest(state: Any) -> str:
    """SHA-256 of a state, with the bytes of its tensors."""
    told = hashlib.sha256()

    def tell(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            told.update(repr((value.shape, value.stride(), value.dtype)).encode())
            told.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, each in value.items():
                told.update(repr(key).encode())
                tell(each)
        elif isinstance(value, list | tuple):
            for each in value:
                tell(each)
        else:
            told.update(repr(value).encode())

    tell(state)
    return told.hexdigest()


def test_gpt_reads_a_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    output = run_example("train_gpt.py", f"{TINY_GPT} --sample 5 --text {text}")
    assert "900 characters, 28 different ones" in output
    assert len(writing(output).strip("\n")) <= 5


def test_gpt_refuses_a_checkpoint_without_a_session() -> None:
    with pytest.raises(AssertionError, match="--checkpoint is a session's: leave --eager out"):
        run_example("train_gpt.py", "--eager --checkpoint run")


def test_gpt_refuses_fsdp_without_an_axis_for_it() -> None:
    with pytest.raises(AssertionError, match="--fsdp needs workers to cut the weights over"):
        run_example("train_gpt.py", "--fsdp --mesh model=2")


def test_gpt_refuses_axes_that_it_does_not_cut_along() -> None:
    with pytest.raises(AssertionError, match="--mesh foo=2: this program cuts along axes data and"):
        run_example("train_gpt.py", "--mesh foo=2")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", ["data=2", "data=2,model=2", "data=2 --fsdp"])
def test_gpt_on_a_mesh_agrees_with_eager(mesh: str) -> None:
    lazy = run_example("train_gpt.py", f"{TINY_GPT} --sample 0 --mesh {mesh}")
    eager = run_example("train_gpt.py", f"{TINY_GPT} --sample 0 --eager")
    assert [float(loss) for loss in losses(lazy)] == pytest.approx(
        [float(loss) for loss in losses(eager)], abs=1e-5
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_workers_change_no_bit(workers: int) -> None:
    told = run_example("survive.py", f"--workers {workers} --steps 40 --kills 2")
    pairs = re.findall(r"undisturbed (\S+)  killed (\S+)", told)
    assert len(pairs) == 4
    assert all(calm == killed for calm, killed in pairs)
    assert told.count("signal SIGKILL; back after") >= 1
    match = re.search(r"weights (\w+) and (\w+)", told)
    assert match
    assert match[1] == match[2]


TINY_LARGE = "--layers 2 --hidden 16 --heads 2 --vocabulary 50 --sequence 8 --batch 4"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mesh",
    [
        "",
        "--data-parallel 2 --shard fsdp",
        "--pipeline 2 --microbatches 2",
        "--data-parallel 2 --recompute",
    ],
)
def test_large_gpt_agrees_with_eager(mesh: str) -> None:
    eager = run_example("large_gpt.py", f"{TINY_LARGE} --precision fp32 --eager {mesh}")
    lazy = run_example("large_gpt.py", f"{TINY_LARGE} --precision fp32 {mesh}")
    assert losses(lazy) == losses(eager)


@pytest.mark.deep
def test_47_billion_parameters_are_simulated_and_not_allocated() -> None:
    """Six bytes a token and parameter, and what attention multiplies; 8 bytes of state on 8."""
    told = subprocess.run(
        [*LARGE, "--machine", "b200", "--data-parallel", "8", "--shard", "fsdp"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    *_, figures, resident = told.stdout.splitlines()
    step, parameters = json.loads(figures), 46.8e9
    assert step["mesh"] == {"data": 8}
    assert step["tokens"] == 8 * 2048
    assert step["flops"] == pytest.approx(6 * parameters * step["tokens"], rel=0.08)
    assert parameters < step["peak_bytes"] < 2 * parameters
    assert int(resident) << 10 < 1e9


@pytest.mark.deep
def test_a_width_of_175_billion_over_1536_ranks() -> None:
    """One block a stage, where it has eight; the first or the last has a table of words, too."""
    told = subprocess.run(
        [*LARGE, "--machine", "h100", "--layers", "12", "--hidden", "12288", "--heads", "96",
         "--data-parallel", "16", "--pipeline", "12", "--tensor-parallel", "8",
         "--batch", "32", "--microbatches", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    *_, figures, resident = told.stdout.splitlines()
    step, block, words = json.loads(figures), 12 * 12288**2, 51_200 * 12288
    assert step["mesh"] == {"data": 16, "pipe": 12, "model": 8}
    assert step["tokens"] == 32 * 2048
    multiplied = 12 * (block + 2 * 2048 * 12288 // 2) + words
    assert step["flops"] == pytest.approx(6 * multiplied * step["tokens"], rel=0.15)
    kinds = step["memory"]["kinds"]
    assert 2 * (block + words) / 8 < kinds["parameters"] < 2 * (block + words) / 8 * 1.15
    assert 0 < kinds["optimizer"] < 2 * kinds["parameters"] * 1.15  # may be cut along data
    assert int(resident) << 10 < 1.5e9


#: ``lazygt simulate --json``, and then the most KiB that the process was resident with.
LARGE = [
    sys.executable, "-c",
    "import resource, sys; from lazygt.cli.app import app; app(standalone_mode=False); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)",
    "simulate", "examples/large_gpt.py", "--json",
]  # fmt: skip
