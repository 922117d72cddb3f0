"""Time short sequences: host time, GPU time and steps of a small GPT, each beside PyTorch's own attention.

    python lab/sage_lab/bench/short.py host gpu gpt sla2 bits

It needs nothing of the lab, so that an earlier checkout's kernels can be timed by the same file (PYTHONPATH). Every
repetition runs each candidate once, in turn; times are medians. `bits` prints a digest of O and the gradients of twenty
shapes, the same before and after a change that must change no number.
"""

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_ref

Run = Callable[[], object]
TOKENS = 32_768  # of a batch whose GPU time is measured


def by_sdpa(backend: SDPBackend, *tensors: Tensor, is_causal: bool = False) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*tensors, is_causal=is_causal)


ATTENTIONS = {
    "cuDNN": partial(by_sdpa, SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": partial(by_sdpa, SDPBackend.FLASH_ATTENTION),
    "ours": partial(sage_ref.sagebwd_attention, backend="triton"),
}


def medians(candidates: dict[str, Run], seconds_of: Callable[[Run], float], repetitions: int) -> dict[str, float]:
    """Return the median of each candidate's seconds; every repetition runs each once."""
    times = {name: [seconds_of(run) for _ in range(3)] and [] for name, run in candidates.items()}
    for _ in range(repetitions):
        for name, run in candidates.items():
            times[name].append(seconds_of(run))
    return {name: statistics.median(found) for name, found in times.items()}


def host_seconds(run: Run, calls: int = 10) -> float:
    """Return the time until a call returns, while the GPU is not waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds


def gpu_seconds(replay: Run, calls: int = 5) -> float:
    """Return the GPU's time for a CUDA graph: no gaps between kernels."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def step_seconds(run: Run) -> float:
    """Return the time of a call and of all that it starts."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def both_passes(attention: Callable[..., Tensor], shape: tuple[int, ...], is_causal: bool = False) -> Run:
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad_output = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.autograd.grad(attention(*leaves, is_causal=is_causal), leaves, grad_output)


def captured(run: Run) -> Run:
    """Return the replay of a CUDA graph of a call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def shown(title: str, found: dict[str, float]) -> str:
    return f"{title}: " + ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in found.items())


def host() -> Iterator[str]:
    """Yield microseconds of the host for both passes, in the autograd engine's thread and in the caller's."""
    for n in (512, 2048):
        runs = {name: both_passes(attention, (1, 16, n, 128)) for name, attention in ATTENTIONS.items()}
        for own_thread in (True, False):
            with torch.autograd.set_multithreading_enabled(own_thread):
                found = medians(runs, host_seconds, 30)
            yield shown(f"host us, both passes, N={n}, {'engine' if own_thread else 'caller'}'s thread", found)
        query = torch.randn(1, 16, n, 128, device="cuda", dtype=torch.bfloat16)
        runs = {name: partial(attention, query, query, query) for name, attention in ATTENTIONS.items()}
        yield shown(f"host us, forward without gradients, N={n}", medians(runs, host_seconds, 30))


def gpu(heads: int = 16, head_dim: int = 128) -> Iterator[str]:
    """Yield microseconds of the GPU for both passes, and cuDNN's over ours."""
    for is_causal in (False, True):
        for n in (512, 1024, 2048):
            shape = TOKENS // n, heads, n, head_dim
            runs = {x: captured(both_passes(ATTENTIONS[x], shape, is_causal)) for x in ("cuDNN", "ours")}
            found = medians(runs, gpu_seconds, 15)
            title = f"GPU us, both passes, D={head_dim}, N={n}, {'causal' if is_causal else 'no mask'}"
            yield f"{shown(title, found)}, cuDNN/ours {found['cuDNN'] / found['ours']:.3f}"


