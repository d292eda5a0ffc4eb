"""Runs xlaunch and reads what it wrote: shared by the suites of this directory."""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = {"A": "deploy/llama-28m.toml", "B": "deploy/gpt2-124m.toml"}
# The sizes of these models, for PyTorch; the others among them have no configuration of their own.
SIZES = {
    "A": dict(arch="llama", layers=12, heads=12, kv_heads=12, dim=384, ffn=1536, seq=256, vocab=50257, tied=False),
    "B": dict(arch="gpt2", layers=12, heads=12, kv_heads=12, dim=768, ffn=3072, seq=1024, vocab=50257, tied=True),
    "gpt2-medium": dict(arch="gpt2", layers=24, heads=16, kv_heads=16, dim=1024, ffn=4096, seq=1024, vocab=50257,
                        tied=True),
    "gpt2-xl": dict(arch="gpt2", layers=48, heads=25, kv_heads=25, dim=1600, ffn=6400, seq=1024, vocab=50257,
                    tied=True),
    "llama-1b": dict(arch="llama", layers=16, heads=32, kv_heads=8, dim=2048, ffn=8192, seq=2048, vocab=128256,
                     tied=True),
    "llama-1b-8k": dict(arch="llama", layers=16, heads=32, kv_heads=8, dim=2048, ffn=8192, seq=8192, vocab=128256,
                        tied=True),
    "llama-3b": dict(arch="llama", layers=28, heads=24, kv_heads=8, dim=3072, ffn=8192, seq=2048, vocab=128256,
                     tied=True),
    "llama-8b": dict(arch="llama", layers=32, heads=32, kv_heads=8, dim=4096, ffn=14336, seq=4096, vocab=128256,
                     tied=False),
    "heads-80": dict(arch="llama", layers=12, heads=16, kv_heads=16, dim=1280, ffn=3456, seq=2048, vocab=50257,
                     tied=False),
    "heads-96": dict(arch="llama", layers=12, heads=8, kv_heads=8, dim=768, ffn=2048, seq=2048, vocab=50257,
                     tied=False),
    "heads-256": dict(arch="llama", layers=12, heads=4, kv_heads=4, dim=1024, ffn=4096, seq=2048, vocab=50257,
                      tied=False),
    "wide": dict(arch="llama", layers=4, heads=32, kv_heads=32, dim=4096, ffn=11008, seq=2048, vocab=50257, tied=False),
    "long": dict(arch="llama", layers=12, heads=6, kv_heads=6, dim=768, ffn=2048, seq=16384, vocab=50257, tied=False),
    "long-4k": dict(arch="llama", layers=12, heads=8, kv_heads=8, dim=1024, ffn=2816, seq=4096, vocab=50257,
                    tied=False),
    "smollm-size": dict(arch="llama", layers=30, heads=9, kv_heads=3, dim=576, ffn=1536, seq=2048, vocab=50257,
                         tied=True),
    "vocab-128k": dict(arch="llama", layers=12, heads=12, kv_heads=12, dim=768, ffn=2048, seq=1024, vocab=128256,
                       tied=True),
    "qwen3-0.6b": dict(arch="llama", layers=28, heads=16, kv_heads=8, head_dim=128, dim=1024, ffn=3072, seq=2048,
                       vocab=151936, tied=True, qk_norm="head", norm_eps=1e-6, rope_theta=1e6),
    "qwen2.5-0.5b": dict(arch="llama", layers=24, heads=14, kv_heads=2, dim=896, ffn=4864, seq=2048, vocab=151936,
                         tied=True, qkv_bias=True, norm_eps=1e-6, rope_theta=1e6),
    "speedrun-124m": dict(arch="llama", layers=12, heads=6, kv_heads=6, dim=768, ffn=2048, seq=1024, vocab=50257,
                          tied=True, qk_norm="head", norm_eps=1e-6),
    "smollm2-135m": dict(arch="llama", layers=30, heads=9, kv_heads=3, dim=576, ffn=1536, seq=2048, vocab=49152,
                         tied=True, rope_theta=1e5),
    "olmo2-1b": dict(arch="llama", layers=16, heads=16, kv_heads=16, dim=2048, ffn=8192, seq=4096, vocab=100352,
                     tied=False, norm_place="post", qk_norm="full", norm_eps=1e-6, rope_theta=5e5),
    "gemma3-1b": dict(arch="llama", layers=26, heads=4, kv_heads=1, head_dim=256, dim=1152, ffn=6912, seq=2048,
                      vocab=262144, tied=True, norm_place="both", norm_offset=True, qk_norm="head", norm_eps=1e-6,
                      activation="gelu_tanh", window=512, window_pattern=6, rope_theta=1e6, windowed_rope_theta=1e4,
                      embedding_scale=0.0),
    "mistral-8": dict(arch="llama", layers=8, heads=32, kv_heads=8, dim=4096, ffn=14336, seq=2048, vocab=50257,
                      tied=False, rope_theta=1e6),
    "pythia-160m": dict(arch="gpt2", layers=12, heads=12, kv_heads=12, dim=768, ffn=3072, seq=2048, vocab=50304,
                        tied=False, positions="rotary", parallel="two_norms", activation="gelu", rope_fraction=0.25),
    "ernie4.5-0.3b": dict(arch="llama", layers=18, heads=16, kv_heads=2, head_dim=128, dim=1024, ffn=3072, seq=2048,
                          vocab=103424, tied=True, rope_theta=5e5),
    "exaone4-1.2b": dict(arch="llama", layers=30, heads=32, kv_heads=8, dim=2048, ffn=4096, seq=2048, vocab=102400,
                         tied=True, norm_place="post", qk_norm="head", rope_theta=1e6),
    # Eight blocks of Arcee's AFM-4.5B.
    "arcee-8": dict(arch="llama", layers=8, heads=20, kv_heads=4, dim=2560, ffn=18432, seq=2048, vocab=50257,
                    tied=False, gated=False, activation="relu2"),
    # Blocks of OLMoE and of Qwen3-30B-A3B, and a small mixture.
    "olmoe-4": dict(arch="llama", layers=4, heads=16, kv_heads=16, dim=2048, ffn=1024, seq=2048, vocab=50304,
                    tied=False, qk_norm="full", experts=64, experts_per_token=8, normalise=False),
    "qwen3-moe-4": dict(arch="llama", layers=4, heads=32, kv_heads=4, head_dim=128, dim=2048, ffn=768, seq=2048,
                        vocab=50304, tied=False, qk_norm="head", norm_eps=1e-6, rope_theta=1e6, experts=128,
                        experts_per_token=8),
    "experts-16": dict(arch="llama", layers=12, heads=12, kv_heads=12, dim=768, ffn=768, seq=1024, vocab=50304,
                       tied=False, experts=16, experts_per_token=2),
    # Blocks of Qwen1.5-MoE-A2.7B, whose shared experts have no gate here.
    "qwen1.5-moe-4": dict(arch="llama", layers=4, heads=16, kv_heads=16, dim=2048, ffn=1408, seq=2048, vocab=50304,
                          tied=False, qkv_bias=True, experts=60, experts_per_token=4, shared_experts=4,
                          normalise=False),
}
# Sequences per GPU.
BATCHES = {"A": 32, "B": 32, "gpt2-medium": 16, "gpt2-xl": 8, "llama-1b": 16, "llama-1b-8k": 4, "llama-3b": 2,
           "llama-8b": 2, "heads-80": 8, "heads-96": 16, "heads-256": 8, "wide": 4, "long": 1, "long-4k": 4,
           "smollm-size": 8, "vocab-128k": 16, "qwen3-0.6b": 8, "qwen2.5-0.5b": 8, "smollm2-135m": 16,
           "speedrun-124m": 32, "olmo2-1b": 4, "gemma3-1b": 4, "mistral-8": 4, "pythia-160m": 16,
           "ernie4.5-0.3b": 8, "exaone4-1.2b": 8, "arcee-8": 4,
           "olmoe-4": 8, "qwen3-moe-4": 8, "experts-16": 32, "qwen1.5-moe-4": 8}
