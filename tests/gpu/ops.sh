#!/bin/sh
# Every CUDA operation against its CPU twin, and whole models against PyTorch's numbers, on the first GPU.
#
#     tests/gpu/ops.sh [directory of test binaries]
#
# XLAUNCH_TIMES=1 in the environment adds times of attention, by our own kernels and by cuDNN's where it is installed;
# XLAUNCH_LOG_FALLBACK=1 says which way each shape went.
#
# Without a directory, cargo builds the tests. With one, for hosts without cargo, it holds binaries named cuda_ops and
# goldens, as `cargo test --no-run` makes them.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if [ $# -eq 0 ]; then
    cd "$root"
    cargo test -p xlaunch-engine --test cuda_ops -- --nocapture --test-threads=1
    cargo test -p xlaunch-worker --test goldens -- --nocapture --test-threads=1
else
    binaries=$(cd "$1" && pwd)
    cd "$root/worker"
    failed=0
    "$binaries/cuda_ops" --nocapture --test-threads=1 || failed=1
    "$binaries/goldens" --nocapture --test-threads=1 || failed=1
    exit $failed
fi
