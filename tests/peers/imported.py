"""Checks that greedy texts of `xlaunch generate` for imported models, with their special tokens, equal transformers'.

    python3 tests/peers/imported.py --xlaunch PATH      # needs torch, transformers

Models with random weights and the tokenizers of `families.py`, each with a configuration that names several ids that
end a text, and a chat template. Uses prompts with and without special tokens, and chats, on the CPU in fp32. Exit code
1 if any text differs.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

import families

TOKENS = 24
PROMPTS = [
    "Once upon a time",
    "",
    "It's 12345!\n\n",
    "<|im_start|>user\nHi<|im_end|>\n",
    "</s><s> \u4e16\u754c e\u0301",
    "<think>a</think>",
]
CHATML = (
    "{% for message in messages %}\n{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + "
    "'<|im_end|>' + '\\n' }}\n{%- endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
CHATS = [
    [{"role": "user", "content": " Hi there "}],
    [{"role": "user", "content": "a<b>"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}],
]


def model(index, vocab, ends, bos, pad):
    common = dict(vocab_size=vocab + 7, bos_token_id=bos, eos_token_id=ends, pad_token_id=pad, initializer_range=0.3)
    llama = dict(
        max_position_embeddings=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **common,
    )
    torch.manual_seed(index)
    if index % 5 == 0:
        return GPT2LMHeadModel(
            GPT2Config(
                n_positions=128,
                n_embd=64,
                n_layer=2,
                n_head=4,
                attn_pdrop=0.0,
                embd_pdrop=0.0,
                resid_pdrop=0.0,
                **common,
            )
        )
    if index % 5 == 1:
        return MistralForCausalLM(MistralConfig(sliding_window=None, **llama))
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=index % 2 == 0, **llama))


def ours(xlaunch, directory, lines, *options):
    command = [
        xlaunch,
        "generate",
        directory,
        "--prompts",
        "-",
        "--device",
        "cpu",
        "--max-tokens",
        str(TOKENS),
        "--json",
        *options,
    ]
    done = subprocess.run(
        command, input="".join(json.dumps(line) + "\n" for line in lines), capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{directory}: exit code {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xlaunch", required=True)
    xlaunch = parser.parse_args().xlaunch
    text = "\n".join(
        path.read_text() for path in sorted(pathlib.Path(__file__).resolve().parents[2].glob("docs/*.md"))
    )[:200_000]
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, tokenizer, end) in enumerate(families.families(text)):
            directory = pathlib.Path(folder) / str(index)
            end_id = tokenizer.token_to_id(end)
            start = tokenizer.encode("", add_special_tokens=True).ids
            bos = tokenizer.id_to_token(start[0]) if start else end
            fast = PreTrainedTokenizerFast(
                tokenizer_object=tokenizer,
                bos_token=bos,
                eos_token=end,
                pad_token=end,
                clean_up_tokenization_spaces=False,
            )
            fast.chat_template = CHATML if index % 2 else LLAMA
            # Frequent tokens are among them, so that texts end for every reason.
            ends = [end_id, *range(400, 430)]
            made = model(index, tokenizer.get_vocab_size(), ends, tokenizer.token_to_id(bos), end_id)
            made.save_pretrained(directory)
            fast.save_pretrained(directory)
            made, fast = AutoModelForCausalLM.from_pretrained(
                directory
            ).eval(), PreTrainedTokenizerFast.from_pretrained(directory)
            prompts = [(fast(prompt)["input_ids"], {"prompt": prompt}) for prompt in PROMPTS]
            prompts = [(ids or [end_id], line) for ids, line in prompts]
            chats = [
                (fast.apply_chat_template(chat, add_generation_prompt=True, return_dict=False), {"messages": chat})
                for chat in CHATS
            ]
            equal = 0
            texts = ours(xlaunch, directory, [line for _, line in prompts])
            texts += ours(xlaunch, directory, [line for _, line in chats], "--chat")
            for (ids, _), found in zip(prompts + chats, texts):
                with torch.no_grad():
                    out = made.generate(
                        torch.tensor([ids]),
                        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                        max_new_tokens=TOKENS,
                        do_sample=False,
                    )[0].tolist()
                ended = out[-1] in ends and len(out) > len(ids)
                whole, before = (fast.decode(part) for part in (out[:-1] if ended else out, ids))
                same = whole[len(before) :] == found["text"] and found["finish_reason"] == (
                    "end_of_text" if ended else "length"
                )
                equal += same
                if not same:
                    print(f"{name}: {ids}: {whole[len(before):]!r}, here {found['text']!r} ({found['finish_reason']})")
            count = len(PROMPTS) + len(CHATS)
            print(f"{name}: {equal} of {count} texts are equal", flush=True)
            different += count - equal
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
