"""Compares prepared chats with those of `transformers`, for the templates of public families.

    python3 tests/peers/chats.py --binary PATH [--chats 200]        # needs tokenizers, transformers, jinja2, pyarrow

The templates are those of the tests in `worker/data/src/chat/testdata`, the tokenizers those of `families.py`. Ids must
be those of `apply_chat_template(tokenize=True)`, and masks those of `return_assistant_tokens_mask=True` where the
template has `generation` blocks. Exit code 1 on a difference.
"""

import argparse
import array
import json
import logging
import pathlib
import random
import subprocess
import sys
import tempfile

import pyarrow
import pyarrow.parquet
from families import LLAMA3, QWEN, byte_level, sentencepiece, splits
from tokenizers import AddedToken, normalizers, processors
from transformers import PreTrainedTokenizerFast

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "worker/data/src/chat/testdata"
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
DEEPSEEK_NAMES = ["begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant"]
DEEPSEEK = [f"<\uff5c{name}\uff5c>" for name in DEEPSEEK_NAMES]


def families(text):
    """Yields the name of a template, its tokenizer, its first and its last token, and whether it writes tools and their
    calls, or calls only."""
    words = splits(QWEN)
    thinking = [AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    qwen = lambda: byte_level(text, words, CHATML, normalizers.NFC(), added=thinking)
    yield "chatml", qwen(), None, "<|im_end|>", None
    yield "chatml_generation", qwen(), None, "<|im_end|>", None
    yield "parts", qwen(), None, "<|im_end|>", None
    yield "either", qwen(), None, "<|im_end|>", None
    yield "qwen3", qwen(), None, "<|im_end|>", "schemas"
    llama3 = byte_level(text, splits(LLAMA3), LLAMA3_TOKENS, template="<|begin_of_text|>", ignore_merges=True)
    # As published: leading white space is not part of the range of a token.
    llama3.post_processor = processors.ByteLevel(trim_offsets=True)
    yield "llama3", llama3, "<|begin_of_text|>", "<|eot_id|>", "calls"
    mistral = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    yield "mistral", sentencepiece(text, mistral, gemma=False), "<s>", "</s>", "schemas"
    turns = ["<pad>", "<bos>", "<eos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    yield "gemma", sentencepiece(text, turns, gemma=True), "<bos>", "<eos>", None
    wide = lambda *tokens: [AddedToken(token, rstrip=True, normalized=False, special=True) for token in tokens]
    phi = ["<unk>", "<s>", "</s>", "<|endoftext|>", *wide("<|user|>", "<|assistant|>", "<|end|>")]
    yield "phi3", sentencepiece(text, phi, gemma=False), "<s>", "<|endoftext|>", None
    smollm = byte_level(text, splits(LLAMA3), CHATML, added=thinking)
    smollm.post_processor = processors.ByteLevel(trim_offsets=True)
    yield "smollm3", smollm, None, "<|im_end|>", "schemas"
    yield "zephyr", sentencepiece(text, ["<unk>", "<s>", "</s>"], gemma=False), "<s>", "</s>", None
    yield "olmo2", byte_level(text, splits(LLAMA3), ["<|endoftext|>"]), "<|endoftext|>", "<|endoftext|>", None
    granite = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"]
    yield "granite", byte_level(text, words, granite), "<|end_of_text|>", "<|end_of_text|>", "schemas"
    yield "deepseek", byte_level(text, words, DEEPSEEK, template=DEEPSEEK[0]), DEEPSEEK[0], DEEPSEEK[1], "calls"


def random_text(pick):
    pieces = ["Words, it's 12345 ", "\u4e16\u754c ", "e\u0301 ", "a", "\U0001f642", "  ", "\n\n", "x\n", "'\"\\"]
    pieces += ["{{ x }}", "<b>", "</s>", "<|im_end|>", "<|eot_id|>", "\u2581", "\t", "\ue000", "\U0010f000", "1.5"]
    return "".join(pick.choices(pieces, k=pick.randint(1, 12)))


def random_chat(pick, tools):
    # Words at both ends: white space there may be one token with that of the template.
    say = lambda: "It " + random_text(pick) + " end."
    messages = []
    for _ in range(pick.randint(1, 4)):
        messages.append({"role": "user", "content": say()})
        if tools and pick.random() < 0.4:
            arguments = {"z": say(), "a": [1, 2.5, 1e22, None, True], "\u00e9": {}}
            call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "content": say()})
        messages.append({"role": "assistant", "content": say()})
    schema = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    return {"messages": messages, **({"tools": [schema]} if tools == "schemas" and pick.random() < 0.5 else {})}


