#!/usr/bin/env bash
# Sets up and trains a small language model on the source of Python's standard library.
# Usage: bash scripts/quickstart.sh [--flag=value ...]   (flags of experiments/train_lm.py)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
echo "quickstart: installing into .venv/ (about a minute the first time)"
bash scripts/setup.sh
workdir=runs/quickstart
.venv/bin/python experiments/train_lm.py --workdir="$workdir" "$@"
.venv/bin/python experiments/sample_lm.py --workdir="$workdir" --prompt="def main(" --num_tokens=300
echo "quickstart: the run is in $workdir: config.json, metrics.jsonl, checkpoints/, report.html"
