"""Compares every token id of `xlaunch data prepare`, whole and cut, with tiktoken and Hugging Face's tokenizers.

    cargo build --release && python3 tests/peers/tokens.py        # needs tiktoken, tokenizers, transformers

Texts are prose and code of this machine (Python's library, documentation, manual pages, this repository), and random
Unicode. GPT-2 is compared with tiktoken, whose ranks are rebuilt from the `tokenizer.json` that xlaunch writes:
tiktoken checks their SHA-256. Files like those of Llama 2, Llama 3 and SmolLM are trained here and compared with
`tokenizers`. Each text is one document, which xlaunch cuts into pieces, and the documents of its lines. Exit code 1 on
a difference.
"""

import argparse
import array
import base64
import gzip
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import sysconfig
import tempfile
import time

import tiktoken
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")


def files(folder, suffix=""):
    """Yields the files below a folder, without those of builds, in an order that is always the same."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "target")
        paths = (pathlib.Path(here, name) for name in sorted(names) if name.endswith(suffix))
        yield from (path for path in paths if path.is_file())


def machine_text(size):
    """Returns prose and code of this machine, half and half."""
    code = [files(sysconfig.get_paths()["stdlib"], ".py"), files(ROOT, ".rs")]
    prose = [files("/usr/share/doc"), files("/usr/share/man", ".gz"), files(ROOT, ".md")]
    texts = []
    for sources in (code, prose):
        left = size // 2
        for path in (path for source in sources for path in source):
            if left <= 0:
                break
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            text = data.decode(errors="ignore")[:left]
            texts.append(text)
            left -= len(text.encode())
    return "\n".join(texts)


def random_unicode(size):
    """Returns code points of all planes, in runs of one script, with white space of all kinds between them."""
    generator, parts, left = random.Random(1), [], size
    ranges = [(0x20, 0x7f), (0x80, 0x250), (0x370, 0x530), (0x590, 0x780), (0x900, 0xe00), (0x2000, 0x2100),
              (0x3040, 0x30ff), (0x4e00, 0xa000), (0xac00, 0xd7a4), (0xe000, 0xf900), (0x1f300, 0x1faff),
              (0x20000, 0x2a6df), (0, 0xd800), (0xe000, 0x110000)]
    spaces = " \t\n\r\u00a0\u2003\u3000\u0085\v\f"
    while left > 0:
        low, high = generator.choice(ranges)
        word = "".join(chr(generator.randrange(low, high)) for _ in range(generator.randrange(1, 12)))
        word += "".join(generator.choices(spaces, k=generator.choice([0, 1, 1, 2, 5])))
        parts.append(word)
        left -= len(word.encode())
    return "".join(parts)


class Xlaunch:
    def __init__(self, binary, folder, options=()):
        self.binary, self.folder, self.options, self.runs = binary, folder, options, 0

    def prepare(self, tokenizer, text, documents="file", suffix="txt"):
        """Returns the ids of the text, the directory, and the seconds."""
        self.runs += 1
        source, out = self.folder / f"{self.runs}.{suffix}", self.folder / f"{self.runs}"
        source.write_bytes(text.encode())
        start = time.monotonic()
        command = [self.binary, "data", "prepare", "--tokenizer", tokenizer, "--documents", documents, "--val", "0",
                   "--output", out, *self.options, source]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.monotonic() - start
        manifest, ids = json.loads((out / "manifest.json").read_text()), []
        for shard in manifest["train"]["shards"]:
            body = (out / shard["name"]).read_bytes()[1024:]
            ids.extend(array.array("H" if manifest["vocab"] <= 1 << 16 else "I", body))
        return ids, out, manifest, seconds


def gpt2_reference(folder, prepared):
    """Returns tiktoken with the ranks of xlaunch's tokenizer.json, which it accepts only if they are OpenAI's."""
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocab = json.loads((prepared / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted((rank, token) for token, rank in vocab.items() if rank < 50256)
    lines = [base64.b64encode(bytes(byte_of[c] for c in token)) + b" %d\n" % rank for rank, token in tokens]
    (folder / hashlib.sha1(R50K_URL.encode()).hexdigest()).write_bytes(b"".join(lines))
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return tiktoken.get_encoding("r50k_base")


def byte_alphabet():
    """Returns the character of each byte in files of byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def trained(text):
    """Yields name and tokenizer of each kind."""
    def train(tokenizer, special, **options):
        trainer = trainers.BpeTrainer(vocab_size=6000, show_progress=False, special_tokens=special, **options)
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return tokenizer

    def llama2(prepend_scheme):
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        train(tokenizer, ["<unk>", "<s>", "</s>", *fallback], limit_alphabet=500)
        # As in Llama 2's file, bytes are part of the vocabulary, but not special.
        contents = json.loads(tokenizer.to_str())
        contents["added_tokens"] = contents["added_tokens"][:3]
        return contents

    prefixed = llama2("first")
    prefixed["pre_tokenizer"] = None
    prefixed["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
    prefixed["decoder"] = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    yield "Llama 2", tokenizers.Tokenizer.from_str(json.dumps(prefixed))
    yield "Metaspace", tokenizers.Tokenizer.from_str(json.dumps(llama2("first")))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    llama3 = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    llama3.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    llama3.decoder = decoders.ByteLevel()
    train(llama3, [], initial_alphabet=alphabet)
    llama3.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    yield "Llama 3", llama3
    smollm = tokenizers.Tokenizer(models.BPE())
    smollm.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    smollm.decoder = decoders.ByteLevel()
    for name, collapse in [("Unigram", False), ("Unigram 2", True)]:
        unigram = tokenizers.Tokenizer(models.Unigram())
        if collapse:
            unigram.normalizer = normalizers.Sequence([
                normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
        unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if collapse else "first")
        trainer = trainers.UnigramTrainer(
            vocab_size=4000, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
        unigram.train_from_iterator(text[:500_000].splitlines(), trainer)
        yield name, unigram
    yield "SmolLM", train(smollm, ["<|endoftext|>", "<|im_start|>"], initial_alphabet=alphabet)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=ROOT / "target/release/xlaunch", type=pathlib.Path)
    parser.add_argument("--megabytes", default=20.0, type=float, help="of prose and code; a quarter of random Unicode")
    options = parser.parse_args()
    size, equal = int(options.megabytes * 1e6), True
    special = "<|endoftext|> </s> <s> <|end_of_text|> <unk> <0x41> \u2581\u2581 x"
    texts = {"prose and code": special + machine_text(size), "random Unicode": random_unicode(size // 4)}
    print(f"{'tokenizer':<10} {'text':<15} {'documents':<9} {'MB':>6} {'ids':>9}  result")

    def compare(name, text, documents, found, expected, size):
        nonlocal equal
        different = next((at for at, (a, b) in enumerate(zip(found, expected)) if a != b), None)
        if different is None and len(found) != len(expected):
            different = min(len(found), len(expected))
        equal &= different is None
        result = "equal" if different is None else f"DIFFERENT at id {different} of {len(expected)}"
        print(f"{name:<10} {text:<15} {documents:<9} {size / 1e6:>6.1f} {len(expected):>9}  {result}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        xlaunch = Xlaunch(options.binary, folder)

        def both(name, tokenizer, text_name, text, encode):
            ids, out, manifest, _ = xlaunch.prepare(tokenizer, text)
            prefix = [] if manifest["end_of_text"] is None else [manifest["end_of_text"]]
            compare(name, text_name, "whole", ids, prefix + encode([text])[0], len(text.encode()))
            # xlaunch splits lines in the same way: only at line feeds, removing a carriage return before them.
            lines = [line.removesuffix("\r") for line in text.split("\n")]
            expected = [id for ids in encode([line for line in lines if line]) for id in prefix + ids]
            ids, _, _, _ = xlaunch.prepare(tokenizer, text, "line")
            compare(name, text_name, "lines", ids, expected, len(text.encode()))
            return out

        reference = gpt2_reference(folder, xlaunch.prepare("gpt2", "a")[1])
        for name, text in texts.items():
            out = both("GPT-2", "gpt2", name, text, lambda texts: reference.encode_ordinary_batch(texts, num_threads=2))
        spaces = " " * (4 << 20) + "x" + " " * (1 << 20)
        # This is more than tiktoken itself can encode: its expression overflows the stack.
        space, word = reference.encode_ordinary(" "), reference.encode_ordinary(" x")
        expected = [50256] + space * ((4 << 20) - 1) + word + space * (1 << 20)
        compare("GPT-2", "spaces", "whole", xlaunch.prepare("gpt2", spaces)[0], expected, len(spaces))
        loaded = {"gpt2": out, "bytes": xlaunch.prepare("bytes", "a")[1]}
        part = "".join(text[:size // 40] for text in texts.values()).replace("<", "")
        for name, path in loaded.items():
            fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
            ids = fast(part, add_special_tokens=False)["input_ids"]
            expected = reference.encode_ordinary(part) if name == "gpt2" else list(part.encode())
            compare(name, "in transformers", "whole", ids, expected, len(part.encode()))
            equal &= fast.decode(ids, clean_up_tokenization_spaces=False) == part
        for name, tokenizer in trained(texts["prose and code"][:2_000_000]):
            path = folder / f"{name}.json"
            tokenizer.save(str(path))
            tokenizer.encode_special_tokens = True
            for text_name, text in texts.items():
                both(name, path, text_name, text[:size // 8], lambda texts: [
                    encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])
    print("equal" if equal else "DIFFERENT")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
