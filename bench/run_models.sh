#!/usr/bin/env bash
# Other people's models on every GPU of this machine at once: first call, a call and memory of vision, diffusion and
# encoder models, and generate of transformers' families, with all arms, those that compile included.
# Usage: bench/run_models.sh FOLDER [PATTERN]; writes a pytest-benchmark JSON and a log for each model there.
# PATTERN chooses models, each of which is a line such as `generate qwen2` or `models timm vit`, as grep -E does.
# A model's arms run one after the other on one GPU; a GPU that is done takes the next model.
# In the environment: CUDA_VISIBLE_DEVICES, these GPUs alone; BENCH_PROCESSES, processes of each arm (1).
set -uo pipefail
out=$(mkdir -p "${1:?usage: bench/run_models.sh FOLDER [PATTERN]}" && cd "$1" && pwd)
pattern=${2:-.}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" BENCH_PROCESSES="${BENCH_PROCESSES:-1}"
export out python="${PYTHON:-python3}"
gpus=${CUDA_VISIBLE_DEVICES-$("$python" -c "import torch; print(*range(torch.cuda.device_count()), sep=',')")}
export gpus
# What takes longest first, so that no GPU is left with a long one at the end.
jobs=$("$python" -c "from bench.models_first_call import zoo
from bench.transformers_generate import families
print(*(f'generate {name}' for name in families.FAMILIES), *(f'models {name}' for name in reversed(zoo.available())), sep='\n')") || exit
jobs=$(grep -E -- "$pattern" <<<"$jobs") || { echo "no model matches $pattern" >&2; exit 1; }
export BENCH_GENERATE_ARMS="${BENCH_GENERATE_ARMS:-plain,static-compiled,simplegraph}"
arms="from bench.models_first_call.model_arms import ARMS; print(*ARMS, sep=',')"
export BENCH_MODEL_ARMS="${BENCH_MODEL_ARMS:-$("$python" -c "$arms")}"

measure() { # KIND MODEL, on the GPU of this slot
    local test=bench/models_first_call/test_models.py file="$out/${1}_${2// /_}" status=0
    [[ $1 == generate ]] && test=bench/transformers_generate/test_transformers_generate.py
    IFS=, read -ra ids <<<"$gpus"
    CUDA_VISIBLE_DEVICES="${ids[$SLOT]-}" BENCH_FAMILIES="$2" BENCH_MODELS="$2" \
        "$python" -m pytest "$test" -q -s --benchmark-json "$file.json" >"$file.log" 2>&1 || status=1
    cat "$file.log"
    return "$status"
}
export -f measure
IFS=, read -ra ids <<<"$gpus"
workers=$((${#ids[@]} > 1 ? ${#ids[@]} : 1))
xargs -d '\n' -P "$workers" --process-slot-var=SLOT -I{} bash -c 'measure "${1%% *}" "${1#* }"' _ {} <<<"$jobs"
