"""`python -m benchmarks.<name>` prints a table; `--save` keeps it in RESULTS.md."""

import os

# OpenMP reads these when torch is loaded, so they stand here, before any benchmark imports torch.
# Workers inherit them. One thread each: with more, a shared machine measures its neighbours.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
