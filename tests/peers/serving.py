"""`xlaunch serve` as a process, and models for it: for `served.py` and `harness.py`, not a program of its own."""

import json
import pathlib
import subprocess
import tempfile
import urllib.error
import urllib.request

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import families

LIMIT = 300
CONTEXT = 128
CHATML = (
    "{% macro write(content) %}{% if content is string %}{{ content | trim }}{% else %}{% for part in content %}"
    "{{ part['text'] | trim }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}\n{{- '<|im_start|>' + message['role'] + '\\n' + write(message['content']) + "
    "'<|im_end|>' + '\\n' }}\n{%- endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def documents():
    """Returns the text of the documentation of this repository."""
    root = pathlib.Path(__file__).resolve().parents[2]
    return "\n".join(path.read_text() for path in sorted(root.glob("docs/*.md")))[:200_000]


def make(directory, family, text, ends=()):
    """Writes a model with random weights, and a tokenizer of a family that is trained on `text`."""
    tokenizer, end = next((it[1], it[2]) for it in families.families(text) if it[0] == family)
    start = tokenizer.encode("", add_special_tokens=True).ids
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokenizer.id_to_token(start[0]) if start else end,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            # The model has more ids than the tokenizer.
            vocab_size=len(fast) + 7,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=fast.bos_token_id,
            eos_token_id=[fast.eos_token_id, *ends],
            initializer_range=0.3,
        )
    ).eval()
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return model, fast


class Server:
    """`xlaunch serve`, from its first line to the end of the block."""

    def __init__(self, xlaunch, model, *options):
        self.log = tempfile.TemporaryFile("w+")
        command = [xlaunch, "serve", str(model), "--listen", "127.0.0.1:0", "--device", "cpu", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.url = self.process.stdout.readline().strip()
        self.model = str(model)

    def __enter__(self):
        if not self.url:
            self.process.wait()
            self.log.seek(0)
            raise SystemExit(f"xlaunch serve: exit code {self.process.returncode}: {self.log.read()}")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def post(self, path, **body):
        """Returns the reply, which must be 200."""
        body = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.code}: {error.read().decode()}") from None
