"""The client of a job is alone, for whoever looks: libraries look for the job's other processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lazygt.runtime.cluster import environment
from tests.runtime.cluster.jobs import OPENMPI, SLURM, TORCHRUN

pytestmark = pytest.mark.timeout(240)

#: As torchrun starts the client of two workers on this machine.
HERE = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}  # fmt: skip
PROGRAM = """
import os, subprocess, sys, torch, lazygt

def is_one_of_several():
    import torch.distributed as dist
    return dist.is_torchelastic_launched() or "RANK" in os.environ or "WORLD_SIZE" in os.environ

assert is_one_of_several()
told = []
for _ in range(2):
    with lazygt.session(compile="off") as session:
        told += [len(session.worker_pids), is_one_of_several(), session.config.launcher]
child = "import lazygt\\nwith lazygt.session(compile='off') as s: print(len(s.worker_pids))"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print(told, done.stdout.strip(), done.stderr)
"""


def test_a_library_and_a_program_that_it_starts_find_no_job() -> None:
    """The next session has the job's workers all the same."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **HERE},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [2, False, "environment"]
    assert done.stdout.strip() == f"{expected * 2} 1"


@pytest.mark.parametrize("given", [TORCHRUN, SLURM, OPENMPI])
def test_only_job_variables_are_removed(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_attached_jobs", {})
    job = environment.Job.from_environment(given)
    assert job is not None
    other = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4",
             "TORCHELASTIC_ERROR_FILE": "error.json", "LAZYGT_TOKEN": "a token"}  # fmt: skip
    left = {**given, **other}
    environment.be_alone(job, left)
    assert other.items() <= left.items()
    assert environment.Job.from_environment(left) is None
