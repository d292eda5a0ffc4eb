"""Compares what `xlaunch serve` answers with transformers, and with `xlaunch generate`.

    python3 tests/peers/served.py --xlaunch PATH      # needs torch, transformers

Models with random weights and tokenizers of several families, on the CPU in fp32. For each are compared:

- log-probabilities of prompts (texts, ids, and lists of them) with `echo`, and of generated tokens, with the
  log-softmax of transformers' logits, within 1e-4; the most likely tokens at each place; texts and offsets of tokens;
- greedy texts of prompts and chats, and texts drawn with a seed, with `xlaunch generate`.

Prints a line per family; exit code 1 with the difference otherwise.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch

from serving import Server, documents, make

FAMILIES = ("GPT-2", "Llama 2", "Llama 3", "Gemma")
PROMPTS = ["Once upon a time, it's 12345!\n", "", "caf\u00e9 \U0001f980\u4e16\u754c", "a" * 150]
CHAT = [
    {"role": "user", "content": " Hi there "},
    {"role": "assistant", "content": "x"},
    {"role": "user", "content": "?"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": " Hi "}, {"type": "text", "text": "there "}]}]
TOKENS, TOP, TOLERANCE = 12, 4, 1e-4


def check(condition, what):
    if not condition:
        sys.exit(f"DIFFERENT: {what}")


def scores(model, ids):
    """Returns the log-softmax of the logits after each id."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def check_places(entries, expected, ids, first, what):
    """Compares log-probabilities of `ids[first:]` and of the most likely tokens in their places."""
    for (logprob, top), at in zip(entries, range(first, len(ids)), strict=True):
        if at == 0:
            check(logprob is None and top is None, f"{what}: the first token has a log-probability")
            continue
        row = expected[at - 1]
        check(abs(logprob - row[ids[at]].item()) < TOLERANCE, f"{what}: token {at}: {logprob}, {row[ids[at]].item()}")
        theirs = torch.topk(row, TOP).values.tolist()
        near = all(abs(a - b) < TOLERANCE for a, b in zip(sorted(top, reverse=True)[:TOP], theirs, strict=True))
        check(near and logprob in top or logprob < min(top) + TOLERANCE, f"{what}: token {at}: {top}, {theirs}")


def completions(server, model, fast):
    """Compares prompts in all their forms, in one request each."""
    ids = [fast(prompt)["input_ids"] or [fast.bos_token_id] for prompt in PROMPTS]
    ids = [prompt[:100] for prompt in ids]
    texts = PROMPTS[:3]
    for prompts, of in ((ids, ids), (texts, ids), (ids[0], ids[:1]), (texts[2], ids[2:3])):
        if prompts is texts:
            of = ids[:3]
        body = dict(prompt=prompts, max_tokens=TOKENS, temperature=0, logprobs=TOP, echo=True)
        reply = server.post("/completions", **body)
        check(len(reply["choices"]) == len(of), "number of choices")
        for choice, prompt in zip(sorted(reply["choices"], key=lambda it: it["index"]), of):
            logprobs = choice["logprobs"]
            with torch.no_grad():
                out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
            places = zip(logprobs["token_logprobs"], logprobs["top_logprobs"])
            entries = [(logprob, top and list(top.values())) for logprob, top in places]
            check_places(entries, scores(model, out), out, 0, f"{prompt[:9]}")
            check(len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(out), "number of tokens")
            for id, token, start in zip(out, logprobs["tokens"], logprobs["text_offset"]):
                # Bytes that stand for themselves depend on their neighbours, so a decoder waits for the next token. It
                # may strip the first space.
                text = choice["text"][start : start + len(token) + 12]
                # A model may have more ids than its tokenizer.
                name = fast.convert_ids_to_tokens(id) or ""
                check(name or token == f"token_id:{id}", f"{token!r} is {id}")
                byte = not name or name.startswith("<0x") or token.startswith("bytes:")
                check(byte or token in fast.all_special_tokens or token.strip() in text, f"{token!r}: {text!r}")
        usage = reply["usage"]
        check(usage["prompt_tokens"] == sum(map(len, of)), f"usage: {usage}")


def chat(server, model, fast, messages):
    prompt = fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    body = dict(messages=messages, max_tokens=TOKENS, temperature=0, logprobs=True, top_logprobs=TOP)
    reply = server.post("/chat/completions", **body)
    check(reply["usage"]["prompt_tokens"] == len(prompt), f"prompt: {reply['usage']}: {len(prompt)} tokens")
    choice = reply["choices"][0]
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    content = choice["logprobs"]["content"]
    entries = [(it["logprob"], [top["logprob"] for top in it["top_logprobs"]]) for it in content]
    check_places(entries, scores(model, out), out, len(prompt), "chat")
    # The token that ends the text is scored, but has no text.
    raw = b"".join(bytes(it["bytes"]) for it in content if it["token"] != fast.eos_token)
    text = choice["message"]["content"]
    # A byte that is not a character by itself also changes the text of the bytes beside it.
    check("\ufffd" in text or raw.decode().strip() == text.strip(), f"bytes: {raw}: {text!r}")


def generated_texts(xlaunch, directory, lines, *options):
    command = [xlaunch, "generate", directory, "--prompts", "-", "--device", "cpu", "--max-tokens", str(TOKENS)]
    prompts = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([*command, "--json", *options], input=prompts, capture_output=True, text=True)
    check(done.returncode == 0, done.stderr)
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def texts(server, xlaunch, directory):
    """Compares texts with those of `xlaunch generate`."""
    lines = [{"prompt": prompt} for prompt in PROMPTS[:3]]
    # At a temperature of 1, the probabilities of a model with random weights are nearly equal. Then their order depends
    # on rounding, and that on the requests that share a batch.
    drawn = ["--temperature", "0.05", "--seed", "5", "--top-p", "0.9", "--samples", "3"]
    for options, body in (
        (["--temperature", "0"], dict(temperature=0)),
        (drawn, dict(temperature=0.05, seed=5, top_p=0.9, n=3)),
    ):
        ours = generated_texts(xlaunch, directory, lines, *options)
        reply = server.post("/completions", prompt=PROMPTS[:3], max_tokens=TOKENS, **body)
        for found, choice in zip(ours, reply["choices"], strict=True):
            check(found["text"] == choice["text"], f"{found}: {choice['text']!r}")
        generated = sum(found["tokens"] for found in ours)
        check(reply["usage"]["completion_tokens"] == generated, f"{reply['usage']}: {generated} tokens")
    reply = server.post("/chat/completions", messages=CHAT, max_tokens=TOKENS, temperature=0)
    found = generated_texts(xlaunch, directory, [{"messages": CHAT}], "--chat", "--temperature", "0")
    ours, theirs = found[0]["text"], reply["choices"][0]["message"]["content"]
    check(ours == theirs, f"chat: {ours!r}, {theirs!r}")


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xlaunch", required=True)
    xlaunch = parser.parse_args().xlaunch
    text = documents()
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            directory = pathlib.Path(folder) / family.replace(" ", "-")
            model, fast = make(directory, family, text)
            with Server(xlaunch, directory) as server:
                completions(server, model, fast)
                chat(server, model, fast, CHAT)
                chat(server, model, fast, PARTS)
                texts(server, xlaunch, directory)
            print(f"{family}: equal: log-probabilities, texts, chats", flush=True)


if __name__ == "__main__":
    main()
