"""Random combinations of keys: losses and gradient norms on a GPU agree with those of the CPU.

    python3 tests/gpu/combinations.py --seeds 0 100 --jobs 8

Each seed is a small model with random sizes and features, a treatment of documents and an optimizer; every fourth one
trains adapters of such a model. The CPU trains it in fp32 for a few steps. On the GPU it trains in fp32, and in tf32,
bf16 and FP8 with random settings that change how a step is executed, but not its result. The checkpoint continues a
prompt with the same tokens on both, unless the two most likely ones are close. Combinations that the CPU refuses are
not counted.

With `--nproc`, ranks also divide experts and state at random. Prints a line for each difference; exit code 1 if there
is one.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import runner

sys.path.append(str(runner.ROOT / "tests/peers"))
import byte_vocabulary

STEPS = 4
# Relative differences of losses and of gradient norms.
TOLERANCES = {"fp32": (1e-4, 2e-3), "tf32": (2e-3, 3e-2), "bf16": (2e-2, 0.15), "fp8": (4e-2, 0.4)}


def pick(rng, *values):
    return values[rng.randrange(len(values))]


def sometimes(rng, share, **settings):
    return settings if rng.random() < share else {}


def model(rng, fp8):
    """Returns random keys of `[model]`. With `fp8`, sizes are multiples of 16."""
    head_dim = pick(rng, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256) if fp8 else \
        pick(rng, 8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 136, 160, 192, 224, 256)
    kv_heads = pick(rng, 1, 1, 2, 3)
    unit = 16 if fp8 else 8
    found = {"arch": pick(rng, "llama", "gpt2"), "layers": rng.randint(1, 3), "heads": kv_heads * pick(rng, 1, 2, 3, 4),
             "kv_heads": kv_heads, "head_dim": head_dim, "dim": unit * rng.randint(2, 40),
             "ffn": unit * rng.randint(1, 60), "seq": unit * rng.randint(1, 40) if fp8 else rng.randint(5, 640),
             "vocab": pick(rng, 264, 272, 300, 511, 1000, 5000), "tied": rng.random() < 0.5,
             "norm": pick(rng, "layer", "rms"), "norm_place": pick(rng, "pre", "pre", "post", "both"),
             "qk_norm": pick(rng, "none", "none", "head", "full"), "qkv_bias": rng.random() < 0.4,
             "attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3,
             "activation": pick(rng, "silu", "silu", "gelu", "gelu_tanh", "gelu_tanh", "relu2", "quick_gelu"),
             "gated": rng.random() < 0.6, "positions": pick(rng, "rotary", "rotary", "learned")}
    found |= sometimes(rng, 0.2, norm_offset=True)
    found |= sometimes(rng, 0.15, head_bias=True)
    found |= sometimes(rng, 0.15, parallel=pick(rng, "shared_norm", "two_norms"))
    found |= sometimes(rng, 0.2, rope_fraction=pick(rng, 0.25, 0.5, 0.75))
    found |= sometimes(rng, 0.15, no_rope_every=2)
    found |= sometimes(rng, 0.3, window=pick(rng, 1, 5, 16, 64, 100, 128), window_pattern=pick(rng, 0, 2))
    found |= sometimes(rng, 0.15, attention_sinks=True)
    found |= sometimes(rng, 0.15, attention_softcap=pick(rng, 5.0, 50.0))
    found |= sometimes(rng, 0.15, logit_softcap=pick(rng, 5.0, 30.0))
    found |= sometimes(rng, 0.15, query_scale=0.2)
    found |= sometimes(rng, 0.15, embedding_scale=pick(rng, 0.0, 3.0))
    found |= sometimes(rng, 0.15, residual_scale=0.5)
    found |= sometimes(rng, 0.15, logit_scale=0.5)
    if found["gated"]:
        found |= sometimes(rng, 0.1, glu_limit=0.5, glu_offset=1.0)
    if rng.random() < 0.4:
        experts = pick(rng, 2, 4, 8, 16, 33)
        found |= {"experts": experts, "experts_per_token": rng.randint(1, min(experts, 8)),
                  "expert_ffn": unit * rng.randint(1, 20), "router": pick(rng, "softmax", "sigmoid"),
                  "normalise": rng.random() < 0.5}
        found |= sometimes(rng, 0.3, router_bias=True)
        found |= sometimes(rng, 0.3, router_logit_bias=True)
        found |= sometimes(rng, 0.3, routed_scale=2.0)
        found |= sometimes(rng, 0.3, shared_experts=pick(rng, 1, 2), shared_gate=rng.random() < 0.5)
        if found["layers"] > 1:
            found |= sometimes(rng, 0.3, dense_layers=1)
    return {f"model.{key}": value for key, value in found.items()}


def training(rng):
    """Returns random keys that both devices get."""
    batch, accumulate = rng.randint(1, 3), pick(rng, 1, 1, 2)
    found = {"train.batch": batch, "train.accumulate": accumulate, "train.lr": 3e-4, "train.warmup": 0,
             "data.documents": pick(rng, "joined", "joined", "masked", "packed"),
             "train.optimizer": pick(rng, "adamw", "adamw", "muon"), "job.seed": rng.randint(1, 1000)}
    if found["train.optimizer"] == "muon":
        found["muon.lr"] = 2e-3
        found |= sometimes(rng, 0.5, **{"muon.normuon": True})
        found |= sometimes(rng, 0.5, **{"muon.cautious": False})
    return found


def execution(rng, ranks, adapted):
    """Returns random keys that do not change results, except for rounding."""
    found = {"train.recompute": pick(rng, "none", "cheap", "block"),
             "engine.exec": pick(rng, "graph", "graph", "stream"), "engine.deterministic": rng.random() < 0.4}
    found |= sometimes(rng, 0.3, **{"train.classifier_chunk": pick(rng, 32, 50, 100)})
    found |= sometimes(rng, 0.2, **{"engine.pool": pick(rng, "off", "plan")})
    if ranks > 1:
        found |= sometimes(rng, 0.5, **{"comm.bucket_mb": pick(rng, 0.01, 0.1)})
        found |= sometimes(rng, 0.2, **{"comm.overlap": False})
        if not adapted:
            found["comm.shard"] = pick(rng, "none", "optimizer", "gradients", "parameters")
    return found


def train(binary, ranks, config, out, settings):
    """Returns losses and gradient norms of a run, or exit code and messages."""
    command = [str(binary), "--nproc", str(ranks), str(config), "--set", f"job.output={out}"]
    command += runner.overrides(settings)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        return None, f"no end after 240 s: {' '.join(command)}"
    if done.returncode != 0:
        return None, f"exit {done.returncode}: {done.stderr.strip()[-1500:]}"
    return [(step["train/loss"], step["train/grad_norm"]) for step in runner.steps(out)], ""


def newest(out):
    return next(pathlib.Path(out).glob("*/latest"))


def continued(binary, run, adapter, device):
    command = [str(binary), "generate", str(run), "--prompt", "The pool", "--max-tokens", "24", "--temperature", "0",
               "--device", device, "--precision", "fp32"] + (["--adapter", str(adapter)] if adapter else [])
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}: {done.stderr.strip()[-1500:]}"


def difference(found, expected, precision):
    """Describes the first step whose loss or gradient norm is too far from the expected one."""
    if len(found) != len(expected):
        return f"{len(found)} steps instead of {len(expected)}"
    for step, (pair, right) in enumerate(zip(found, expected), 1):
        for name, value, reference, tolerance in zip(("loss", "gradient norm"), pair, right, TOLERANCES[precision]):
            if not abs(value - reference) <= tolerance * abs(reference) + 1e-6:
                return f"step {step}: {name} {value:.6g} instead of {reference:.6g}"
    return None


def one(options, scratch, data, seed):
    """Returns the number of GPU runs and the differences of a seed; no run if the CPU refuses it, or time is up."""
    if time.monotonic() > options.end:
        return 0, []
    rng = random.Random(seed)
    fp8 = rng.random() < 0.3
    settings = model(rng, fp8)
    common = training(rng) | {"train.steps": STEPS, "data.train": str(data), "data.val": [], "train.eval_every": 0,
                              "train.sample": 0, "checkpoint.every": 0}
    out = scratch / str(seed)
    config = scratch / f"{seed}.toml"
    config.write_text("")
    adapter = None
    if rng.random() < 0.25:
        base = train(options.binary, options.nproc, config, out / "base", settings | common | {
            "engine.device": "cpu", "train.steps": 1, "train.optimizer": "adamw"})
        if base[0] is None:
            return 0, [] if base[1].startswith("exit 2") else [f"seed {seed}, base on the CPU: {base[1]}"]
        adapter = newest(out / "base")
        settings = {"checkpoint.init": str(adapter), "lora.rank": pick(rng, 1, 4, 8, 16), "lora.targets": "all-linear",
                    "model.seq": settings["model.seq"]}
        settings |= sometimes(rng, 0.3, **{"lora.targets": pick(rng, ["o"], ["up"], ["down"])})
        common["train.optimizer"] = "adamw"
        common = {key: value for key, value in common.items() if not key.startswith("muon.")}
    keys = settings | common | {"engine.device": "cpu"}
    expected, why = train(options.binary, options.nproc, config, out / "cpu", keys)
    if expected is None:
        if options.verbose:
            print(f"seed {seed}: {why}")
        return 0, [] if why.startswith("exit 2") else [f"seed {seed} on the CPU: {why}"]
    precisions = (["fp8"] if fp8 else []) + ["bf16", "bf16"] + (["tf32"] if rng.random() < 0.3 else [])
    runs = [("fp32", {})] + [(precision, execution(rng, options.nproc, adapter)) for precision in precisions]
    found = []
    for number, (precision, more) in enumerate(runs):
        if number == 1 and options.nproc > 1 and settings.get("model.experts", 1) % options.nproc == 0:
            more |= {"comm.experts": options.nproc, "comm.shard": "optimizer"}
        keys = settings | common | more | {"engine.device": options.device, "engine.precision": precision}
        if options.device == "cpu":
            keys["engine.precision"] = "fp32"
        values, why = train(options.binary, options.nproc, config, out / f"gpu-{number}", keys)
        why = why or difference(values, expected, precision)
        if why:
            found.append(f"seed {seed}, {precision}: {why}\n    {' '.join(runner.overrides(keys))}")
    run = newest(out / "cpu")
    texts = [continued(options.binary, adapter or run, run if adapter else None, device)
             for device in ("cpu", options.device)]
    if texts[0] != texts[1]:
        found.append(f"seed {seed}, text: {texts[0]!r} on the CPU, {texts[1]!r} on the GPU\n    "
                     f"{' '.join(runner.overrides(settings | common))}")
    return len(runs), found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 100], metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="no seed is begun after this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    options.binary = options.binary.resolve()
    options.end = time.monotonic() + options.seconds
    if options.device == "cuda":
        print(runner.hardware())
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        texts = sorted((runner.ROOT / "docs").glob("*.md"))
        data, tokenizer = scratch / "data", scratch / "tokenizer.json"
        byte_vocabulary.write(tokenizer, 256)
        between = {"id": 256, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
                   "normalized": False, "special": True}
        tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"added_tokens": [between]}))
        subprocess.run([options.binary, "data", "prepare", "--tokenizer", tokenizer, "--eot", "<end>", "--documents",
                        "line", "--output", data, *texts], check=True, capture_output=True)
        runs = used = differences = 0
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
            for count, found in threads.map(lambda seed: one(options, scratch, data, seed), range(*options.seeds)):
                runs, used, differences = runs + count, used + (count > 0), differences + len(found)
                for line in found:
                    print(line, flush=True)
    print(f"{used} combinations, {runs} runs, {differences} differences")
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()
