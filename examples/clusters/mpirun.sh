#!/bin/sh
# Open MPI on the hosts of a file: mpirun.sh HOSTFILE [PROGRAM ...]
# Open MPI starts the programs through ssh; rank 0 is on the first host of the file.
hosts=${1:?a file such as examples/clusters/hostfile}
shift
[ $# -gt 0 ] || set -- python "$(dirname "$0")/train.py"
MASTER_ADDR=$(awk 'NF && $1 !~ /^#/ {print $1; exit}' "$hosts")
LAZYGT_TOKEN=${LAZYGT_TOKEN:-$(lazygt keys token)}
export MASTER_ADDR LAZYGT_TOKEN
exec mpirun --hostfile "$hosts" -x MASTER_ADDR -x LAZYGT_TOKEN ${MPIRUN_OPTIONS:-} "$@"
