"""Sessions that reach other machines: keys, connections, and agents on remote hosts."""

#: Variables of which an engine sets one at least for each process that it starts.
ENGINE_VARIABLES = frozenset({
    "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JOB_COMPLETION_INDEX",
})  # fmt: skip
