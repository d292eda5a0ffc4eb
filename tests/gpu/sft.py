"""Fine-tuning on chats compared with trl's `SFTTrainer`, of all weights or of LoRA adapters, on one GPU.

    python3 tests/gpu/sft.py --binary target/release/xlaunch [--cases qwen3-0.6b llama-1b llama-8b,lora]

Needs torch, transformers, trl, peft and datasets; liger_kernel is used if it is installed. Both sides read the same
chats, made from the Python files of this host, with the same tokenizer and template, pack them into sequences of 4,096
tokens with attention inside chats only, and count the loss of what the assistant writes. Weights are random, with the
sizes of public models. trl runs with FlexAttention and bf16 weights, in all of `--modes`: with or without torch.compile
and Liger's kernels; its fastest mode counts. Its batches are padded to one length, because every other length is
compiled anew. In a case with `fp8`, such as llama-8b,lora,fp8, xlaunch multiplies in FP8, and trl in bf16. Without a
mode, only xlaunch runs. A mode ends after `--seconds` of training, which compilation is part of; it counts if it has
made a step after the warm-up. xlaunch keeps fp32 weights when it trains all. Speeds are in tokens of chats, without
padding; steps are medians. Exit code 1 if trl is faster anywhere.
"""

import argparse
import contextlib
import json
import pathlib
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid

import runner

SEQ, RANK, LR = 4096, 16, 1e-4
BATCHES = {"qwen3-0.6b": 4, "llama-1b": 4, "llama-8b": 2}
TEXT = 6_000_000
LONGEST = 12_000
TEMPLATE = runner.ROOT / "worker/data/src/chat/testdata/chatml_generation.jinja"


def chats():
    """Yields chats whose answers are Python files, or their first part."""
    total = 0
    for root in dict.fromkeys([sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]]):
        for path in sorted(pathlib.Path(root).rglob("*.py")):
            text = path.read_text(errors="replace")[:LONGEST].strip()
            if text:
                question = {"role": "user", "content": f"Write the file {path.name}."}
                yield {"messages": [question, {"role": "assistant", "content": text}]}
                total += len(text)
            if total >= TEXT:
                return


def make_tokenizer(folder, texts):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=32_000, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE.read_text()
    fast.save_pretrained(folder)


