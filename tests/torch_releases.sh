#!/usr/bin/env bash
# Runs the core's tests with several releases of torch, each in an environment of its own: the oldest that is supported, CI's, the
# newest. Needs no GPU; where the index has no CPU build of a release, its CUDA build is fetched (5 GB), which runs on the CPU, too.
#
#   tests/torch_releases.sh                            # 2.9.1, 2.13.0, 2.15.0
#   tests/torch_releases.sh FOLDER 2.14.1              # these; environments are kept in the folder, and used again
#   TESTS="tests/manager" tests/torch_releases.sh      # other tests
#
# Prints a line for each release, and ends with 1 if one failed or could not be installed.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
shift || true
releases=("$@")
((${#releases[@]})) || releases=(2.9.1 2.13.0 2.15.0)
read -ra tests <<<"${TESTS:-tests/batch tests/manager tests/module tests/graph tests/test_config.py tests/test_cli.py}"
export PIP_QUIET=2 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
failed=0
for release in "${releases[@]}"; do
    env=$folder/torch-$release
    if [[ ! -x $env/bin/pytest ]]; then
        "${PYTHON:-python3}" -m venv "$env" &&
            "$env/bin/pip" install "torch==$release" tqdm numpy expecttest hypothesis pytest pytest-timeout pytest-xdist
        if (($?)); then
            echo "torch $release: could not be installed here"
            failed=1
            continue
        fi
    fi
    found=$("$env/bin/python" -c "import torch; print(torch.__version__)")
    "$env/bin/python" -m pytest -q -n "${WORKERS:-auto}" -p no:cacheprovider "${tests[@]}" >"$folder/torch-$release.log" 2>&1
    status=$?
    ((status == 0)) || failed=1
    echo "torch $found: $(grep -E '(passed|failed|error).* in [0-9.]+s' "$folder/torch-$release.log" | tail -1) (exit status $status, $folder/torch-$release.log)"
done
exit $failed
