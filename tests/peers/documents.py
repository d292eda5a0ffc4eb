"""Compares training on packed chats with the same rows in transformers, in fp32 on the CPU.

    python3 tests/peers/documents.py --xlaunch PATH     # needs torch, transformers

The data is written here: documents with masks, one of them longer than a row. In transformers, documents of a row have
a block-diagonal mask and positions that begin again, and the loss is the mean over labels that are not -100.

The loss before training must be within 1e-6 of a model in double precision, or within transformers' own distance to
that, and the losses of 20 steps of AdamW within 1e-4. Prints a line for each case that holds.
"""

import json
import struct

import torch
from transformers import AutoModelForCausalLM

import byte_vocabulary
import model as peer
from model_families import SEQ, VOCAB, make, run_comparison

STEPS, LR = 20, 1e-3
# Rows of 32: (32), (24, 8), (20, 12), (16, 16), (30). The first document has 40 ids.
LENGTHS = [40, 20, 16, 30, 12, 24, 16]
ROWS = [[(0, 0, 32)], [(5, 0, 24), (0, 32, 40)], [(1, 0, 20), (4, 0, 12)], [(2, 0, 16), (6, 0, 16)], [(3, 0, 30)]]
WINDOW = 8


def documents():
    """Returns ids and mask of each document: the second half of each counts, with gaps."""
    for number, length in enumerate(LENGTHS):
        ids = [(i * i * 31 + 7 * i + 11 * number) % (VOCAB - 3) + 3 for i in range(length)]
        yield ids, [i >= length // 2 and (i + number) % 5 != 0 for i in range(length)]


def prepare(directory):
    directory.mkdir()

    def side(name, contents):
        (directory / name).write_bytes(contents)
        return {"name": name, "bytes": len(contents), "xxh3_128": "0" * 32}

    def split(prefix, documents):
        ids = [i for ids, _ in documents for i in ids]
        mask = [bit for _, mask in documents for bit in mask]
        starts = [sum(len(ids) for ids, _ in documents[:number]) for number in range(len(documents))]
        header = struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253)
        bits = [sum(bit << i for i, bit in enumerate(mask[at:at + 8])) for at in range(0, len(mask), 8)]
        shard = side(f"{prefix}_000001.bin", header + struct.pack(f"<{len(ids)}H", *ids))
        shard |= {"tokens": len(ids), "mask": side(f"{prefix}_000001.mask", bytes(bits))}
        return {"documents": len(documents), "bytes": len(ids), "tokens": len(ids), "supervised": sum(mask),
                "starts": side(f"{prefix}_starts.bin", struct.pack(f"<{len(starts)}Q", *starts)),
                "shards": [shard] if ids else []}

    everything = list(documents())
    byte_vocabulary.write(directory / "tokenizer.json", VOCAB)
    manifest = {"version": 2, "tokenizer": "bytes-300", "vocab": VOCAB, "end_of_text": None,
                "chat": {"template_xxh3_128": "0" * 32}, "train": split("train", everything),
                "val": split("val", everything[:2])}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def rows():
    """Returns tokens, labels (not shifted), positions and document numbers of all rows."""
    every, filled = list(documents()), []
    for row in ROWS:
        tokens, labels, positions, numbers = [], [], [], []
        for number, (document, start, end) in enumerate(row):
            ids, mask = every[document]
            tokens += ids[start:end]
            targets = [i if counts else -100 for i, counts in zip(ids[start + 1:end + 1], mask[start + 1:end + 1])]
            labels += targets + [-100] * (end - start - len(targets))
            positions += range(end - start)
            numbers += [number] * (end - start)
        padding = SEQ - len(tokens)
        filled.append([tokens + [0] * padding, labels + [-100] * padding, positions + [*range(padding)],
                       numbers + [len(row)] * padding])
    return [torch.tensor(values) for values in zip(*filled)]


def loss(model, data):
    tokens, labels, positions, numbers = data
    at = torch.arange(SEQ)
    visible = (numbers[:, :, None] == numbers[:, None, :]) & (at[:, None] >= at[None, :])
    near = visible & (at[:, None] - at[None, :] < WINDOW)
    lowest = torch.finfo(model.dtype).min
    additive = lambda mask: torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, lowest)[:, None]
    mask = additive(visible)
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or []):
        mask = {"full_attention": mask, "sliding_attention": additive(near)}
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def load(directory, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def train(xlaunch, directory, data):
    keys = f"steps = {STEPS}\nbatch = {len(ROWS)}\nlr = {LR}\nclip = 1"
    return xlaunch.run(f"{directory.name}-packed", directory, f'train = "{data}"', keys)[0]


def compare(xlaunch, case):
    directory = xlaunch.folder / case
    make(case, directory)
    ours, batch = train(xlaunch, directory, xlaunch.folder / "chats"), rows()
    with torch.no_grad():
        exact = loss(load(directory, torch.float64), batch).item()
    model, theirs = load(directory), []
    optimizer = peer.optimizer(model, LR)
    for _ in range(STEPS):
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        theirs.append(value.item())
    first = abs(ours[0] - exact)
    distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    holds = first <= max(1e-6 * exact, 2 * abs(theirs[0] - exact)) and distance <= 1e-4 * max(theirs)
    print(f"{case}: {'equal' if holds else 'DIFFERENT'}: {first:.1e} from {exact:.6f} before training, {distance:.1e} "
          f"apart in {STEPS} steps, to {theirs[-1]:.4f}", flush=True)
    return holds


def main():
    cases = ("gpt2", "llama", "qwen3", "gemma2")
    run_comparison(__doc__, compare, cases, lambda xlaunch: prepare(xlaunch.folder / "chats"))


if __name__ == "__main__":
    main()
