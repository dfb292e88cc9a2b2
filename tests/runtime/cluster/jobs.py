"""What engines set for the processes that they start, as recorded from them: torchrun of torch
2.13, srun 22.05, mpirun of Open MPI 4.1 and mpiexec of MPICH 4.0, two processes on each of two
hosts."""

from __future__ import annotations

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "42157",
    "RANK": "3",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "82aa47f5-8fad-4279-949e-2fece819ca74",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
SLURM = {
    "SLURMD_NODENAME": "host1",
    "SLURM_GTIDS": "2,3",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "host[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "host[0-1]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
#: of the script that sbatch runs, which is no process of a job
SLURM_BATCH = {
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
OPENMPI = {
    "MASTER_ADDR": "host0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "865271808.0;tcp://10.77.0.1:49223",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_NAMESPACE": "865271809",
    "PMIX_RANK": "3",
}
HYDRA = {
    "MASTER_ADDR": "host0",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "8",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
#: of a pod of the manifest examples/clusters/jobset.yaml
POD = {
    "MASTER_ADDR": "train-hosts-0-0.train",
    "MASTER_PORT": "29400",
    "RANK": "3",
    "WORLD_SIZE": "4",
}