def in_parts(pick, message):
    """Returns a message whose content may be a list of parts."""
    text = message["content"]
    if pick.random() < 0.5:
        return message
    cut = pick.randint(2, len(text) - 2)
    return {**message, "content": [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]}


def as_list(message):
    """Returns a message whose content is a list of parts."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def prepare(binary, model, source, out):
    command = [binary, "data", "prepare", "--chat", "--tokenizer", model, "--val", "0", "--output", out, source]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{model}: exit code {done.returncode}: {done.stderr}")
    manifest = json.loads((out / "manifest.json").read_text())
    ids, mask = [], []
    for shard in manifest["train"]["shards"]:
        kind = "H" if manifest["vocab"] <= 1 << 16 else "I"
        ids.extend(array.array(kind, (out / shard["name"]).read_bytes()[1024:]))
        bits = (out / shard["mask"]["name"]).read_bytes()
        mask.extend(bits[at // 8] >> at % 8 & 1 for at in range(shard["tokens"]))
    starts = list(array.array("Q", (out / manifest["train"]["starts"]["name"]).read_bytes())) + [len(ids)]
    assert sum(mask) == manifest["train"]["supervised"]
    return [(ids[start:end], mask[start:end]) for start, end in zip(starts, starts[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--chats", type=int, default=200)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))[:300_000]
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, tokenizer, bos, eos, tools in families(text):
            model = pathlib.Path(folder) / name
            fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
            fast.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
            fast.save_pretrained(model)
            pick = random.Random(name)
            rows = [random_chat(pick, tools) for _ in range(options.chats)]
            if name in ("parts", "either"):
                rows = [{"messages": [in_parts(pick, message) for message in row["messages"]]} for row in rows]
            source = model / "rows.jsonl"
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            prepared = prepare(options.binary, model, source, model / "out")
            assert len(prepared) == len(rows), (len(prepared), len(rows))
            generation = "{%- generation" in fast.chat_template
            equal = masks = 0
            for row, (ids, mask) in zip(rows, prepared):
                messages = row["messages"]
                theirs = fast.apply_chat_template(
                    # This template writes nothing of a string.
                    [as_list(message) for message in messages] if name == "parts" else messages,
                    tools=row.get("tools"),
                    return_dict=True,
                    return_assistant_tokens_mask=generation,
                )
                equal += ids == theirs["input_ids"]
                masks += generation and mask == theirs["assistant_masks"]
            tail = f", {masks} masks equal" if generation else ""
            different += equal != len(rows) or (generation and masks != len(rows))
            print(f"{name}: {equal} of {len(rows)} chats equal{tail}", flush=True)
            if name == "qwen3":
                plain = [{"messages": [m for m in row["messages"] if m["content"]]} for row in rows]
                source.write_text("".join(json.dumps(row) + "\n" for row in plain))
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(plain), model / "rows.parquet")
                lines = prepare(options.binary, model, source, model / "lines")
                table = prepare(options.binary, model, model / "rows.parquet", model / "table")
                different += lines != table
                print(f"rows of Parquet: {'equal' if lines == table else 'DIFFERENT'}", flush=True)
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
