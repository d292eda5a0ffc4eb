#!/bin/sh
# Compares every CUDA operation with its CPU implementation and whole models with PyTorch's numbers, and runs steps that
# are not finite, on the first GPU.
#
#     tests/gpu/ops.sh [directory of test binaries]
#
# XLAUNCH_LOG_FALLBACK=1 prints which kernel was selected for each shape.
#
# Without a directory, cargo builds the tests. A directory, for hosts without cargo, contains the binaries cuda_ops,
# goldens and nonfinite, as built by `cargo test --no-run --test NAME`.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if [ $# -eq 0 ]; then
    cd "$root"
    cargo test -p xlaunch-engine --test cuda_ops -- --nocapture --test-threads=1
    cargo test -p xlaunch-worker --test goldens -- --nocapture --test-threads=1
    cargo test -p xlaunch-worker --test nonfinite -- --nocapture --test-threads=1
else
    binaries=$(cd "$1" && pwd)
    cd "$root/worker"
    failed=0
    "$binaries/cuda_ops" --nocapture --test-threads=1 || failed=1
    "$binaries/goldens" --nocapture --test-threads=1 || failed=1
    "$binaries/nonfinite" --nocapture --test-threads=1 || failed=1
    exit $failed
fi
