"""The command `profile`: measure what limits the Hopper kernels (Nsight Compute), and their clock and power under load.

A launch that is profiled alone runs on a cool card. In training a kernel follows the one before it without a pause, and
at its power limit the card lowers its clock. Therefore every kernel also runs in a loop for SECONDS, while nvidia-smi
reports clock and power.
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from sage_kernels.hopper.toolbox import fetched_rows
from sage_kernels.sagebwd.backward import level4, level5, level6_apart
from sage_kernels.sagebwd.ladder import prepare_forward, run_forward

from sage_lab.bench.case import Case, Shape
from sage_lab.bench.dense import backward_preparation
from sage_lab.bench.timing import require_gpu
from sage_lab.command_line import Failed
from sage_lab.records import Row, markdown_table, write_record

LENGTH, HEAD_DIMS = 8192, (128, 64)
LEVEL = 5  # forward and backward
SECONDS = 1.5
# Columns of the record, and the lines of Nsight Compute's report: per cent of what the unit could do; cycles per issued
# instruction that a warp waits; milliseconds and GHz; counts.
SHARED_METRICS = {
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
}
METRICS = {
    "tensor": "SM: Pipe Tensor Cycles Active",
    "issue": "SM: Issue Active",
    "exp2": "SM: Inst Executed Pipe Xu",
    "alu": "SM: Pipe Alu Cycles Active",
    "fma": "SM: Pipe Fma Cycles Active",
    "l2": "L2 Cache Throughput",
    "stall_barrier": "Stall Barrier",
    "stall_wait": "Stall Wait",
    "stall_not_selected": "Stall Not Selected",
    "profiled_ms": "Duration",
    "profiled_ghz": "SM Frequency",
    "clocks": "Elapsed Cycles",
    **SHARED_METRICS,
}
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
LAUNCH = re.compile(r"^  \S+ \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\)", re.MULTILINE)
UNITS = {"profiled_ms": {"us": 1e-3, "ms": 1, "s": 1e3}, "profiled_ghz": {"Mhz": 1e-3, "Ghz": 1}}  # the others: none
POWER_CAP = 0x4  # nvidia-smi's bit for a clock lowered by the power limit


def calls(head_dim: int) -> dict[str, Callable[[], object]]:
    """Return one launch of each Hopper kernel by name, not causal, and cuDNN's passes beside them."""
    heads = 2048 // head_dim
    case = Case(Shape(4, heads, heads, LENGTH, head_dim))
    query, key, value, grad_output = case.tensors
    forward = prepare_forward(query, key, value, LEVEL, scale=case.scale, smooth_k=True)
    backward = backward_preparation(case)(LEVEL)
    fetched, options = (fetched_rows(grad_output), fetched_rows(value)), case.options
    found = {"forward": lambda: run_forward(forward, LEVEL, **options)}
    for name in level4.kernels(head_dim):
        found[name] = lambda name=name: level4.run_kernel(name, backward, *fetched, **options)
    for name in set(level6_apart.kernels(head_dim)) - {"dq"}:
        found[name] = lambda: level6_apart.run_keys(backward, *fetched, is_causal=False)
    for name in level5.kernels(head_dim):  # the last of ours: a second program follows it
        found[name] = lambda: level5.run_hopper_backward(backward, **options)
    peer = case.peer("sdpa_cudnn")
    return found | {"cuDNN forward": peer.entry("fwd").call, "cuDNN backward": peer.entry("bwd").call}


def launch_once(head_dim: int) -> None:
    """Launch every kernel once for Nsight Compute, after a first launch that it does not look at."""
    ours = [run for name, run in calls(head_dim).items() if "cuDNN" not in name]
    for switch in (torch.cuda.cudart().cudaProfilerStart, torch.cuda.cudart().cudaProfilerStop):
        for run in ours:
            run()
        torch.cuda.synchronize()
        switch()


def report(head_dim: int) -> str:
    """Return Nsight Compute's text on `launch_once`, clocks left alone; `Failed` has its last words if it fails."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", "regex:_program$"]
    command += [word for section in SECTIONS for word in ("--section", section)] + ["--print-details", "all"]
    command += ["--metrics", ",".join(SHARED_METRICS.values())]
    code = f"from sage_lab.bench.profile import launch_once; launch_once({head_dim})"
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise Failed(f"ncu ended with exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout


def parsed(text: str) -> list[dict[str, float]]:
    """Return METRICS of every launch in a report, in the order of the launches.

    Raises:
        ValueError: a launch lacks one, or a time or a clock has a unit that UNITS lacks.
    """
    starts = [match.start() for match in LAUNCH.finditer(text)]
    found = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        values = {}
        for name, label in METRICS.items():
            # A count has no unit.
            line = re.search(rf"^ +{re.escape(label)} +(?:(\S+) +)?([\d.,]+)\s*$", text[start:end], re.MULTILINE)
            factor = line and UNITS[name].get(line[1]) if name in UNITS else 1
            if line is None or factor is None:
                raise ValueError(f"text: expected a line {label!r} of every launch, got {line and line[0]!r}")
            values[name] = float(line[2].replace(",", "")) * factor
        found.append(values)
    return found


def sustained(run: Callable[[], object]) -> dict[str, float | bool]:
    """Return milliseconds of a call, and clock (GHz) and power (watts) while it is repeated: nvidia-smi's median.

    The first third of its samples is left out: clock and power take their time.
    """
    query = "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
    device = str(torch.cuda.get_device_properties().uuid)
    command = ["nvidia-smi", "-i", f"GPU-{device}", query, "--format=csv,noheader,nounits", "-lms", "50"]
    run()  # compiles, or chooses an algorithm
    torch.cuda.synchronize()
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as watch:
        count, start = 0, time.monotonic()
        while (seconds := time.monotonic() - start) < SECONDS:
            for _ in range(10):
                run()
            torch.cuda.synchronize()
            count += 10
        watch.terminate()
        samples = [line.split(", ") for line in watch.stdout.read().splitlines()[:-1]]
    samples = samples[math.ceil(len(samples) / 3) :]
    capped = statistics.median(bool(int(reasons, 16) & POWER_CAP) for _, _, reasons in samples)
    return {
        "sustained_ms": round(1e3 * seconds / count, 4),
        "sustained_ghz": statistics.median(float(clock) for clock, _, _ in samples) / 1e3,
        "sustained_watts": statistics.median(float(watts) for _, watts, _ in samples),
        "power_capped": bool(capped),
    }


def profile_rows() -> Iterator[Row]:
    """Yield a row per kernel and head size; cuDNN's have no profile."""
    for head_dim in HEAD_DIMS:
        profiles = parsed(report(head_dim))
        for i, (name, run) in enumerate(calls(head_dim).items()):
            profile = dict.fromkeys(METRICS) if "cuDNN" in name else profiles[i]
            yield {"kernel": name, "head_dim": head_dim, "n": LENGTH} | profile | sustained(run)


def profile_command(options: argparse.Namespace) -> None:
    """Measure what limits the Hopper kernels; needs Nsight Compute."""
    require_gpu()
    found = list(profile_rows())
    print(markdown_table(found[0], [row.values() for row in found]))
    write_record(options.json, found, command=options.command)
