"""Exports as the programs of others read them: transformers, and llama.cpp's conversion to GGUF.

    python3 tests/peers/exported.py --xlaunch PATH [--llama-cpp DIR]        # needs torch, transformers

Small models are made or trained, exported, and loaded. DIR has llama.cpp's `convert_hf_to_gguf.py`. Prints one line
per case that holds; exit code 1 with the difference otherwise.

transformers: each tensor is expected and there, nothing is warned of, and what `save_pretrained` writes of a model is
imported again with the same bits. A model that is fine-tuned keeps its tokens, template, ids and sampling defaults.
llama.cpp: the tokens are as many as the rows of the embedding, the ids of special and added tokens are the model's,
and the words are those of a known tokenizer where it is a published one.
"""

import argparse
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
import warnings

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

import families

SIZES = {
    "gpt2": "layers = 1\nheads = 2\ndim = 16\nffn = 64\nseq = 32\n",
    "llama": "layers = 1\nheads = 2\nkv_heads = 1\ndim = 16\nffn = 24\nseq = 32\n",
}
# What a step changes by less than half of a bit of any weight.
NO_CHANGE = "lr = 1.2e-38\nweight_decay = 0\nwarmup = 0\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '\\n' + m.content + '<|eot|>' }}{% endfor %}"
)
# Ids of special tokens of the model that is fine-tuned, by the ids of its configuration.
TOKENS = ("bos", "eos", "pad", "unk")


