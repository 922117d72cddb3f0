"""Processes for tests, forked from one that has imported torch and set up as torchrun does."""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from multiprocessing import util
from pathlib import Path

import torch
from torch.distributed import TCPStore

CONTEXT = multiprocessing.get_context("forkserver")
# The last two are what a first step of training imports.
CONTEXT.set_forkserver_preload(
    ["pytest", "sage_ref.parallel", "sage_lab.training.pretrain", "numpy.random", "torch._dynamo"]
)
LIMIT = 600  # seconds
# All tests share the process that is forked, so its socket must outlive a test's own folder for temporary files.
of_the_run, tempfile.tempdir = tempfile.tempdir, str(Path(tempfile.gettempdir()).parent)
util.get_temp_dir()
tempfile.tempdir = of_the_run


def run_together(folder, target, *arguments, count=2):
    """target(*arguments) in `count` processes that find each other as torchrun's do; what they print."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, it outlives who ends first
    outputs = [folder / f"rank{rank}.txt" for rank in range(count)]
    places = [(count, rank, store.port, output, target, arguments) for rank, output in enumerate(outputs)]
    started = [CONTEXT.Process(target=as_one_of, args=place) for place in places]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=LIMIT)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    printed = "".join(path.read_text() for path in outputs)
    assert codes == [0] * count, printed
    return printed


def as_one_of(count, rank, port, output, target, arguments):
    """What torchrun does for a process, as far as torch.distributed reads it."""
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    places |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with output.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            target(*arguments)
        except Exception:
            traceback.print_exc()
            raise
