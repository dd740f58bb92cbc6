#!/usr/bin/env bash
# Sets up and trains a small language model on the source of Python's standard library.
# Usage: bash scripts/quickstart.sh [--flag=value ...]   (flags of experiments/train_lm.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
workdir=runs/quickstart
is_training=true
before=
for argument in "$@"; do
    case $argument in
    --workdir=*) workdir=${argument#--workdir=} ;;
    --help | --helpshort | --helpfull | --plan | --plan=* | --audit | --evaluate) is_training=false ;;
    esac
    [ "$before" != --workdir ] || workdir=$argument
    before=$argument
done
echo "quickstart: installing into .venv/ (about a minute the first time)"
bash scripts/setup.sh
.venv/bin/python experiments/train_lm.py --workdir="$workdir" "$@"
if $is_training; then
    .venv/bin/python experiments/sample_lm.py --workdir="$workdir" --prompt="    def __init__(self, " --num_tokens=105
    echo "quickstart: the run is in $workdir: config.json, metrics.jsonl, checkpoints/, report.html"
fi