def make_model(folder, model):
    """Writes a model with random weights in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = runner.SIZES[model]
    kind = Qwen3Config if model.startswith("qwen3") else LlamaConfig
    config = kind(
        vocab_size=sizes["vocab"], hidden_size=sizes["dim"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes.get("head_dim", sizes["dim"] // sizes["heads"]), tie_word_embeddings=sizes["tied"],
        max_position_embeddings=SEQ, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()


def run_xlaunch(options, folder, data, batch, lora, fp8):
    prepared = folder / "chats"
    if not prepared.exists():
        command = [options.binary, "data", "prepare", "--chat", "--tokenizer", folder, "--val", "0"]
        subprocess.run(list(map(str, [*command, "--output", prepared, data])), check=True, capture_output=True)
    settings = {
        "data.train": str(prepared), "checkpoint.init": str(folder), "model.seq": SEQ, "train.batch": batch,
        "train.accumulate": 1, "train.lr": LR, "train.schedule": "constant", "train.warmup": 0,
        "train.eval_every": 0, "engine.device": "cuda", "engine.precision": "fp8" if fp8 else "bf16",
    }
    command = [str(options.binary), "bench", "train", str(runner.ROOT / "deploy/sft.toml"), "--json", "--nproc", "1"]
    command += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    command += runner.overrides(settings | ({"lora.rank": RANK, "lora.targets": "all-linear"} if lora else {}))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout)
    padding = re.search(r"([\d.]+) % padding", done.stderr)
    found["tokens_per_second"] *= 1 - float(padding[1]) / 100 if padding else 1
    return found


def run_trl(options, folder, data, batch, lora, mode):
    """Returns trl's measurements, or `None` with the reason on stderr if it cannot run in this mode."""
    command = [sys.executable, __file__, "--peer", str(folder), str(data), str(batch), "lora" if lora else "all", mode]
    command += ["--warmup", str(options.warmup), "--steps", str(options.steps), "--seconds", str(options.seconds)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"step_ms"')]
    if not lines:
        print(f"trl, {mode}: exit {done.returncode}: {done.stderr.strip()[-1500:]}", file=sys.stderr, flush=True)
        return None
    found = json.loads(lines[-1])
    print(f"trl, {mode}: {found['tokens_per_second'] / 1e3:.1f}K tok/s", file=sys.stderr, flush=True)
    return found


def train_trl(options):
    """trl's part: trains and prints its measurements as one line of JSON."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    # A hash of trl's functions would name cached rows, but dill cannot hash them in every version of Python.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])
    folder, data, batch, kind, mode = options.peer
    times, counts, losses = [], [], []

    class OutOfTime(Exception):
        pass

    class Timed(SFTTrainer):
        def training_step(self, model, inputs, *arguments, **keys):
            counts.append((inputs["input_ids"] != self.processing_class.pad_token_id).sum().item())
            loss = super().training_step(model, inputs, *arguments, **keys)
            losses.append(loss.item())
            times.append(time.perf_counter())
            print(f"step {len(times)} after {times[-1] - begin:.1f} s", file=sys.stderr, flush=True)
            if times[-1] - begin > options.seconds:
                raise OutOfTime
            return loss

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="flex_attention")
    model.config.use_cache = False
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=options.warmup + options.steps, per_device_train_batch_size=int(batch),
        max_length=SEQ, packing=True, assistant_only_loss=True, learning_rate=LR, lr_scheduler_type="constant",
        bf16=True, gradient_checkpointing=False, optim="adamw_torch_fused", save_strategy="no", report_to=[],
        disable_tqdm=True, pad_to_multiple_of=SEQ * int(batch), logging_steps=10_000, seed=0,
        torch_compile="compile" in mode, use_liger_kernel="liger" in mode,
    )
    rows = datasets.Dataset.from_list([json.loads(line) for line in pathlib.Path(data).read_text().splitlines()])
    trainer = Timed(model=model, args=settings, train_dataset=rows, peft_config=adapter if kind == "lora" else None,
                    processing_class=AutoTokenizer.from_pretrained(folder))
    begin = time.perf_counter()
    with contextlib.suppress(OutOfTime):
        trainer.train()
    steps = [after - before for before, after in zip(times[options.warmup - 1 :], times[options.warmup :])]
    speeds = [count / step for count, step in zip(counts[options.warmup :], steps)]
    print(json.dumps({
        "step_ms": statistics.median(steps) * 1e3, "tokens_per_second": statistics.median(speeds),
        "peak_bytes": torch.cuda.max_memory_allocated(), "loss": losses[-1],
    }), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, default=runner.ROOT / "target/release/xlaunch")
    parser.add_argument("--cases", nargs="+", default=["qwen3-0.6b", "llama-1b", "llama-8b,lora"])
    parser.add_argument("--modes", nargs="*", default=["compile", "liger", "compile+liger"])
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=150, help="of training, for each mode of trl")
    parser.add_argument("--peer", nargs=5, metavar=("MODEL", "CHATS", "BATCH", "all|lora", "MODE"), help="trl's part")
    options = parser.parse_args()
    if options.peer:
        return train_trl(options)
    print(f"{runner.hardware()}; python3 tests/gpu/sft.py {' '.join(sys.argv[1:])}\n")
    print("| model | trained | sequences | xlaunch tok/s | trl tok/s | ratio | memory | first step | last loss |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    slower = False
    with tempfile.TemporaryDirectory() as scratch:
        data = pathlib.Path(scratch) / "chats.jsonl"
        lines = [json.dumps(chat) for chat in chats()]
        data.write_text("".join(line + "\n" for line in lines))
        for case in options.cases:
            model, *how = case.split(",")
            lora = "lora" in how
            folder, batch = pathlib.Path(scratch) / model, BATCHES[model]
            if not folder.exists():
                make_model(folder, model)
                make_tokenizer(folder, lines)
            x = run_xlaunch(options, folder, data, batch, lora, "fp8" in how)
            print(f"{case}, xlaunch: {x['tokens_per_second'] / 1e3:.1f}K tok/s, "
                  f"{x['pool_peak_bytes'] / 2**30:.1f} GiB, last loss {x['final_loss']:.3f}",
                  file=sys.stderr, flush=True)
            if not options.modes:
                continue
            runs = {mode: run_trl(options, folder, data, batch, lora, mode) for mode in options.modes}
            runs = {mode: found for mode, found in runs.items() if found}
            if not runs:
                sys.exit(f"{case}: xlaunch {x['tokens_per_second'] / 1e3:.1f}K tok/s; trl ran in no mode")
            mode, p = max(runs.items(), key=lambda pair: pair[1]["tokens_per_second"])
            ratio = x["tokens_per_second"] / p["tokens_per_second"]
            gib = [x["pool_peak_bytes"] / 2**30, p["peak_bytes"] / 2**30]
            print(f"| {model} | {' '.join(how) or 'all'} | {batch} | {x['tokens_per_second'] / 1e3:.1f}K "
                  f"| {p['tokens_per_second'] / 1e3:.1f}K, {mode} | {ratio:.2f} | {gib[0]:.1f}, {gib[1]:.1f} GiB "
                  f"| {x['first_step_seconds']:.1f} s | {x['final_loss']:.3f}, {p['loss']:.3f} |", flush=True)
            slower |= ratio < 1
    sys.exit(slower)


if __name__ == "__main__":
    main()
