#!/usr/bin/env bash
# Trains under Open MPI, and starts again after a stall or a lost process.
#
#   bash scripts/cluster/mpirun.sh -n 16 --hostfile HOSTS -- WORKDIR EXPERIMENT.py [FLAG ...]
#
# What stands before -- goes to mpirun. SIGTERM, SIGINT or SIGHUP to this script: all save and leave,
# and it ends with 75. PYTHON is the interpreter, the same on all hosts, and MAX_RESTARTS (20) says how
# often the run may be started again.
set -uo pipefail

options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
if [ $# -lt 3 ]; then
    echo "usage: mpirun.sh [OPTION OF MPIRUN ...] -- WORKDIR EXPERIMENT.py [FLAG ...]" >&2
    exit 2
fi
workdir=$2 experiment=$3
shift 3

# mpirun kills everything a second after a SIGTERM, and does not pass it on before. SIGUSR1 it does
# pass on, to the process groups: the experiment must not hear it, and gets SIGTERM instead.
process='
(trap "" USR1; exec "$@") &
child=$!
trap "kill -TERM $child" USR1
while wait $child; code=$?; kill -0 $child 2>/dev/null; do :; done
wait $child 2>/dev/null; ended=$?; [ $ended = 127 ] || code=$ended
[ $code = 0 ] || echo "mpirun.sh: process $OMPI_COMM_WORLD_RANK ended with code $code" >&2
exit $code'

said=$(mktemp)
trap 'rm -f "$said"' EXIT
asked='' mpirun=''
ask() {
    asked=yes
    [ -z "$mpirun" ] || kill -USR1 "$mpirun"
}
trap ask TERM INT HUP
for ((restarts = 0; ; restarts++)); do
    # Ctrl-C reaches all that the terminal knows, and is for this script alone.
    exec {log}> >(trap '' TERM INT HUP && exec tee "$said" >&2)
    tee=$!
    # Each process ends by itself: the first that leaves with 75 must not take the others along.
    setsid mpirun --mca orte_abort_on_non_zero_status 0 "${options[@]}" \
        bash -c "$process" - "${PYTHON:-python}" "$experiment" --workdir="$workdir" "$@" \
        2>&"$log" &
    mpirun=$!
    exec {log}>&-
    [ -z "$asked" ] || ask # it came before there was anything to pass it on to
    while wait "$mpirun"; code=$?; kill -0 "$mpirun" 2>/dev/null; do :; done
    # A signal ends a wait with a code of its own, and the process may have ended just then.
    wait "$mpirun" 2>/dev/null
    ended=$?
    [ "$ended" = 127 ] || code=$ended
    mpirun=''
    wait "$tee"
    # mpirun does not pass them on. The lowest one is nearest to the cause: 3 of one that met a value
    # that is not finite, 76 of those that lost one that was killed.
    lowest=$(sed -n 's/^mpirun.sh: process .* ended with code //p' "$said" | sort -n | head -n 1)
    code=${lowest:-$code}
    # USR1 ends an mpirun that has not set up yet.
    [ -z "$asked" ] || [ "$code" != 138 ] || code=75
    # README, "Exit codes": only after these does the same command help.
    case $code in
    75 | 76 | 124) ;;
    *) exit "$code" ;;
    esac
    if [ "$asked" ] || [ "$restarts" -ge "${MAX_RESTARTS:-20}" ]; then
        exit "$code"
    fi
    pause=$((restarts < 6 ? 1 << restarts : 60))
    echo "mpirun.sh: code $code, again in $pause s (time $((restarts + 1)))" >&2
    sleep "$pause" &
    wait $!
    [ -z "$asked" ] || exit 75
done
