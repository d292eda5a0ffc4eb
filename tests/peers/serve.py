"""Exports a trained model and serves it with another program, whose greedy text must equal that of xlaunch.

    python3 tests/peers/serve.py --binary target/release/xlaunch [--steps 500]     # needs transformers[serving], torch

Trains the README's job (or fewer steps of it), exports it in fp32, starts `transformers serve`, and compares the text
of /v1/completions with `xlaunch generate` for a few prompts.
"""

import argparse
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = ["xlaunch ", "A rank that", "The checkpoint is", "# "]
TOKENS, LIMIT = 48, 180


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT) as reply:
        return json.load(reply)


def wait_until_ready(url, server):
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    sys.exit(f"transformers serve is not ready after {LIMIT} s, exit code {server.poll()}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/xlaunch")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    binary = str(options.binary.resolve())
    with tempfile.TemporaryDirectory(prefix="xs-") as scratch:
        model, port = f"{scratch}/model", free_port()
        subprocess.run([binary, "--nproc", "2", "deploy/train.toml", "--set", f"job.output={scratch}/runs",
                        "--set", f"train.steps={options.steps}"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run([binary, "export", f"{scratch}/runs/train/latest", "--output", model], check=True,
                       capture_output=True)
        serve = str(pathlib.Path(sys.executable).parent / "transformers")
        with open(f"{scratch}/log", "w") as log:
            server = subprocess.Popen([serve, "serve", model, "--port", str(port), "--device", "cpu", "--dtype",
                                       "float32"], stdout=log, stderr=log)
            try:
                url, equal = f"http://127.0.0.1:{port}", 0
                wait_until_ready(url, server)
                for prompt in PROMPTS:
                    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                    theirs = post(f"{url}/v1/completions", body)["choices"][0]["text"]
                    command = [binary, "generate", model, "--prompt", prompt, "--max-tokens", str(TOKENS),
                               "--temperature", "0", "--device", "cpu", "--json"]
                    ours = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["text"]
                    equal += ours == theirs
                    print(f"{'ok  ' if ours == theirs else 'FAIL'} {prompt!r}: {ours!r}"
                          + ("" if ours == theirs else f", transformers {theirs!r}"))
            finally:
                server.terminate()
                server.wait()
    print(f"{equal} of {len(PROMPTS)} texts equal")
    sys.exit(equal != len(PROMPTS))


if __name__ == "__main__":
    main()
