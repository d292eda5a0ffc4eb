#!/bin/sh
# Tests of the memory pool on the first GPU, training with the pool on, planned and off, and the cost of an allocation
# compared with the driver's and PyTorch's allocators.
#
#     tests/gpu/alloc.sh [directory of binaries]
#
# Without a directory, cargo builds everything. A directory, for hosts without cargo, contains the test binaries
# pool_cuda (the pool's tests/cuda.rs) and pool_modes, as built by `cargo test --no-run --test NAME`, and pool_bench, as
# built by `cargo bench -p xlaunch-pool --no-run`.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
grep -m 1 'model name' /proc/cpuinfo
failed=0
if [ $# -eq 0 ]; then
    cd "$root"
    cargo test -p xlaunch-pool --test cuda -- --nocapture --test-threads=1 || failed=1
    cargo test -p xlaunch-worker --test pool_modes -- --nocapture --test-threads=1 || failed=1
    cargo bench -p xlaunch-pool || failed=1
else
    binaries=$(cd "$1" && pwd)
    "$binaries/pool_cuda" --nocapture --test-threads=1 || failed=1
    "$binaries/pool_modes" --nocapture --test-threads=1 || failed=1
    "$binaries/pool_bench" || failed=1
fi
program=$(mktemp)
flags=$(python3 - <<'END'
import os, torch
from torch.utils import cpp_extension as c
libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
includes = " ".join("-I" + path for path in c.include_paths("cuda"))
print(includes, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-L" + libraries,
      "-Wl,-rpath," + libraries, "-Wl,--no-as-needed -lc10 -lc10_cuda")
END
) || flags=
# shellcheck disable=SC2086  # the flags are several words
if [ -n "$flags" ] && g++ -O2 -std=c++17 "$root/tests/gpu/torch_alloc.cpp" -o "$program" $flags; then
    "$program"
else
    echo "  not run: PyTorch's caching allocator: torch_alloc.cpp does not compile here"
fi
rm -f "$program"
exit $failed