# Shapes that nothing was tuned for, with their sequences per GPU.
UNFAMILIAR = {
    "llama-512": (dict(layers=16, heads=24, kv_heads=4, dim=1536, ffn=4096, seq=512, vocab=32000), 48),
    "gpt2-large": (dict(arch="gpt2", layers=36, heads=20, kv_heads=20, dim=1280, ffn=5120, seq=1024, tied=True), 12),
    "smollm2-360m": (dict(layers=32, heads=15, kv_heads=5, dim=960, ffn=2560, seq=2048, vocab=49152, tied=True), 8),
    "odd-1000": (dict(layers=12, heads=12, kv_heads=12, dim=768, ffn=2048, seq=1000, vocab=50000), 20),
    "one-1024": (dict(layers=12, heads=12, kv_heads=12, dim=768, ffn=2048, seq=1024), 1),
    "long-32k": (dict(layers=8, heads=8, kv_heads=2, dim=1024, ffn=2816, seq=32768, vocab=32000), 1),
    "heads-48": (dict(layers=12, heads=16, kv_heads=16, dim=768, ffn=2048, seq=1024), 24),
    "heads-112": (dict(layers=12, heads=8, kv_heads=8, dim=896, ffn=2432, seq=2048), 12),
    "wide-5120": (dict(layers=3, heads=40, kv_heads=8, dim=5120, ffn=13824, seq=2048, vocab=32000), 4),
    "mixtral-4": (dict(layers=4, heads=32, kv_heads=8, dim=2048, ffn=7168, seq=2048, vocab=32000, experts=8,
                       experts_per_token=2), 8),
    "tiny-64": (dict(layers=6, heads=6, kv_heads=6, dim=384, ffn=1024, seq=64, vocab=256), 64),
}
SIZES |= {name: dict(arch="llama", vocab=50257, tied=False) | sizes for name, (sizes, _) in UNFAMILIAR.items()}
BATCHES |= {name: batch for name, (_, batch) in UNFAMILIAR.items()}
# Models whose parameters are divided among the GPUs, because a whole model with its optimizer does not fit into one.
DIVIDED = {"llama-8b"}


