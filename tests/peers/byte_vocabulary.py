"""A tokenizer for models with random weights: every byte is a token, and all other ids have names.

The text of any ids is unambiguous, so equal texts mean equal tokens. No ranks have to be downloaded.
"""

import json


def letters():
    """Returns the characters that byte-level BPE uses for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


def write(path, vocab):
    """Writes a tokenizer.json of this many ids."""
    tokens = {letter: byte for byte, letter in letters().items()} | {f"<{i}>": i for i in range(256, vocab)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": tokens, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
                                "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
                                "model": model}))


def encode(text):
    return list(text.encode())


def decode(ids):
    return b"".join(bytes([i]) if i < 256 else f"<{i}>".encode() for i in ids).decode(errors="replace")
