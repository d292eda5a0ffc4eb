#!/bin/sh
# A training run on several GPUs with a worker that is killed, and one that is interrupted by Ctrl-C.
#
#     tests/gpu/faults.sh BINARY NPROC
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
binary=$1
nproc=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 "$root/tests/gpu/tokens.py" "$work/tokens.bin" 2000000
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

start() {
    "$binary" --nproc "$nproc" "$root/deploy/llama-28m.toml" --set "data.train=[\"$work/tokens.bin\"]" \
        --set train.steps=100000 --set job.output="\"$work/$1\"" > "$work/$1.txt" 2>&1 &
    launcher=$!
    for _ in $(seq 300); do
        grep -q "step 1/" "$work/$1.txt" && break
        sleep 0.1
    done
}

finish() {
    begin=$(date +%s.%N)
    wait "$launcher"
    code=$?
    end=$(date +%s.%N)
    echo "exit code $code after $(echo "$end - $begin" | bc 2>/dev/null || python3 -c "print($end - $begin)") s"
    tail -n "$1" "$2"
    echo "processes left: $(pgrep -c -f 'xlaunch worker' || true)"
    echo "GPU memory in use: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader | tr '\n' ' ')"
}

echo "== rank 1 is killed"
start killed
sleep 2
kill -KILL "$(pgrep -P "$launcher" | sed -n 2p)"
finish 12 "$work/killed.txt"
echo "== Ctrl-C"
start interrupted
sleep 2
kill -INT "$launcher"
finish 8 "$work/interrupted.txt"
ls "$work"/interrupted/*/latest/checkpoints
