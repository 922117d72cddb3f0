"""Fill the launch table: time every candidate of every kernel on this GPU and keep the fastest that is correct."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from sage_kernels.common.candidates import Launch, candidates
from sage_kernels.sagebwd.backward.program import run_dkdv, run_dq
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS, prepare_backward, prepare_forward, run_forward
from sage_kernels.sagebwd.ops import forward_level
from torch import Tensor

from sage_lab.bench.judge import exact_head, require_close
from sage_lab.bench.paired import measure
from sage_lab.plan import FinishedParts


class Kernel(NamedTuple):
    kernel: str  # a key of DEFAULTS
    level: int
    head_dim: int
    causal: bool


class Prepared(NamedTuple):
    """Random tensors of one head size and what the kernels read of them."""

    tensors: tuple[Tensor, ...]  # query, key, value, grad_output
    exact: tuple[Tensor, ...]  # O, dQ, dK, dV of the first head
    scale: float


def kernels() -> Iterator[Kernel]:
    """Every kernel of every level for head sizes 64 and 128, causal or not; a level of Hopper's has no candidates."""
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        for levels in (FORWARD_LEVELS, BACKWARD_LEVELS):
            for level, chosen in enumerate(levels):
                for kernel in chosen.kernels(head_dim) if chosen.hopper is None else ():
                    yield Kernel(kernel, level, head_dim, causal)


def runner(kernel: Kernel, prepared: Prepared):
    """A function of a launch that runs the kernel and returns its outputs with what they should be."""
    options = {"is_causal": kernel.causal, "scale": prepared.scale}
    query, key, value, grad_output = prepared.tensors
    exact_o, exact_dq, exact_dk, exact_dv = prepared.exact
    if kernel.kernel == "forward":
        inputs = prepare_forward(query, key, value, kernel.level, scale=prepared.scale, smooth_k=True)
        return lambda launch: [(run_forward(inputs, kernel.level, launch=launch, **options)[0], exact_o)]
    chosen = BACKWARD_LEVELS[kernel.level]
    options["per_block"] = chosen.per_block
    feeding = forward_level(query.device, kernel.head_dim) if chosen.int8 else 0
    forward = prepare_forward(query, key, value, feeding, scale=prepared.scale, smooth_k=True)
    saved = run_forward(forward, feeding, is_causal=kernel.causal, scale=prepared.scale)
    hats = {"q_hat": forward.q_hat, "k_hat": forward.k_hat} if chosen.int8 else {}
    inputs = prepare_backward(grad_output, query, key, value, *saved, kernel.level, **hats)
    if kernel.kernel.startswith("dq"):
        return lambda launch: [(run_dq(inputs, chosen.key_tile, launch, **options), exact_dq)]
    outputs = kernel.kernel.partition("_")[0]

    def run(launch):
        dk, dv = run_dkdv(inputs, chosen.query_tile, launch, outputs=outputs, **options)
        return [pair for name, *pair in (("dk", dk, exact_dk), ("dv", dv, exact_dv)) if name in outputs]

    return run


def prepare(head_dim: int, causal: bool, batch: int, n: int) -> Prepared:
    size = (batch, 2048 // head_dim, n, head_dim)
    tensors = tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    scale = 1 / math.sqrt(head_dim)
    return Prepared(tensors, exact_head(*tensors, is_causal=causal, scale=scale), scale)


def compile_one(job: tuple[Kernel, Launch]) -> None:
    """Run one candidate on a small input, which leaves its machine code in Triton's cache."""
    kernel, launch = job
    try:
        runner(kernel, prepare(kernel.head_dim, kernel.causal, 1, 1024))(launch)
    except Exception as error:  # too much shared memory, say: `rows` meets the same error and reports it
        print(f"{kernel} {launch}: {error}"[:200])


def rows(workers: int, parts: FinishedParts) -> Iterator[dict]:
    """The fastest launch of every kernel, after compiling all candidates in parallel processes.

    parts: what an interrupted run timed; the rest is timed now and kept there.
    """
    wanted = [kernel for kernel in kernels() if str(kernel) not in parts.parts]
    compile_candidates(compile_one, wanted, workers)
    for (head_dim, causal), group in itertools.groupby(wanted, key=lambda kernel: (kernel.head_dim, kernel.causal)):
        prepared = prepare(head_dim, causal, 4, 8192)
        for kernel in group:
            run = runner(kernel, prepared)
            parts.rows(str(kernel), lambda kernel=kernel, run=run: [fastest(kernel, run)])
    for kernel in kernels():
        yield from parts.parts[str(kernel)]


def compile_candidates(compile_one: Callable, kernels: Iterable[Kernel], workers: int) -> None:
    """compile_one((kernel, launch)) for every candidate of every kernel, in parallel processes."""
    jobs = [(kernel, launch) for kernel in kernels for launch in candidates(kernel.kernel, kernel.level)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))


def fastest(kernel: Kernel, run: Callable[[Launch], list[tuple[Tensor, Tensor]]]) -> dict:
    """The row of one kernel. A candidate that fails or is wrong is out; if all are, so is the table.

    run: of a launch, the outputs with what they should be.
    """
    timings = {}
    for launch in candidates(kernel.kernel, kernel.level):
        try:
            for found, expected in run(launch):
                require_close(found, expected)
        except Exception as error:
            print(f"{kernel} {launch}: {error}"[:200])
        else:
            timings[launch] = measure(lambda launch=launch: run(launch)).ms_median
    if not timings:
        raise RuntimeError(f"tune: no candidate of {kernel} is correct")
    best = min(timings, key=timings.get)
    return {**kernel._asdict(), **best._asdict(), "ms_median": round(timings[best], 4)}
