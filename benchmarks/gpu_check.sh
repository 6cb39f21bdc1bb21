#!/usr/bin/env bash
# gpu_check.sh [--device cuda|cpu] [--quick]: what a card computes with this engine, in at most eight minutes. Nothing is
# installed and nothing is fetched: Python with torch, NumPy and safetensors is enough. The last line is one JSON document.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/engine_image/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
