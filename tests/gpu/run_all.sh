#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests, with those of Triton's kernels, those of the whole GPU's memory by
# themselves, a stress test, torch's own databases of operators, verdicts on captures, and random programs. What may run beside
# each other does, on all GPUs of the machine.
# Usage: tests/gpu/run_all.sh FOLDER [pytest options but -k and -m]; logs go there, and a line for each part as it ends.
# Tests of FlashInfer wait until its modules are built, side by side, while the others run. A part that is cut says how many of its
# tests remain.
# PARTS="tests flashinfer distributed alone" runs these alone.
set -uo pipefail
out=$(mkdir -p "${1:?usage: tests/gpu/run_all.sh FOLDER [pytest options]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
cores=$(nproc) # before OMP_NUM_THREADS is set, which nproc obeys
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
python=${PYTHON:-python3}
gpus=$(nvidia-smi --list-gpus | wc -l)
# A worker's process takes 1 GiB for its context and libraries, and some tests take up to 10 more.
gib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | awk 'NR == 1 { print int($1 / 1024) }')
most=$((gpus * (gib / 6 < 24 ? gib / 6 : 24)))
every=$(seq -s, 0 $((gpus - 1)))
workers=${WORKERS:-$((cores * 3 / 4 < most ? cores * 3 / 4 : most))}
few=$((workers < 8 ? 1 : workers / 4)) # of these for the tests of FlashInfer
tests=("$python" -m pytest -q -p no:cacheprovider)

# part NAME GPU SECONDS COMMAND...: one part on a GPU, counted from 0 and around.
part() {
    local name=$1 gpu=$(($2 % gpus)) limit=$3
    shift 3
    [[ -z ${PARTS:-} || " $PARTS " == *" ${name%_*} "* ]] || return 0
    CUDA_VISIBLE_DEVICES=${GPUS:-$gpu} timeout -s INT "$limit" "$@" >"$out/$name.log" 2>&1
    local status=$?
    printf '%5d s  %-18s status %d  %s\n' "$SECONDS" "$name" "$status" "$(tail -n 1 "$out/$name.log")"
    # Each was printed as it came, and again in the summary, which a run that is cut does not have.
    grep -hE '^(FAILED|ERROR|RUNNING|REMAINING)' "$out/$name.log" | awk '!known[$2]++' | cut -c 1-300
    ((status)) && echo "$name" >>"$out/failed"
    return 0
}

rm -f "$out/failed" "$out/parity.json"
on_gpus=("${tests[@]}" tests/gpu tests/fused --ignore tests/gpu/test_cuda_distributed.py -m "not alone")
TESTS_SPREAD=1 GPUS=$every part tests 0 "${TIMEOUT:-400}" "${on_gpus[@]}" -k "not flashinfer" -n $((workers > few ? workers - few : 1)) "$@" &
{
    part flashinfer_modules 0 "${TIMEOUT:-400}" "$python" -m tests.gpu.build_flashinfer
    TESTS_SPREAD=1 GPUS=$every part flashinfer 0 "${TIMEOUT:-400}" "${on_gpus[@]}" -k flashinfer -n "$few" "$@"
} &
if ((gpus > 1)); then
    GPUS=0,1 part distributed 0 "${TIMEOUT:-400}" "${tests[@]}" tests/gpu/test_cuda_distributed.py -n 4 "$@" &
fi
for process in 0 1 2 3; do
    part "stress_$process" 1 400 "$python" -m tests.stress --device cuda --replays 12500 --modules 50 --seconds 300 \
        --seed $((process * 10000)) &
done
((gpus > 2)) || wait
part sweeps 2 400 "$python" -m tests.sweeps --device cuda --modes no_grad,inference_mode --samples 5 \
    --workers $((workers < 14 ? workers : 14)) --seconds 300 --out "$out/sweeps.json" &
part parity 3 400 "$python" -m tests.parity --device cuda --seconds 300 --json "$out/parity.json" &
part fuzz 3 400 "$python" -m tests.fuzz --calls 20000 --device cuda --workers $((workers < 6 ? workers : 6)) &
wait
part alone 0 200 "${tests[@]}" tests/gpu -m alone "$@"
if [[ -e "$out/failed" ]]; then
    printf 'failed: %s\n' "$(tr '\n' ' ' <"$out/failed")"
    exit 1
fi
