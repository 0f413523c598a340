#!/bin/sh
# Run a command once for each slot of a hostfile, with the mpirun on the PATH: Open MPI's or MPICH's.
#
#   launch/mpirun.sh hostfile.example python launch/train.py --tp 2 --pp 2
#
# The hostfile is in Open MPI's form, "node1 slots=2"; for MPICH it is translated to "node1:2".
set -eu
hostfile=$1
shift
hosts=$(awk '{ sub(/#.*/, "") } NF { n = 1; for (i = 2; i <= NF; i++) if ($i ~ /^slots=/) n = substr($i, 7); print $1 ":" n }' "$hostfile")
slots=$(echo "$hosts" | awk -F: '{ total += $NF } END { print total + 0 }')
[ "$slots" -gt 0 ] || { echo "error: $hostfile names no host; expected lines such as 'node1 slots=4'" >&2; exit 2; }

if mpirun --version 2>&1 | grep -q -e "Open MPI" -e "OpenRTE"; then
    if [ "$(id -u)" = 0 ]; then set -- --allow-run-as-root "$@"; fi
    for name in PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if env | grep -q "^$name="; then set -- -x "$name" "$@"; fi
    done
    exec mpirun --hostfile "$hostfile" --bind-to none -n "$slots" "$@"
fi
translated=$(mktemp)
trap 'rm -f "$translated"' EXIT
echo "$hosts" > "$translated"
mpirun -f "$translated" -n "$slots" "$@"
