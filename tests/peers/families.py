"""Compares token ids of ten families' tokenizers with Hugging Face's `tokenizers`, on difficult documents.

    python3 tests/peers/families.py --binary PATH [--documents 2000]        # needs tokenizers

Each family's normalizer, words, template and added tokens are as in its published file; the vocabularies are trained
here. All documents are prepared as lines of JSON, and the ids of each are compared with Python's. Then long texts
without and with places to cut are prepared as one document. Exit code 1 on a difference.
"""

import argparse
import array
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

GPT2_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + GPT2_TAIL
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + GPT2_TAIL
)
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]" r"|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]


def splits(*patterns):
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(words + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(text, words, special, normalizer=None, template=None, added=(), **options):
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = words, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(added))
    if template is not None:
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), with_bos(tokenizer, template)]
        )
    return tokenizer


def with_bos(tokenizer, token):
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def sentencepiece(text, special, gemma):
    """Returns Llama 2's tokenizer with byte fallback (a space before the text), or Gemma's (none)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=3000, show_progress=False, limit_alphabet=400, special_tokens=[*special, *fallback]
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = contents["added_tokens"][: len(special)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if gemma:
        contents["normalizer"] = replace
        contents["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
        contents["decoder"] = {"type": "Sequence", "decoders": back}
    else:
        contents["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace],
        }
        contents["pre_tokenizer"] = None
        contents["decoder"] = {
            "type": "Sequence",
            "decoders": back + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        }
    tokenizer = Tokenizer.from_str(json.dumps(contents))
    tokenizer.post_processor = with_bos(tokenizer, special[1] if gemma else "<s>")
    return tokenizer


def families(text):
    """Yields name, tokenizer, token that ends a text, and whether that token has to be named."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    yield "GPT-2", byte_level(text, gpt2, ["<|endoftext|>"]), "<|endoftext|>"
    yield "Llama 2", sentencepiece(text, ["<unk>", "<s>", "</s>"], gemma=False), "</s>"
    yield "Llama 3", byte_level(
        text, splits(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>"], template="<|begin_of_text|>", ignore_merges=True
    ), "<|end_of_text|>"
    thinking = [AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")]
    yield "Qwen", byte_level(
        text, splits(QWEN), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC(), added=thinking
    ), "<|endoftext|>"
    end, start = "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    yield "DeepSeek", byte_level(text, splits(*DEEPSEEK), [start, end], normalizers.Sequence([]), template=start), end
    yield "GPT-OSS", byte_level(
        text, splits(O200K), ["<|startoftext|>", "<|endoftext|>"], ignore_merges=True
    ), "<|endoftext|>"
    yield "Gemma", sentencepiece(text, ["<pad>", "<bos>", "<eos>", "<unk>"], gemma=True), "<eos>"
    yield "nanochat", byte_level(text, splits(NANOCHAT), ["<|bos|>", "<|user_start|>"]), "<|bos|>"
    yield "Tekken", byte_level(
        text, splits(TEKKEN), ["<unk>", "<s>", "</s>"], template="<s>", ignore_merges=True
    ), "</s>"
    spaces = [AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)]
    yield "NeoX", byte_level(text, gpt2, ["<|endoftext|>"], normalizers.NFC(), added=spaces), "<|endoftext|>"
    digits = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    yield "SmolLM", byte_level(text, digits, ["<|endoftext|>", "<|im_start|>"]), "<|endoftext|>"
    falcon = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    yield "Falcon", byte_level(text, falcon, [">>TITLE<<", "<|endoftext|>"]), "<|endoftext|>"


def nasty(count):
    """Returns documents with everything on which tokenizers differ."""
    pick = random.Random(5)
    marks = [chr(code) for code in range(0x300, 0x1E950) if unicodedata.category(chr(code)) == "Mn"]
    anything = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    pieces = [
        "'s",
        "'LL",
        "I'm",
        "don\u2019t",
        "1234567",
        "3.14",
        "\u0663\u0664",
        "\u00b2\u00bd",
        "\u2167",
        " ",
        "  ",
        "   ",
        "\t",
        "\t\t",
        "\n",
        "\n\n",
        "\r\n",
        "\r",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u200b",
        "\ufeff",
        "\u0085",
        "\x00",
        "\x1b[0m",
        "...",
        "//",
        "/\n",
        "!?\n\n",
        "(){}[];",
        "http://a.b/c?d=e",
        "<|endoftext|>",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<think>",
        "<0x41>",
        "\u2581",
        "\u0120",
        "the",
        "The",
        "THE",
        "camelCase",
        "HTTPServer2",
        "\u4e16\u754c",
        "\u3053\u3093",
        "\u30ab\u30bf",
        "\ud55c\uae00",
        "\u05e9",
        "\u0645\u0631",
        "\u0e01\u0e33",
        "\u0915\u093f",
        "\U0001f469\u200d\U0001f4bb",
        "\U0001f1e9\U0001f1ea",
        "\u00e9",
        "e\u0301",
        "\ufb01",
        "\u212b",
        "\u1e9b\u0323",
        "\u088f",
        "\U000323b0",
        ">\u0338",
        "\U0001d7d8",
    ]
    for number in range(count):
        if number % 4 == 0:
            yield "a" + "".join(pick.choices(marks, k=pick.randint(1, 6))) + pick.choice(["", " x", "e\u0301"])
        elif number % 4 == 1:
            yield "".join(pick.choices(anything, k=pick.randint(1, 40)))
        else:
            yield "".join(pick.choices(pieces, k=pick.randint(1, 40)))


def prepare(binary, folder, name, tokenizer, source, *options):
    """Returns all ids, and the manifest."""
    out = folder / name
    command = [
        binary,
        "data",
        "prepare",
        "--tokenizer",
        tokenizer,
        "--val",
        "0",
        "--output",
        out,
        "--overwrite",
        *options,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: exit code {done.returncode}: {done.stderr}")
    if "panicked" in done.stderr:
        sys.exit(f"{name}: {done.stderr}")
    manifest, ids = json.loads((out / "manifest.json").read_text()), []
    for shard in manifest["train"]["shards"]:
        ids.extend(array.array("H" if manifest["vocab"] <= 1 << 16 else "I", (out / shard["name"]).read_bytes()[1024:]))
    return ids, manifest


def compare(binary, tokenizers, count, name_end=False):
    """Compares the ids of each of the tokenizers, as `families` yields them. Returns whether all are equal."""
    named = lambda end: ["--eot", end] if name_end else []
    documents = list(nasty(count))
    prose = "Words, it's 12345 times.\n\n  (Caf\u00e9)\u3002\n\u4e16\u754c\u3002\n" * 400
    chinese = "\u4e16\u754c\u4eba\u6c11\u3002\n" * 30_000
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "nasty.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        (folder / "long.txt").write_text((prose + chinese) * 2)
        for name, tokenizer, end in tokenizers:
            path = folder / f"{name}.json"
            tokenizer.save(str(path))
            fast = Tokenizer.from_file(str(path))
            first = [id for id in fast.encode("", add_special_tokens=True).ids][:1]
            end_id = fast.token_to_id(end)
            prefix = [end_id] + [id for id in first if id != end_id]
            fast.encode_special_tokens = True
            encode = lambda texts: [e.ids for e in fast.encode_batch_fast(texts, add_special_tokens=False)]
            ids, manifest = prepare(binary, folder, name, path, folder / "nasty.jsonl", *named(end))
            expected, equal, at = encode(documents), 0, 0
            for document, theirs in zip(documents, expected):
                theirs = prefix + theirs
                equal += ids[at : at + len(theirs)] == theirs
                at += len(theirs)
            framed = (manifest["end_of_text"], manifest["bos"]) == (end_id, first[0] if first else None)
            ids, _ = prepare(binary, folder, name, path, folder / "long.txt", *named(end))
            whole = ids == prefix + encode([(prose + chinese) * 2])[0]
            good = equal == len(documents) and at and framed and whole
            different += not good
            print(
                f"{name}: {equal} of {len(documents)} documents equal, long text {'equal' if whole else 'DIFFERENT'}"
                f", frame {'equal' if framed else 'DIFFERENT'}",
                flush=True,
            )
    return different == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--documents", type=int, default=2000)
    options = parser.parse_args()
    root = pathlib.Path(__file__).resolve().parents[2]
    text = "\n".join(path.read_text() for path in sorted(root.glob("docs/*.md")))[:300_000]
    sys.exit(not compare(options.binary, families(text), options.documents))


if __name__ == "__main__":
    main()
