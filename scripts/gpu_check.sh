#!/usr/bin/env bash
# One command on a machine with an NVIDIA GPU: unit tests, the core on the device, the Triton
# builder against the torch one, the reference engine in bf16, timings, SGLang if installed.
#
#     scripts/gpu_check.sh [--json gpu_check.json] [--target DIR] [--drafter DIR] ...
#
# Uses $PYTHON, else the checkout's .venv, else python3. What it could not run, it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
if ! "$python" -c 'import torch, transformers' 2>/dev/null; then
    echo "error: $python has no torch or transformers; run: pip install -e '.[engine]'" >&2
    exit 2
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m ddtree.bench.gpu_check "$@"
