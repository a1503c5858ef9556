#!/usr/bin/env bash
# compute-sanitizer's memcheck over tests of the wrapper, of breaks and of failures, with pool memory really released between
# them, so that a replay that reads freed memory is an error and no luck.
# Usage: tests/gpu/memcheck.sh FOLDER [how many tests]; the findings go there. It needs compute-sanitizer, of CUDA's toolkit.
set -uo pipefail
out=$(mkdir -p "${1:?usage: tests/gpu/memcheck.sh FOLDER [how many tests]}" && cd "$1" && pwd)
most=${2:-60}
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TESTS_RELEASE_MEMORY=1
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)}
if [[ -z "$sanitizer" ]]; then
    echo "compute-sanitizer is not here: install CUDA's toolkit, or name it in SANITIZER." >&2
    exit 2
fi
files=(tests/gpu/test_cuda_wrapper.py tests/gpu/test_cuda_breaks.py tests/gpu/test_cuda_failures.py)
"$python" -m pytest -q --collect-only -p no:cacheprovider "${files[@]}" -m "not alone" | grep :: >"$out/all.txt"
# Every n-th, so that each file has some.
awk -v most="$most" -v count="$(wc -l <"$out/all.txt")" 'int(NR * most / count) != int((NR - 1) * most / count)' \
    "$out/all.txt" >"$out/chosen.txt"
mapfile -t chosen <"$out/chosen.txt"
# Refused captures are API errors on purpose; only accesses to memory count. Backtraces of the host would keep frames of
# Python, with the tensors of their local variables: what is captured would be refused.
timeout -s INT "${TIMEOUT:-480}" "$sanitizer" --tool memcheck --report-api-errors no --show-backtrace device --error-exitcode 66 \
    --log-file "$out/memcheck.log" "$python" -m pytest -q -x -p no:cacheprovider "${chosen[@]}" >"$out/tests.log" 2>&1
status=$?
printf '%d s, %d tests, status %d: %s\n' "$SECONDS" "${#chosen[@]}" "$status" "$(tail -n 1 "$out/tests.log")"
grep -E "Invalid|Error|SUMMARY|not supported" "$out/memcheck.log" | sort | uniq -c | head -n 20
exit "$status"