def hardware():
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    return f"{len(gpus)} x {gpus[0]}"


def tokens(path, count=8_000_000, models=("A",)):
    """Writes token ids that are below the vocabulary of each of these models to this path and returns it."""
    vocab = min(50257, *(SIZES[model]["vocab"] for model in models))
    command = [sys.executable, str(ROOT / "tests/gpu/tokens.py"), str(path), str(count), str(vocab)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def overrides(settings):
    """Returns configuration keys as `--set` options."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def configuration(model):
    """Returns the configuration file of a model, and settings for its sizes."""
    if model in MODELS:
        return ROOT / MODELS[model], {}
    sizes = SIZES[model]
    return ROOT / MODELS["A" if sizes["arch"] == "llama" else "B"], {f"model.{key}": sizes[key] for key in sizes}


def bench(command, **options):
    """Returns the JSON of `xlaunch bench train --json`; raises with stderr if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def share(found, key):
    """Formats a duration of a `bench train` as a share of its step."""
    return f"{100 * found[key] / found['step_ms']:.1f} %"


def clocks(found):
    """Formats the clocks of a `bench train` for a cell of a table."""
    clocks = found["clocks"]
    if clocks is None:
        return "-"
    reasons = " ".join(clocks["throttle_reasons"])
    return f"{clocks['sm_mhz']:.0f} MHz, {clocks['power_watts']:.0f} W{', ' if reasons else ''}{reasons}"


def check(what, ok, found=""):
    """Prints the result of a check. A failed check ends the script."""
    print(f"{'ok  ' if ok else 'FAIL'} {what}{f': {found}' if found else ''}", flush=True)
    if not ok:
        sys.exit(1)


def steps(out):
    """Returns the steps in the metrics of the newest run below this directory so far; empty if there is no run yet."""
    path = next(pathlib.Path(out).glob("*/latest/metrics.jsonl"), None)
    # The last line may be incomplete.
    lines = path.read_text().split("\n")[:-1] if path else []
    return [line for line in map(json.loads, lines) if "train/loss" in line]


def train(binary, model, data, nproc, **settings):
    """Runs a training job. Returns its steps from metrics.jsonl and its summary; raises with stderr if it fails."""
    config, sizes = configuration(model)
    settings = {"data.train": [str(data)], "data.val_fraction": 0.0, "train.eval_every": 0} | sizes | settings
    with tempfile.TemporaryDirectory() as out:
        command = [str(binary), "--nproc", str(nproc), str(config), "--set", f"job.output={out}"]
        command += overrides(settings)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
        written = steps(out)
        if not written:
            raise RuntimeError(f"{' '.join(command)}: no step in its metrics.jsonl")
        return written, done.stdout
