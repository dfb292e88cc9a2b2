"""Each example, in a short form, as a user starts it; lazy and eager must print one result."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600

pytestmark = pytest.mark.slow

TINY_GPT = "--steps 6 --batch-size 2 --length 16 --dim 16 --layers 1 --heads 2 --log-every 2"


def run_example(name: str, arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "it/s" not in done.stderr, "a progress bar was drawn, and this is no terminal"
    return done.stdout


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


@pytest.mark.parametrize("eager", ["", "--eager"])
def test_gpt_resumes_where_it_stopped(tmp_path: Path, eager: str) -> None:
    whole = run_example("train_gpt.py", f"{TINY_GPT} --sample 0 {eager}")
    checkpoint = f"--checkpoint {tmp_path / 'gpt.bin'} --sample 0 {eager}"
    run_example("train_gpt.py", f"{TINY_GPT} {checkpoint} --steps 4 --schedule-steps 6")
    rest = run_example("train_gpt.py", f"{TINY_GPT} {checkpoint} --resume")
    assert "resumed at step 4" in rest
    assert losses(rest) == losses(whole)[-1:]


def test_gpt_reads_a_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    output = run_example("train_gpt.py", f"{TINY_GPT} --sample 5 --text {text}")
    assert "900 characters, 28 different ones" in output
    assert len(writing(output).strip("\n")) <= 5


def test_gpt_refuses_resume_without_a_checkpoint() -> None:
    with pytest.raises(AssertionError, match="--resume needs --checkpoint PATH"):
        run_example("train_gpt.py", "--resume")


def test_gpt_refuses_fsdp_without_an_axis_for_it() -> None:
    with pytest.raises(AssertionError, match="--fsdp needs workers to cut the weights over"):
        run_example("train_gpt.py", "--fsdp --mesh model=2")


def test_gpt_refuses_axes_that_it_does_not_cut_along() -> None:
    with pytest.raises(AssertionError, match="--mesh foo=2: this program cuts along axes data and"):
        run_example("train_gpt.py", "--mesh foo=2")


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
