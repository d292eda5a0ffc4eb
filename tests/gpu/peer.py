"""PyTorch's part of `compare.py`: trains one of the models and prints its measurements as one line of JSON.

    torchrun --standalone --nproc-per-node N tests/gpu/peer.py --model A --data tokens.bin --weights init.safetensors

Well-tuned PyTorch: torch.compile over model and loss as one graph (an error if that is not possible), the vocabulary
padded to a multiple of 128, SDPA, bf16 autocast over fp32 weights, fused AdamW, DDP with gradient_as_bucket_view and
static_graph, clipping, pinned batches, no synchronisation within a step. For `--precision fp8`, torchao's
Float8Linear, with a scale per tensor, in place of the blocks' linear layers. With `--fsdp`, FSDP2 in place of DDP:
parameters, gradients and optimizer are divided among the ranks, bf16 weights gathered for a block at a time, and blocks
and loss compiled each by itself. Experts are multiplied by torch's grouped_mm. Tokens, initial weights and learning
rate are the same as for xlaunch.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

START = time.time()

import numpy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from runner import BATCHES, SIZES  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
from model import GPT, loss, optimizer  # noqa: E402

LR, WARMUP = 3e-4, 20


def padded_vocab(sizes):
    return -(-sizes["vocab"] // 128) * 128


class WithLoss(torch.nn.Module):
    """Model and loss, to be compiled as one graph. The rows added to the vocabulary are zero; as they take part in the
    softmax, the loss is a thousandth higher at first, at no cost in speed."""

    def __init__(self, sizes):
        super().__init__()
        self.model = GPT(sizes | {"vocab": padded_vocab(sizes)})
        self.loss = loss

    def forward(self, tokens, targets):
        if not self.model.c["experts"]:
            return self.loss(self.model(tokens), targets)
        logits, routers = self.model(tokens, with_routers=True)
        # The losses of routers have gradients, but are not part of the value, as in xlaunch's metrics.
        return self.loss(logits, targets) + routers - routers.detach()


def initial(model):
    """Sets the same initial weights every time. Runs on the GPU, where billions of weights take a second."""
    torch.manual_seed(1337)
    with torch.device("cuda"):
        return GPT(SIZES[model]).state_dict()


def save_initial(model, path):
    """Writes the initial weights to a file that both sides can read."""
    state = initial(model)
    if SIZES[model]["tied"]:
        del state["head.weight"]
    save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, path)
    del state
    torch.cuda.empty_cache()


def load(net, path):
    state = load_file(path)
    padded = net.wte.num_embeddings
    for name in ("wte.weight", "head.weight"):
        if name in state:
            state[name] = pad(state[name], (0, 0, 0, padded - state[name].shape[0]))
    net.load_state_dict(state, strict=False)


def divide(whole, mode):
    """Divides the model among the ranks, block by block. Embedding and head stay gathered between forward and
    backward."""
    # Rotary embeddings receive angles in fp32, and hidden states are already in bf16.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
    for block in whole.model.blocks:
        block.compile(mode=mode, fullgraph=True)
        fully_shard(block, mp_policy=policy)
    fully_shard(whole, mp_policy=policy)
    whole.loss = torch.compile(loss, mode=mode, fullgraph=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "tf32", "fp32", "fp8"])
    parser.add_argument("--fsdp", action="store_true", help="divide the model among the ranks")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps before the measured ones")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--announce", action="store_true", help="print `first step TIME RANK PID` after the first step")
    options = parser.parse_args()
    rank, world, local = (int(os.environ.get(k, d)) for k, d in [("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)])
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = options.precision != "fp32"
    sizes = SIZES[options.model]
    with device:
        whole = WithLoss(sizes)
    load(whole.model, options.weights)
    if options.precision == "fp8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(whole, config=Float8LinearConfig.from_recipe_name("tensorwise"),
                                   module_filter_fn=lambda module, name: ".blocks." in name)
    mode = None if options.mode == "default" else options.mode
    if options.fsdp:
        divide(whole, mode)
        net = whole
        torch.cuda.reset_peak_memory_stats()
    else:
        net = torch.compile(whole, mode=mode, fullgraph=True)
    opt = optimizer(whole, options.lr, fused=True)
    if world > 1 and not options.fsdp:
        net = DistributedDataParallel(net, device_ids=[local], gradient_as_bucket_view=True, static_graph=True)
    autocast = options.precision in ("bf16", "fp8") and not options.fsdp
    tokens = torch.from_numpy(numpy.fromfile(options.data, dtype=numpy.uint16).astype(numpy.int64))
    rows, seq = BATCHES[options.model], sizes["seq"]
    count = rows * seq

    def batch(step):
        first = ((step * world + rank) * count) % (len(tokens) - count - 1)
        window = tokens[first : first + count + 1]
        return [x.view(rows, seq).pin_memory() for x in (window[:-1], window[1:])]

    batches = [batch(step) for step in range(options.warmup + options.steps)]

    def train(step):
        for group in opt.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP)
        x, y = (part.to(device, non_blocking=True) for part in batches[step])
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            value = net(x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0, foreach=True)
        opt.step()
        opt.zero_grad(set_to_none=world == 1 or options.fsdp)
        # A CUDA graph overwrites its outputs at the next replay.
        return value.detach().clone()

    losses = []
    for step in range(options.warmup):
        losses.append(train(step))
        if step == 0:
            losses[0].item()
            first_step = time.time() - START
            if options.announce:
                print(f"first step {time.time()} {rank} {os.getpid()}", flush=True)
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
    events[0].record()
    for i in range(options.steps):
        losses.append(train(options.warmup + i))
        events[i + 1].record()
    losses = torch.stack(losses)
    if world > 1:
        dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    times = [events[i].elapsed_time(events[i + 1]) for i in range(options.steps)]
    if rank == 0:
        print(json.dumps({
            "step_ms": statistics.median(times), "mean_ms": statistics.mean(times),
            "tokens_per_second": world * count / statistics.median(times) * 1e3,
            "first_step_seconds": first_step, "peak_bytes": torch.cuda.max_memory_allocated(),
            "losses": losses.tolist(),
        }), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
