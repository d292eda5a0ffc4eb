"""Runs lm-evaluation-harness against `xlaunch serve`, and against the exported model with its `hf` backend.

    python3 tests/peers/harness.py --xlaunch PATH      # needs torch, transformers, lm-eval[api,hf]

A small model is trained for a few steps. Its run is served, and its export is loaded by transformers. Four tasks of
local data, one for each kind of request: `loglikelihood`, `multiple_choice`, `loglikelihood_rolling` over texts of
several contexts, and `generate_until`. Each is run with one request at a time, and with several prompts in concurrent
requests. Log-likelihoods of every sample are equal within 1e-3, the answers and texts are equal, and so are the scores.

Prints the scores of both sides; exit code 1 on a difference.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

FOLDER = tempfile.TemporaryDirectory()
# Read when the harness is imported: nothing is downloaded, and nothing is left behind.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=f"{FOLDER.name}/hf")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from exported import Runs, train
from serving import CONTEXT, Server, documents, make

TOLERANCE = 1e-3
TASKS = {
    "local_loglikelihood": "output_type: loglikelihood\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
    "metric_list:\n  - metric: acc\n  - metric: perplexity\n",
    "local_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
    "doc_to_target: label\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    "local_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
    "local_generation": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{said}}'\n"
    "generation_kwargs:\n  until: ['.', 'zz']\n  max_gen_toks: 16\n  do_sample: false\n"
    "metric_list:\n  - metric: exact_match\n",
}


def continuation(model, tokenizer, text, count):
    """Returns the most likely continuation of a text."""
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=count, do_sample=False)[0]
    return tokenizer.decode(out[ids["input_ids"].shape[1] :], skip_special_tokens=True)


def write_tasks(folder, text, out):
    """Writes the tasks, whose questions are parts of a text. Each second answer is what the model would say."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    words = text.split()
    part = lambda at, count: " ".join(words[at : at + count])
    questions = []
    for i in range(30):
        question = part(37 * i, 6 + 5 * (i % 9))
        known = i % 2 == 0
        choices = [" " + part(37 * i + 100 * j, 1 + (i + j) % 4) for j in range(3)]
        answer = continuation(model, tokenizer, question, 1 + i % 3) if known else ""
        answer = answer or " " + part(37 * i + 60, 2)
        choices[i % 3] = answer
        # The answer of the model ends like the generation of the task.
        said = continuation(model, tokenizer, question, 16) if known else "x"
        said = said.split(".")[0].split("zz")[0]
        questions.append(dict(question=question, answer=answer, choices=choices, label=i % 3, said=said))
    texts = [{"text": part(211 * i, 4 + 60 * i)} for i in range(6)]
    for name, lines in (("questions", questions), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in TASKS.items():
        data = folder / ("texts.jsonl" if name == "local_rolling" else "questions.jsonl")
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + task)


def evaluate(folder, model, arguments, batch):
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        batch_size=batch,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    answers = {
        name: [(sample["doc_id"], sample["filtered_resps"]) for sample in samples]
        for name, samples in found["samples"].items()
    }
    scores = {
        f"{name} {metric.split(',')[0]}": value
        for name, metrics in found["results"].items()
        for metric, value in metrics.items()
        if "," in metric and "stderr" not in metric
    }
    return answers, scores


def same(ours, theirs):
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float):
        return abs(ours - theirs) < TOLERANCE
    return ours == theirs


def main():
    # The models are so small that more threads would only wait for each other.
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xlaunch", required=True)
    xlaunch = parser.parse_args().xlaunch
    folder, text = pathlib.Path(FOLDER.name), documents()
    make(folder / "base", "GPT-2", text)
    (folder / "text.txt").write_text(text)
    runs = Runs(xlaunch, folder)
    tokenizer = folder / "base/tokenizer.json"
    # The model learns to end a text after each line, also where the harness asks for one token more.
    prepare = ("data", "prepare", "--tokenizer", tokenizer, "--documents", "\n", "--output", "tokens", "--val", "0")
    runs.call(*prepare, "text.txt")
    config = f'[checkpoint]\ninit = "{folder}/base"\n[data]\ntrain = ["{folder}/tokens"]\n'
    _, out = runs.train_and_export("run", config + train(150, "lr = 3e-3\n"))
    write_tasks(folder, text, out)
    # The API needs room for one token more, and the harness leaves room for another.
    theirs = evaluate(folder, "hf", f"pretrained={out},dtype=float32,max_length={CONTEXT - 2}", 4)
    failed = False
    with Server(xlaunch, folder / "run/runs/train/latest") as server:
        for batch, concurrent in ((1, 1), (3, 4)):
            arguments = (
                f"model={server.model},base_url={server.url}/completions,tokenizer_backend=huggingface,tokenizer={out},"
                f"max_length={CONTEXT},num_concurrent={concurrent},max_retries=1,add_bos_token=True"
            )
            ours = evaluate(folder, "local-completions", arguments, batch)
            for name in TASKS:
                equal = sum(map(same, ours[0][name], theirs[0][name]))
                count = len(theirs[0][name])
                print(f"{name}, {concurrent} x {batch}: {equal} of {count} samples are equal", flush=True)
                failed |= equal != count
            for name, value in theirs[1].items():
                print(f"  {name}: served {ours[1][name]:.6f}, hf {value:.6f}", flush=True)
                failed |= abs(ours[1][name] - value) > TOLERANCE * max(1, abs(value))
    greedy = [is_greedy for _, [(_, is_greedy)] in theirs[0]["local_loglikelihood"]]
    print(f"greedy answers: {sum(greedy)} of {len(greedy)}")
    sys.exit(failed or sum(greedy) in (0, len(greedy)))


if __name__ == "__main__":
    main()