def least() -> Iterator[str]:
    """Yield JSON of the lengths from which on both passes take at most 5% more time than PyTorch's choice of kernels.

    It belongs into sage_kernels/sagebwd/pays_from.json. A batch has TOKENS tokens, and heads for a width of 2,048.
    """
    found = {}
    for head_dim in (64, 128):
        for is_causal in (False, True):
            pays = 0
            for n in (512, 1024, 2048, 4096, 8192):
                shape = TOKENS // n, 2048 // head_dim, n, head_dim
                run = {
                    name: both_passes(attention, shape, is_causal)
                    for name, attention in (("theirs", F.scaled_dot_product_attention), ("ours", ATTENTIONS["ours"]))
                }
                times = medians(run, gpu_seconds, 10)
                print(shown(f"D={head_dim} {is_causal=} N={n}", times), file=sys.stderr)
                if times["ours"] > 1.05 * times["theirs"]:
                    pays = 2 * n
            found[f"D={head_dim}{' causal' if is_causal else ''}"] = pays
    major, minor = torch.cuda.get_device_capability()
    yield json.dumps({f"{major}.{minor}": found})


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int, attention: Callable[..., Tensor] | None):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        tensors = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        attention = self.attention or F.scaled_dot_product_attention
        x = x + self.out(attention(*tensors, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, attention: Callable[..., Tensor] | None = None, layers: int = 8, width: int = 768):
        super().__init__()
        self.embedding = nn.Embedding(16_384, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16_384, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def training_step(n: int, attention: Callable[..., Tensor] | None, context: Callable, compiled: bool) -> Run:
    torch.manual_seed(0)
    model = GPT(attention).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(16_384, (1, n + 1), device="cuda")
    call = torch.compile(model) if compiled else model

    def step() -> None:
        with context():
            loss = F.cross_entropy(call(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpt() -> Iterator[str]:
    """Yield microseconds of a training step of a small GPT: 8 layers, width 768, 12 heads of 64, bfloat16."""
    kinds = {
        "SDPA": (None, nullcontext),
        "called": (ATTENTIONS["ours"], nullcontext),
        "in sdpa()": (None, sage_ref.sdpa),
    }
    for n in (512, 2048):
        for name, is_compiled in (("eager", False), ("compiled", True)):
            runs = {kind: training_step(n, *how, is_compiled) for kind, how in kinds.items()}
            for own_thread in (True, False)[is_compiled:]:
                with torch.autograd.set_multithreading_enabled(own_thread):
                    found = medians(runs, step_seconds, 20)
                where = "engine" if own_thread else "caller"
                yield shown(f"GPT step us, N={n}, {name}, {where}'s thread", found)
            torch.compiler.reset()


def sla2() -> Iterator[str]:
    """Yield microseconds of SLA2 with a given mask at 8,192 tokens, 12 heads, 97%, both passes: host beside GPU."""
    n = 8192
    mask = torch.rand(1, 12, n // 128, n // 64, device="cuda") < 0.03
    mask[..., 0] = True

    def attention(*tensors: Tensor, is_causal: bool) -> Tensor:
        return sage_ref.sparse_linear_attention(*tensors, mask, 0.5, quantize=True, backend="triton")

    run = both_passes(attention, (1, 12, n, 128))
    with torch.autograd.set_multithreading_enabled(False):
        host_time = medians({"": run}, host_seconds, 20)[""]
    gpu_time = medians({"": captured(run)}, gpu_seconds, 15)[""]
    found = shown(f"SLA2 us, N={n}, both passes", {"host": host_time, "GPU": gpu_time})
    yield f"{found}, host/GPU {host_time / gpu_time:.2f}"


def bits() -> Iterator[str]:
    """Yield digests of O, dQ, dK, dV in twenty shapes, and the largest relative error against float64."""
    lengths = "512 512, 1 1, 113 203, 1024 1024, 2048 2048, 300 4100, 4100 300, 129 257, 640 640, 3000 3000"
    for n_q, n_k in (map(int, pair.split()) for pair in lengths.split(", ")):
        for head_dim in (64, 128):
            yield bits_of(n_q, n_k, head_dim, is_causal=(n_q + head_dim) % 3 == 0)


def bits_of(n_q: int, n_k: int, head_dim: int, is_causal: bool) -> str:
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(n_q + n_k + head_dim))
    leaves = [draw(2, 4, n, head_dim).bfloat16().requires_grad_() for n in (n_q, n_k, n_k)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grad_output = draw(2, 4, n_q, head_dim).bfloat16()

    def results(attention: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        output = attention(*inputs, is_causal=is_causal)
        return output.detach(), *torch.autograd.grad(output, inputs, grad_output.to(output.dtype))

    first, found = (results(ATTENTIONS["ours"], leaves) for _ in range(2))  # the second repeats what was recorded
    exact = results(F.scaled_dot_product_attention, wide)
    least = 1e-3 * grad_output.double().norm()
    error = max(((x - y).norm() / y.norm().clamp(min=least)).item() for x, y in zip(found, exact, strict=True))
    same = all(map(torch.equal, first, found))
    digests = " ".join(hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8] for x in found)
    mask = "causal" if is_causal else "no mask"
    return f"bits {n_q} x {n_k}, D={head_dim}, {mask}: {digests}, error {error:.4f}{'' if same else ', REPEAT DIFFERS'}"


if __name__ == "__main__":
    for part in sys.argv[1:]:
        for line in globals()[part]():
            print(line, flush=True)
