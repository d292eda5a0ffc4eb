"""Attention by our own kernels for compute capability 9.0, compared with cuDNN's in PyTorch, on one GPU.

    python3 tests/gpu/attention.py

Compiles the kernels with NVRTC and launches them as `attention/hopper.rs` does, without the engine. First compares
results with PyTorch's in fp32; then prints times and TFLOP/s, counting half of the scores. "fixed" is the form of
backward that deterministic runs use. Exit code 1 if a result is wrong.
"""

import argparse
import ctypes
import glob
import math
import os
import pathlib
import sys

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "worker/engine/src"
HEADERS = ["cuda/headers/ptx.cuh", "cuda/headers/prelude.cuh", "cuda/headers/hopper.cuh",
           "cuda/headers/hopper_tiles.cuh", "ops/attention/hopper.cuh"]
# As in attention/hopper.rs.
SECTION_BYTES, FEW_TILES, OTHER_SHARED = 16 << 20, 8, 2048
REGISTERS = {1: dict(PRODUCER=120, CONSUMER=248), 2: dict(PRODUCER=40, CONSUMER=232),
             3: dict(PRODUCER=32, CONSUMER=160)}
# By the number of squares of 64 columns in the rows of a head.
FWD_STAGES, BWD_STAGES, QUERIES_STAGES = {1: 4, 2: 2, 3: 3, 4: 2}, {1: 3, 2: 2, 3: 2, 4: 2}, {1: 4, 2: 4, 3: 2, 4: 2}
QUERIES_GROUPS, LANES = {1: 3, 2: 2, 3: 1, 4: 1}, {1: 8, 2: 16, 3: 32, 4: 32}
TOLERANCE = 8e-3


def divide(a, b):
    return -(-a // b)


def nvrtc():
    import nvidia

    found = [path for base in nvidia.__path__ for path in glob.glob(f"{base}/*/lib/libnvrtc.so.1[0-9]")]
    return ctypes.CDLL(os.environ.get("XLAUNCH_NVRTC") or found[0])


NVRTC, CUDA = nvrtc(), ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        sys.exit(f"{what} failed: error {code}")


def compile_kernels(*files, **macros):
    """Returns the machine code of kernels whose scores are not capped."""
    macros.update(CAPPED=0, WARP=32, ACT="bf16", BLOCK_THREADS=256, COLUMN_BLOCK_X=32, COLUMN_BLOCK_Y=8)
    text = "\n".join((SOURCES / name).read_text() for name in [*HEADERS, *(f"ops/attention/{file}" for file in files)])
    options = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"--define-macro={k}={v}" for k, v in macros.items())]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(NVRTC.nvrtcCreateProgram(ctypes.byref(program), text.encode(), None, 0, None, None), "nvrtcCreateProgram")
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if NVRTC.nvrtcCompileProgram(program, len(options), array):
        NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        NVRTC.nvrtcGetProgramLog(program, log)
        sys.exit(log.value.decode())
    NVRTC.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetCUBIN(program, code)
    return code


