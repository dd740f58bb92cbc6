#!/usr/bin/env bash
# Leaves a ready .venv/ at the root, from the lock file. Usage: bash scripts/setup.sh [EXTRA ...]
#
# Extras: cuda12, cuda13, tpu, plan, eval (dev is always there). tpu and plan also let --plan compile
# for TPUs and GPUs that are elsewhere; eval is for jaxtrain eval. Without one it takes those of the last
# call, so name all of them; the first time, a machine whose driver shows an NVIDIA GPU gets cuda12. When
# nothing has changed this takes about a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv_version=0.13.9
fail() { printf 'setup.sh: %s\n' "$*" >&2; exit 1; }
is_good() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# A shim on the PATH may exist and still refuse to run, and uv does not look into pyenv's versions:
# so each candidate is run, and the first that works is handed to uv.
find_python() {
    local candidate
    for candidate in ${UV_PYTHON:+"$UV_PYTHON"} .venv/bin/python \
        python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python \
        /opt/*/bin/python3.1[2-9] /usr/local/bin/python3.1[2-9]; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        if is_good "$candidate"; then
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", "") or sys.executable)'
            return
        fi
    done
}

python=$(find_python)
if [ -n "$python" ]; then
    export UV_PYTHON="$python"
fi # otherwise uv downloads an interpreter, where the network allows it

uv=$(command -v uv || true)
if [ -z "$uv" ]; then
    uv=.cache/uv/bin/uv
    if ! [ -x "$uv" ]; then
        bootstrap=${python:-$(command -v python3 || true)}
        [ -n "$bootstrap" ] || fail "no Python and no uv found; install Python 3.12 or newer, or uv (https://docs.astral.sh/uv)"
        echo "setup.sh: installing uv $uv_version into .cache/uv"
        rm -rf .cache/uv
        "$bootstrap" -m venv .cache/uv >/dev/null ||
            fail "'$bootstrap -m venv' failed; install the venv package of your system's Python, or uv itself"
        .cache/uv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version" ||
            fail "could not install uv $uv_version from the package index; install uv yourself and run this again"
    fi
fi

# What was asked for once stays: quickstart.sh and test.sh call this without extras.
extras=("$@")
if [ ${#extras[@]} -eq 0 ] && [ -r .venv/extras ]; then
    read -r -a extras <.venv/extras
elif [ ${#extras[@]} -eq 0 ] && command -v nvidia-smi >/dev/null 2>&1 &&
    nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "setup.sh: NVIDIA GPU found, adding the extra cuda12 (for another: bash scripts/setup.sh cuda13)"
    extras=(cuda12)
fi
arguments=(--extra dev)
for extra in "${extras[@]}"; do
    arguments+=(--extra "$extra")
done

# --locked: the versions of uv.lock, and an error when it no longer fits pyproject.toml.
# --compile-bytecode: otherwise the first start compiles a thousand modules, and one that cannot
# write into .venv/ does it every time.
"$uv" sync --quiet --locked --compile-bytecode "${arguments[@]}" ||
    fail "uv sync failed; see its message above (if it speaks of the lock file: run 'uv lock' and commit uv.lock)"
if [ ${#extras[@]} -gt 0 ]; then
    echo "${extras[*]}" >.venv/extras
fi
