#!/usr/bin/env bash
# The paper's experiment from nothing, on one GPU; run it again to go on where it stopped.
#
#     benchmarks/reproduce.sh PROMPTS.json OUT [flags of benchmarks/experiment.py]
#
# PART=experiment  real models: tables, pictures and the compact archive in OUT (flags say how much;
#                  --max_seconds 560 ends a call in good order)
# PART=shapes      Llama-3-8B generator and reward backbone (ArmoRM's) with random weights, one
#                  prompt: seconds by phase, rows and lengths by round, predicted and measured peak
# Without PART both. What OUT/full holds is packed into OUT/full.tar.gz, which is unpacked first
# where OUT/full is missing. PYTHON names the interpreter.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: reproduce.sh PROMPTS.json OUT [flags of experiment.py]" >&2
    exit 2
fi
prompts=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
part=${PART:-all}
case $part in
experiment | shapes | all) ;;
*) echo "reproduce.sh: error: PART must be experiment, shapes or all, got $part" >&2; exit 2 ;;
esac
mkdir -p "$out" || exit 2

if [ "$part" = experiment ] || [ "$part" = all ]; then
    if [ -e "$out/full.tar.gz" ] && [ ! -d "$out/full" ]; then
        tar -xzf "$out/full.tar.gz" -C "$out"
    fi
    "$python" "$here/experiment.py" --out "$out" --data_filename "$prompts" "$@"
    if [ -d "$out/full" ]; then
        tar -czf "$out/full.tar.gz" -C "$out" --exclude ".*" full
    fi
fi

if [ "$part" = shapes ] || [ "$part" = all ]; then
    bound="--max_tokens 8000 --max_gen_tokens 8000"
    "$python" "$here/bench_run.py" --shape llama-3-8b --prompt 128 --repeats 0 --runs \
        "--speculative_rejection --alpha 0.5 $bound" "--batch_size 120 $bound" | tee "$out/shapes.log"
fi