class Config(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class Kernel:
    def __init__(self, code, name, threads, shared=0):
        module, self.function, self.threads, self.shared = ctypes.c_void_p(), ctypes.c_void_p(), threads, shared
        check(CUDA.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        check(CUDA.cuModuleGetFunction(ctypes.byref(self.function), module, name.encode()), name)
        check(CUDA.cuFuncSetAttribute(self.function, 8, shared), "cuFuncSetAttribute")

    def __call__(self, blocks, *args):
        kinds = {float: ctypes.c_float, int: ctypes.c_uint64}
        values = [kinds[type(arg)](arg) if type(arg) in kinds else
                  ctypes.c_uint64(arg.data_ptr()) if isinstance(arg, torch.Tensor) else arg for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        config = Config(blocks, 1, 1, self.threads, 1, 1, self.shared, stream, None, 0)
        check(CUDA.cuLaunchKernelEx(ctypes.byref(config), self.function, pointers, None), "cuLaunchKernelEx")


class Words(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(x):
    """Describes a (B, T, columns) tensor in boxes of 64 x 64."""
    memory = ctypes.create_string_buffer(192)
    result = Words.from_address((ctypes.addressof(memory) + 63) // 64 * 64)
    result.memory = memory
    batch, seq, columns = x.shape
    sizes, strides = (columns, seq, batch), (2 * columns, 2 * columns * seq)
    arrays = [(ctypes.c_uint64 * 3)(*sizes), (ctypes.c_uint64 * 2)(*strides), (ctypes.c_uint * 3)(64, 64, 1),
              (ctypes.c_uint * 3)(1, 1, 1)]
    address = ctypes.c_void_p(x.data_ptr())
    code = CUDA.cuTensorMapEncodeTiled(ctypes.byref(result), 9, 3, address, *arrays, 0, 3, 2, 0)
    check(code, "cuTensorMapEncodeTiled")
    return result


class Attention:
    """The kernels for a head width."""

    def __init__(self, width):
        self.width, self.slices = width, divide(width, 64)
        self.queries, self.keys = (128, 128) if self.slices == 1 else (64, 128 if self.slices == 2 else 64)
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        # Bytes of 64 rows of a head.
        rows = 8192 * self.slices
        stages, groups = FWD_STAGES[self.slices], QUERIES_GROUPS[self.slices]
        code = compile_kernels("hopper_fwd.cu", WIDTH=width, GROUPS=2, KEYS=self.keys, STAGES=stages, **REGISTERS[2])
        shared = (2 + 2 * stages * self.keys // 64) * rows + OTHER_SHARED
        self.fwd = Kernel(code, "attention_fwd_hopper", 384, shared)
        self.forms = {}
        stages, is_wide = BWD_STAGES[self.slices], self.slices > 2
        files = "hopper_bwd.cu", "hopper_bwd_wide.cu" if is_wide else "hopper_bwd_narrow.cu"
        for name, sums in ("sums", 1), ("fixed", 0):
            rows_code = compile_kernels("hopper_bwd_rows.cu", WIDTH=width, SUMS=sums)
            code = compile_kernels(*files, WIDTH=width, KEYS=self.keys, STAGES=stages, SUMS=sums, **REGISTERS[2])
            shared = 2 * (self.keys + stages * self.queries) // 64 * rows + OTHER_SHARED
            shared += 2 * (2 * sums + is_wide) * self.queries * self.keys + stages * self.queries * 8
            self.forms[name] = (Kernel(rows_code, "attention_bwd_hopper_prepare", 256),
                                Kernel(code, "attention_bwd_hopper", 384, shared))
            if sums:
                threads = 128 * max(2, self.slices)
                self.finish = Kernel(rows_code, "attention_bwd_hopper_finish", threads)
        code = compile_kernels("hopper_bwd_queries.cu", WIDTH=width, GROUPS=groups, KEYS=64,
                               STAGES=QUERIES_STAGES[self.slices], **REGISTERS[groups])
        shared = 2 * (groups + QUERIES_STAGES[self.slices]) * rows + OTHER_SHARED
        self.dq, self.dq_rows = Kernel(code, "attention_bwd_hopper_queries", 128 * (groups + 1), shared), 64 * groups

    def section(self, heads, tiles, size):
        has_few = heads * tiles < FEW_TILES * self.multiprocessors
        least = divide(2 * self.multiprocessors, tiles) if has_few else 1
        return max(1, min(heads, max(SECTION_BYTES // size, least)))

    def query_section(self, shape, tiles):
        batch, seq, heads, kv_heads = shape
        group = heads // kv_heads
        return group * self.section(batch * kv_heads, group * tiles, 4 * seq * self.width)

    def forward(self, shape, qkv, out, lse):
        batch, seq, heads, kv_heads = shape
        tiles = divide(seq, 128)
        blocks, maps = min(tiles * batch * heads, self.multiprocessors), tensor_map(qkv)
        section, scale = self.query_section(shape, tiles), self.width**-0.5
        return lambda: self.fwd(blocks, maps, out, lse, 0, seq, *shape, section, scale, 0.0)

    def backward(self, shape, form, qkv, out, lse, dout, dqkv):
        batch, seq, heads, kv_heads = shape
        (prepare, bwd), tiles, key_tiles = self.forms[form], divide(seq, self.queries), divide(seq, self.keys)
        rows, scale = batch * heads * tiles * self.queries, self.width**-0.5
        stats = torch.empty(rows, 2, device="cuda")
        sums = torch.empty(rows * 64 * self.slices if form == "sums" else 0, device="cuda")
        maps = tensor_map(qkv), tensor_map(dout)
        size = (8 if form == "sums" else 4) * seq * self.width
        section = self.section(batch * kv_heads, key_tiles, size)
        dq_tiles = divide(seq, self.dq_rows)
        dq_section = self.query_section(shape, dq_tiles)

        def run():
            prepare(divide(rows * LANES[self.slices], 256), out, dout, lse, stats, sums, batch, seq, heads)
            bwd(batch * kv_heads * key_tiles, *maps, stats, sums, dqkv, 0, seq, *shape, section, scale, 0.0)
            if form == "sums":
                self.finish(batch * heads * tiles, sums, dqkv, seq, heads, kv_heads, scale)
            else:
                self.dq(batch * heads * dq_tiles, *maps, stats, dqkv, 0, seq, *shape, dq_section, scale, 0.0)

        return run


def split(x, shape, width):
    batch, seq, heads, kv_heads = shape
    parts = x.view(batch, seq, heads + 2 * kv_heads, width).split([heads, kv_heads, kv_heads], 2)
    return [part.transpose(1, 2) for part in parts]


def inputs(shape, width, scale):
    batch, seq, heads, kv_heads = shape
    qkv = scale * torch.randn(batch, seq, (heads + 2 * kv_heads) * width, device="cuda")
    out = torch.full((batch, seq, heads * width), math.nan, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn(out.shape, device="cuda").bfloat16()
    return qkv.bfloat16(), dout, out, torch.empty(batch, heads, seq, device="cuda")


def distances(kernels, shape):
    """Returns relative differences from fp32: of out, lse, and the gradient in both forms."""
    (batch, seq, heads, kv_heads), width = shape, kernels.width
    qkv, dout, out, lse = inputs(shape, width, 2.0)
    x = qkv.float().requires_grad_()
    q, k, v = split(x, shape, width)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    hidden = torch.ones(seq, seq, device="cuda", dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) * width**-0.5).masked_fill(hidden, -math.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).reshape(out.shape)
    expected.backward(dout.float())
    kernels.forward(shape, qkv, out, lse)()
    pairs = [(out, expected), (lse, scores.logsumexp(-1))]
    for form in kernels.forms:
        dqkv = torch.full_like(qkv, math.nan)
        kernels.backward(shape, form, qkv, out, lse, dout, dqkv)()
        pairs.append((dqkv, x.grad))
    return [((ours.float() - theirs).norm() / theirs.norm()).item() for ours, theirs in pairs]


def milliseconds(run):
    """Returns the median of five times of many launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def several(count):
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    several(3)
    count = max(10, int(60 / several(3)))
    return sorted(several(count) for _ in range(5))[2]


def measure(kernels, shape):
    (batch, seq, heads, kv_heads), width = shape, kernels.width
    qkv, dout, out, lse = inputs(shape, width, 1.0)
    dqkv = torch.empty_like(qkv)
    q, k, v = (part.detach().requires_grad_() for part in split(qkv, shape, width))
    # Without cuDNN for this width, PyTorch takes FlashAttention 2.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        attend = lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        with torch.no_grad():
            theirs = [milliseconds(attend)]
        result, gradient = attend(), dout.view(batch, seq, heads, width).transpose(1, 2)
        theirs.append(milliseconds(lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)))
    ours = [milliseconds(kernels.forward(shape, qkv, out, lse))]
    ours += [milliseconds(kernels.backward(shape, form, qkv, out, lse, dout, dqkv)) for form in kernels.forms]
    work = 2e-9 * batch * heads * seq * seq * width
    cells = []
    for time, other, factor in zip(ours, [theirs[0], theirs[1], theirs[1]], [1, 2.5, 2.5]):
        cells.append(f"{time:.3f} ms, {factor * work / time:.0f} ({other / time:.2f})")
    rates = [f"{time:.3f} ms, {factor * work / time:.0f}" for time, factor in zip(theirs, [1, 2.5])]
    row = [width, seq, batch, heads, kv_heads, rates[0], cells[0], rates[1], *cells[1:]]
    print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 80, 96, 128, 192, 256])
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    driver = torch.cuda.get_device_name(), torch.__version__, torch.backends.cudnn.version()
    print("{}, PyTorch {}, cuDNN {}".format(*driver))
    wrong = False
    for width in options.widths:
        kernels = Attention(width)
        for shape in (2, 1000, 4, 2), (1, 2048, 2, 2), (3, 77, 2, 1), (1, 1, 2, 2):
            found = distances(kernels, shape)
            wrong |= not max(found) < TOLERANCE
            print(f"D {width}, (B, T, H, Hkv) {shape}: differences", *(f"{x:.1e}" for x in found))
        print("| D | T | B | H | Hkv | forward: cuDNN | own (cuDNN / own) | backward: cuDNN | own, sums | own, fixed |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for seq in options.seq:
            measure(kernels, (options.tokens // seq, seq, 2048 // width, 2048 // width))
        for seq in options.seq[:3]:
            heads = 2048 // width // 4 * 4
            measure(kernels, (options.tokens // seq, seq, heads, heads // 4))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