class Warnings(logging.Handler):
    """What transformers warns of, as a log and as Python's warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        self.python = warnings.catch_warnings(record=True)
        self.caught = self.python.__enter__()
        warnings.simplefilter("always")
        transformers_logging.get_logger("transformers").addHandler(self)
        return self

    def __exit__(self, *error):
        transformers_logging.get_logger("transformers").removeHandler(self)
        self.texts += [str(warning.message) for warning in self.caught]
        self.python.__exit__(*error)


def check(condition, what):
    if not condition:
        sys.exit(f"DIFFERENT: {what}")


class Runs:
    def __init__(self, xlaunch, folder):
        self.xlaunch, self.folder = xlaunch, folder

    def call(self, *words, cwd=None):
        done = subprocess.run([self.xlaunch, *map(str, words)], capture_output=True, text=True, cwd=cwd or self.folder)
        if done.returncode != 0:
            sys.exit(f"xlaunch {' '.join(map(str, words))}: exit code {done.returncode}: {done.stderr}")
        return done.stdout

    def train_and_export(self, name, config, *options):
        """The checkpoint, and the directory of the export."""
        here = self.folder / name
        here.mkdir()
        (here / "train.toml").write_text(config + '[engine]\ndevice = "cpu"\n')
        self.call("train.toml", cwd=here)
        self.call("export", "runs/train/latest", "--output", "out", *options, cwd=here)
        return next((here / "runs/train/latest/checkpoints").glob("step-*")), here / "out"


def train(steps, more="lr = 1e-2\n"):
    return f"[train]\nsteps = {steps}\nbatch = 2\neval_every = 0\nsample = 0\n{more}"


def load_strictly(path):
    with Warnings() as warned:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    for what, names in info.items():
        check(not names, f"{path}: {what}: {names}")
    check(not warned.texts, f"{path}: warnings: {warned.texts}")
    return model


def round_trips(runs):
    """Trained here, loaded and saved by transformers, imported here."""
    for arch, sizes in SIZES.items():
        for tied in ("true", "false"):
            name = f"{arch}-{'tied' if tied == 'true' else 'untied'}"
            model = f'[model]\narch = "{arch}"\nvocab = 256\ntied = {tied}\n{sizes}'
            data = f'[data]\ntrain = ["{runs.folder}/text.txt"]\n'
            saved, out = runs.train_and_export(name, model + data + train(3))
            loaded = load_strictly(out)
            again = runs.folder / f"{name}-again"
            loaded.save_pretrained(again)
            AutoTokenizer.from_pretrained(out).save_pretrained(again)
            init = f'[checkpoint]\ninit = "{again}"\n'
            back, second = runs.train_and_export(f"{name}-back", init + data + train(1, NO_CHANGE))
            for ours, theirs in ((saved, back), (out, second)):
                ours, theirs = (load_file(path / "model.safetensors") for path in (ours, theirs))
                check(ours.keys() == theirs.keys(), f"{name}: {ours.keys() ^ theirs.keys()}")
                for key in ours:
                    same = ours[key].numpy().tobytes() == theirs[key].numpy().tobytes()
                    check(same, f"{name}: {key} after save_pretrained and import")
            check(("lm_head.weight" in load_file(again / "model.safetensors")) == (tied == "false"), f"{name}: head")
            print(f"{name}: strict load, same bits after save_pretrained and import", flush=True)


def llama3_like(folder, text):
    """A model as Llama 3 publishes it: several ids end a text, the template and sampling defaults are files."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|eot|>", "<|pad|>", "<|unk|>"]
    tokenizer = families.byte_level(
        text, families.splits(families.LLAMA3), special, template="<|begin_of_text|>", ignore_merges=True
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|end_of_text|>", "<|start|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    ids = {token: tokenizer.token_to_id(token) for token in special}
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            bos_token_id=ids["<|begin_of_text|>"],
            eos_token_id=[ids["<|end_of_text|>"], ids["<|eot|>"]],
            pad_token_id=ids["<|pad|>"],
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        )
    )
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        bos_token_id=ids["<|begin_of_text|>"],
        eos_token_id=[ids["<|end_of_text|>"], ids["<|eot|>"]],
        pad_token_id=ids["<|pad|>"],
    )
    directory = folder / "base"
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def fine_tuned(runs, base):
    """Two steps of training, and an export. Returns that."""
    runs.call("data", "prepare", "--tokenizer", base / "tokenizer.json", "--output", "tokens", "--val", "0", "text.txt")
    config = f'[checkpoint]\ninit = "{base}"\n[model]\nseq = 64\n[data]\ntrain = ["{runs.folder}/tokens"]\n'
    _, out = runs.train_and_export("tuned", config + train(2))
    before, after = (json.loads((path / "config.json").read_text()) for path in (base, out))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "rope_parameters"):
        check(before[key] == after.get(key), f"config.json: {key}: {before[key]}, exported {after.get(key)}")
    before, after = (json.loads((path / "generation_config.json").read_text()) for path in (base, out))
    for key in before.keys() - {"transformers_version", "_from_model_config"}:
        check(before[key] == after.get(key), f"generation_config.json: {key}: {before[key]}, exported {after.get(key)}")
    model, (theirs, ours) = load_strictly(out), (AutoTokenizer.from_pretrained(path) for path in (base, out))
    for name in TOKENS:
        for key in (f"{name}_token", f"{name}_token_id"):
            check(getattr(theirs, key) == getattr(ours, key), f"{key}: {getattr(ours, key)}")
    check(theirs.get_vocab() == ours.get_vocab() and theirs.added_tokens_encoder == ours.added_tokens_encoder, "tokens")
    check(sorted(theirs.all_special_ids) == sorted(ours.all_special_ids), "special tokens")
    check(theirs.model_max_length == ours.model_max_length, f"model_max_length: {ours.model_max_length}")
    chat = [{"role": "user", "content": "Hi, it's 123!"}]
    rendered = [it.apply_chat_template(chat, tokenize=False) for it in (theirs, ours)]
    check(rendered[0] == rendered[1] and theirs.chat_template == ours.chat_template, f"template: {rendered}")
    check(theirs("Hi <|eot|> 42")["input_ids"] == ours("Hi <|eot|> 42")["input_ids"], "ids of a text")
    check(model.generation_config.eos_token_id == before["eos_token_id"], "eos ids of the loaded model")
    moved = load_file(base / "model.safetensors")["model.embed_tokens.weight"] != model.model.embed_tokens.weight
    check(bool(moved.any()), "nothing was trained")
    print("fine-tuned: template, tokens, ids, sampling defaults and positions are kept", flush=True)
    return out


def windowed(runs):
    """A model whose attention has a window computes the same here with a context that is no longer."""
    torch.manual_seed(5)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            sliding_window=16,
            initializer_range=0.5,
        )
    ).eval()
    directory = runs.folder / "windowed-base"
    model.save_pretrained(directory)
    text = (runs.folder / "text.txt").read_bytes()[: 16 * 40 + 1]
    (runs.folder / "val.bin").write_bytes(text)
    data = f'[data]\ntrain = ["{runs.folder}/text.txt"]\nval = ["{runs.folder}/val.bin"]\n'
    steps = train(1, NO_CHANGE).replace("eval_every = 0", "eval_every = 1\neval_batches = 1000")
    config = f'[checkpoint]\ninit = "{directory}"\n[model]\nseq = 16\n'
    saved, _ = runs.train_and_export("windowed", config + data + steps, "--tokenizer", "bytes")
    ours = json.loads((saved / "state.json").read_text())["val_loss"]
    ids = torch.tensor(list(text))
    batch = torch.stack([ids[at : at + 17] for at in range(0, 16 * 40, 16)])
    with torch.no_grad():
        logits = model(batch[:, :-1]).logits.double()
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    check(abs(ours - theirs) < 1e-4, f"window of 16: loss {ours} here, {theirs} in transformers")
    print("window of 16: loss equal", flush=True)


