#!/bin/sh
# The same command on every host: torchrun.sh FIRST_HOST [PROGRAM ...]
# HOSTS is how many there are (2), WORKERS how many each gets (2). All of them need one LAZYGT_TOKEN,
# or one in a file: `umask 077; lazygt keys token > FILE`, LAZYGT_TOKEN_FILE=FILE.
first=${1:?the name or address of the first host}
shift
[ $# -gt 0 ] || set -- "$(dirname "$0")/train.py"
exec torchrun --nnodes "${HOSTS:-2}" --nproc-per-node "${WORKERS:-2}" \
    --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id lazygt "$@"
