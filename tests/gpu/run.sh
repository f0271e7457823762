#!/usr/bin/env bash
# Trains sort3 (trainer and generator in one process) on one NVIDIA GPU over NCCL, then prints tokens/s and judges the
# log-prob checks of its metrics.jsonl. For a machine without a registry: Python 3.12 or 3.13 with torch >= 2.11 for
# CUDA; whatever else is missing comes from wheels in ./wheels beside this script (or in $WHEELS), installed into a
# temporary folder.
#   tests/gpu/run.sh [key=value ...]      e.g. grpo.max_num_steps=20 policy.precision=bfloat16
# PYTHON names the interpreter, OUT the folder that keeps the results. Exit 0: trained, and every check passed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."

python=${PYTHON:-python3}
wheels=${WHEELS:-$here/wheels}
out=${OUT:-$PWD/results/gpu-sort3}
recipe=recipes/llm/grpo-sort3-1n1g-megatron_async_colocated.yaml

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
shopt -s nullglob
carried=("$wheels"/*.whl)
if ((${#carried[@]})); then
    echo "Installing ${#carried[@]} carried wheels"
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "${carried[@]}"
    export PYTHONPATH="$work/site:$PYTHONPATH"
fi

"$python" "$here/machine.py"
mkdir -p "$out"
"$python" -m megatron_grpo check "$recipe" cluster.accelerator=cuda "$@" >"$out/check.txt"

began=$SECONDS
"$python" -m megatron_grpo train "$recipe" cluster.accelerator=cuda "logger.log_dir=$out" "$@" 2>&1 | tee "$out/train.log"
echo "The whole run took $((SECONDS - began)) s"
"$python" "$here/judge.py" "$out/metrics.jsonl" "$@"