def convert(llama_cpp, export, known):
    """Runs the conversion, and compares what it has written with the export. `known` is a published tokenizer."""
    import conversion
    import gguf

    file = export.parent / "model.gguf"
    script = [llama_cpp / "convert_hf_to_gguf.py", export, "--outfile", file, "--outtype", "f32"]
    if known is None:
        # The words of an unpublished tokenizer are unknown to it, which is the only thing that it may refuse.
        done = subprocess.run([sys.executable, *map(str, script)], capture_output=True, text=True)
        refused = "NotImplementedError: BPE pre-tokenizer was not recognized" in done.stderr
        check(done.returncode != 0 and refused, f"{export}: {done.stderr}")
        patch = (
            "import runpy, sys; folder = sys.argv.pop(1); sys.path[:0] = [folder, folder + '/gguf-py']\n"
            "import conversion.base\n"
            "conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'default'\n"
            "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
        )
        script = ["-c", patch, llama_cpp, *script]
    done = subprocess.run([sys.executable, *map(str, script)], capture_output=True, text=True)
    check(done.returncode == 0, f"{export}: {done.stderr}")
    reader = gguf.GGUFReader(file)
    field = lambda name: reader.fields[name].contents() if name in reader.fields else None
    config = json.loads((export / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(export)
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    rows = {tensor.name: tensor.shape for tensor in reader.tensors}["token_embd.weight"][1]
    check(len(tokens) == len(kinds) == rows == config["vocab_size"], f"{export}: {len(tokens)} tokens, {rows} rows")
    if known is not None:
        check(field("tokenizer.ggml.pre") == known, f"{export}: pre-tokenizer {field('tokenizer.ggml.pre')}")
    for token, id in tokenizer.get_vocab().items():
        check(tokens[id] == token, f"{export}: token {id} is {tokens[id]!r}, not {token!r}")
    for id, token in tokenizer.added_tokens_decoder.items():
        kind = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
        check(tokens[id] == token.content and kinds[id] == kind, f"{export}: added token {id}: {kinds[id]}")
    for name in ("bos", "eos", "pad"):
        key = "padding" if name == "pad" else name
        found, expected = field(f"tokenizer.ggml.{key}_token_id"), getattr(tokenizer, f"{name}_token_id")
        check(found == expected, f"{export}: {name} is {found}, in transformers {expected}")
    template = (export / "chat_template.jinja").read_text() if (export / "chat_template.jinja").exists() else None
    check(field("tokenizer.chat_template") == template, f"{export}: template")
    arch = field("general.architecture")
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    check(field(f"{arch}.context_length") == positions, f"{export}: context {field(f'{arch}.context_length')}")
    print(f"llama.cpp: {export.parent.name}: {rows} tokens, {arch}, {field('tokenizer.ggml.pre')}", flush=True)


def conversions(runs, llama_cpp, tuned, text):
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    for arch, sizes in SIZES.items():
        for tied in ("true", "false"):
            name = f"gpt2-words-{arch}-{tied}"
            runs.call("data", "prepare", "--tokenizer", "gpt2", "--output", f"{name}-tokens", "--val", "0", "text.txt")
            model = f'[model]\narch = "{arch}"\nvocab = 50257\ntied = {tied}\n{sizes}'
            data = f'[data]\ntrain = ["{runs.folder}/{name}-tokens"]\n'
            _, out = runs.train_and_export(name, model + data + train(1))
            convert(llama_cpp, out, "gpt-2")
    convert(llama_cpp, tuned, None)
    gpt2 = families.byte_level(text, families.pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    gpt2.save(str(runs.folder / "own.json"))
    runs.call("data", "prepare", "--tokenizer", "own.json", "--output", "own-tokens", "--val", "0", "text.txt")
    # More rows than tokens.
    model = f'[model]\narch = "llama"\nvocab = {gpt2.get_vocab_size() + 47}\ntied = true\n{SIZES["llama"]}'
    _, out = runs.train_and_export("own", f'{model}[data]\ntrain = ["{runs.folder}/own-tokens"]\n' + train(1))
    convert(llama_cpp, out, None)


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xlaunch", required=True)
    parser.add_argument("--llama-cpp", type=pathlib.Path)
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    text = "\n".join(path.read_text() for path in sorted(root.glob("docs/*.md")))[:200_000]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "text.txt").write_text(text)
        runs = Runs(options.xlaunch, folder)
        base = llama3_like(folder, text)
        if options.llama_cpp is None:
            round_trips(runs)
            fine_tuned(runs, base)
            windowed(runs)
        else:
            conversions(runs, options.llama_cpp.resolve(), fine_tuned(runs, base), text)


if __name__ == "__main__":
    main()
