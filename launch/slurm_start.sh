#!/usr/bin/env bash
# Start the ranks on the nodes of a hostfile, inside a Slurm job. launch/slurm.sbatch calls it:
#
#   launch/slurm_start.sh --hostfile FILE --master_addr ADDR --master_port PORT TRAINING_ARGUMENTS
#
# FILE must be in a folder that all nodes share. The hosts are in the order of Slurm's list of nodes.
set -euo pipefail
[[ ${1-} == --hostfile && ${3-} == --master_addr && ${5-} == --master_port ]] || { sed -n '2,6p' "$0" >&2; exit 2; }
export HOSTFILE=$2 MASTER_ADDR=$4 MASTER_PORT=$6
shift 6
mapfile -t nodes < <(awk '!/^[[:space:]]*(#|$)/ { print $1 }' "$HOSTFILE")

# $SLURM_NODEID differs between nodes, so the shell on each node expands it. A launcher that fails ends all launchers.
# exec: a signal to this process reaches srun, which forwards it to the launchers.
exec srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --nodelist="$(IFS=, && echo "${nodes[*]}")" \
  --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c '
  exec launch/multi_node.sh --no_ssh --node_rank "$SLURM_NODEID" --hostfile "$HOSTFILE" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"
' multi_node "$@"
