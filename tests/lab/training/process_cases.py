"""Processes for tests of training, forked from one that has imported torch: alone, or as torchrun sets them up."""

import contextlib
import multiprocessing
import os
import socket

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# The last two are what a first step of training imports.
CONTEXT.set_forkserver_preload(
    ["pytest", "sage_ref.parallel", "sage_lab.training.pretrain", "numpy.random", "torch._dynamo"]
)
LIMIT = 120  # seconds


def run_forked(target, *arguments):
    """Exit code of target(*arguments) in a process of its own."""
    (code,) = run_all([(target, arguments)])
    return code


def run_together(folder, target, *arguments, count=2):
    """target(*arguments) in `count` processes that find each other as torchrun's do; what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [folder / f"rank{rank}.txt" for rank in range(count)]
    codes = run_all([(as_one_of, (count, rank, port, outputs[rank], target, arguments)) for rank in range(count)])
    printed = "".join(path.read_text() for path in outputs)
    assert codes == [0] * count, printed
    return printed


def run_all(calls):
    processes = [CONTEXT.Process(target=target, args=arguments) for target, arguments in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def as_one_of(count, rank, port, output, target, arguments):
    """What torchrun does for a process, as far as torch.distributed reads it."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        target(*arguments)
