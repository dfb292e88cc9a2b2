"""A program that each process of a job runs, to say who it is and whom it has met.

    python tests/clusters/meets.py FOLDER

Writes FOLDER/RANK.json. The client says where it listens and goes when all other hosts know it;
the first process of each other host asks where; the others hold their slots.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from lazygt.runtime.cluster import job_rendezvous
from lazygt.runtime.cluster.environment import Job

TOKEN = b"a secret of all hosts, 32 bytes."
ENDPOINT_PORT = 4711
_SECONDS = 100


def main() -> None:
    folder = Path(sys.argv[1])
    job = Job.from_environment(os.environ)
    assert job is not None, "no engine started this process"
    told = {**asdict(job), "host_name": os.uname().nodename, "met": "", "held": False}
    if job.is_client:
        port = job_rendezvous.port_to_bind(job) or ENDPOINT_PORT
        job_rendezvous.publish(job, f"tcp://{job.address}:{port}", TOKEN, _SECONDS)
        wait_for(folder, job.world_size // job.local_world_size - 1)
    elif job.leads_host:
        told["met"] = job_rendezvous.find(job, TOKEN, _SECONDS)
    else:
        job_rendezvous.hold(job)
        told["held"] = True
    part = folder / f"{job.rank}.part"
    part.write_text(json.dumps(told))
    part.rename(folder / f"{job.rank}.json")


def wait_for(folder: Path, count: int) -> None:
    """Until so many others have said that they know the client."""
    until = time.monotonic() + _SECONDS
    while len(list(folder.glob("*.json"))) < count:
        assert time.monotonic() < until, "the other hosts have not come"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
