#!/usr/bin/env bash
# The figures of one GPU in one go: host cost of a call, attention, eager breaks and mixed batches, the engine, speculative
# decoding, transformers' generate, vision and diffusion models, training steps, then the startup of every arm; most with the 8B shape.
# Usage: bench/run_gpu.sh FOLDER [pytest options]; writes a JSON file for each there.
set -uo pipefail
out=$(mkdir -p "${1:?usage: bench/run_gpu.sh FOLDER [pytest options]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
status=0
"$python" -m pytest bench/host_overhead/test_host_overhead.py -q --benchmark-json "$out/host_overhead.json" || status=$?
"$python" -m pytest bench/serve/test_attention_steps.py -q -s --benchmark-json "$out/attention.json" || status=$?
"$python" -m pytest bench/piecewise/test_piecewise.py -q -s --benchmark-json "$out/piecewise.json" || status=$?
"$python" -m pytest bench/serve/test_decode_steps.py bench/serve/test_agreement.py bench/startup/test_first_token.py \
    -q -s --benchmark-json "$out/engine.json" || status=$?
"$python" -m pytest bench/spec_decode/test_rounds.py -q -s --benchmark-json "$out/spec_decode.json" || status=$?
"$python" -m pytest bench/transformers_generate/test_transformers_generate.py -q -s \
    --benchmark-json "$out/transformers.json" || status=$?
"$python" -m pytest bench/models_first_call/test_models.py -q -s --benchmark-json "$out/models.json" || status=$?
"$python" -m pytest bench/training/test_training.py -q -s --benchmark-json "$out/training.json" || status=$?
"$python" -m pytest bench/startup/test_startup.py -q -s --benchmark-json "$out/startup.json" \
    --startup-model "${MODEL:-8b}" --startup-rounds "${ROUNDS:-2}" --startup-timeout "${TIMEOUT:-150}" "$@" || status=$?
exit "$status"
