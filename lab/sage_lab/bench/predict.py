"""The command `predict`: does INT8 attention pay on a GPU that we don't have? A prediction from counted instructions.

`choose` compiled the kernels for the GPU's compute capability; `timing_model` says how long they should take. The
peer, FlashAttention-2, stands in our ladder: forward it is level 0. Backward, level 0 takes two passes with 7 matmuls,
FlashAttention-2 one with 5; so it is given 5 / 7 of level 0's time. What INT8 needs around its kernels, smoothing,
quantising and transposing, is limited by memory: BYTES per number of a [B, H, N, D] tensor over the data sheet's
bandwidth. The Hopper levels are not predicted; they were measured.
"""

import argparse
from collections.abc import Iterator
from functools import cache

from sage_kernels.common.launch_tables import SAME_CODE
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS

from sage_lab.bench.choose import TABLE, kernel_of
from sage_lab.bench.timing_model import Gpu, gpus, milliseconds
from sage_lab.command_line import positive
from sage_lab.records import Row, markdown_table, read_record, write_record

TOKENS = 4 * 2048  # heads times head size, of all samples, as in `bench`
# Read and written once per number, in bytes. Forward: Q and V read and their copies written; K read twice, its mean
# first. Backward: dO and O read, dO^ written, Q^ and K^ transposed; FlashAttention-2 reads dO and O for delta.
INT8, PEER = "INT8", "FlashAttention-2"
BYTES = {(INT8, "fwd"): 11, (INT8, "bwd"): 9, (PEER, "fwd"): 0, (PEER, "bwd"): 4}
PORTABLE = {
    "fwd": [level for level, chosen in enumerate(FORWARD_LEVELS) if chosen.hopper is None],
    "bwd": [level for level, chosen in enumerate(BACKWARD_LEVELS) if chosen.hopper is None],
}
# The level that `ops` runs where Hopper's can't, and the one that stands for the peer; which share of its time counts.
LEVEL = {(INT8, direction): levels[-1] for direction, levels in PORTABLE.items()}
LEVEL |= {(PEER, direction): 0 for direction in PORTABLE}
WORTH = 1.05  # times as fast: less is within the prediction's error
SHARE = dict.fromkeys(LEVEL, 1.0) | {(PEER, "bwd"): 5 / 7}


@cache
def compiled_rows(gpu: Gpu) -> list[Row]:
    """What `choose` recorded for this GPU's compute capability."""
    wanted = SAME_CODE.get(gpu.capability, gpu.capability)
    return read_record(TABLE).select(capability=wanted)


def kernel_ms(gpu: Gpu, direction: str, level: int, head_dim: int, n: int, causal: bool) -> float:
    """Of a level's kernels, of 4 samples with 2048 / head_dim heads."""
    levels = FORWARD_LEVELS if direction == "fwd" else BACKWARD_LEVELS
    names = levels[level].kernels(head_dim)
    rows = [x for x in compiled_rows(gpu) if (x["level"], x["head_dim"]) == (level, head_dim) and x["kernel"] in names]
    if sorted(row["kernel"] for row in rows) != sorted(names):
        raise ValueError(f"gpu: expected one whose kernels `choose` compiled, got {gpu.name} ({gpu.capability})")
    return sum(milliseconds(kernel_of(row), gpu, TOKENS // head_dim, n, causal) for row in rows)


def around_ms(gpu: Gpu, provider: str, direction: str, n: int) -> float:
    """Of what is done around the kernels, which memory limits."""
    return BYTES[provider, direction] * TOKENS * n / (gpu.memory_gb_s * 1e6)


def op_ms(gpu: Gpu, provider: str, direction: str, head_dim: int, n: int, causal: bool) -> float:
    """Of attention as a user calls it. provider: INT8 or PEER. direction: "fwd", "bwd" or "fwd+bwd"."""
    return sum(
        SHARE[provider, part] * kernel_ms(gpu, part, LEVEL[provider, part], head_dim, n, causal)
        + around_ms(gpu, provider, part, n)
        for part in direction.split("+")
    )


def tops(ms: float, direction: str, n: int, causal: bool) -> float:
    """As `bench` counts: backward is 2.5 times forward, a causal mask halves."""
    return 4 * TOKENS * n * n * {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}[direction] / (1 + causal) / ms / 1e9


def rows(gpu: Gpu, n: int) -> Iterator[Row]:
    """One row per level, head size and mask, kernels alone; then what a user calls, FlashAttention-2 and INT8."""
    for head_dim in (64, 128):
        for causal in (False, True):
            shape = {"gpu": gpu.name, "n": n, "head_dim": head_dim, "causal": causal}
            for direction, levels in PORTABLE.items():
                for level in levels:
                    ms = kernel_ms(gpu, direction, level, head_dim, n, causal)
                    yield row(shape, "kernel", level, direction, ms)
            for direction in ("fwd", "bwd", "fwd+bwd"):
                for provider in (PEER, INT8):
                    yield row(shape, "op", provider, direction, op_ms(gpu, provider, direction, head_dim, n, causal))


def row(shape: dict, scope: str, level: int | str, direction: str, ms: float) -> Row:
    return shape | {
        "scope": scope, "level": level, "direction": direction, "ms_predicted": round(ms, 4),
        "tops_predicted": round(tops(ms, direction, shape["n"], shape["causal"]), 1),
    }  # fmt: skip


def gain(gpu: Gpu, direction: str, head_dim: int, n: int, causal: bool) -> float:
    """How many times faster INT8 should be than FlashAttention-2, quantisation included."""
    return op_ms(gpu, PEER, direction, head_dim, n, causal) / op_ms(gpu, INT8, direction, head_dim, n, causal)


def answer(gpu: Gpu, n: int) -> str:
    """Does INT8 attention pay? In one sentence, without a mask."""
    parts = []
    for direction, name in (("fwd", "forward"), ("fwd+bwd", "forward + backward")):
        gains = [gain(gpu, direction, head_dim, n, False) for head_dim in (64, 128)]
        parts.append(f"{name} {verdict(gains)} ({gains[0]:.2f} times as fast at D=64, {gains[1]:.2f} at D=128)")
    which = "INT8 attention" if gpu.capability != 90 else "INT8 attention without its Hopper levels"
    return f"Predicted for the {gpu.name}, {n:,} tokens, against FlashAttention-2: {which} {', '.join(parts)}."


def verdict(gains: list[float]) -> str:
    """Of how many times faster INT8 is at each head size."""
    if min(gains) > WORTH:
        return "pays"
    return "pays at one head size" if max(gains) > WORTH else "does not pay"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", nargs="+", metavar="NAME", help="one or more of --list; all if none is named")
    parser.add_argument("--n", type=positive, default=8192, help="tokens")
    parser.add_argument("--list", action="store_true", help="the GPUs whose data sheets are known")
    parser.add_argument("--check", action="store_true", help="compare predictions with what was measured")


def run(options: argparse.Namespace) -> None:
    """Predict what INT8 attention brings on a GPU that needn't be there."""
    from sage_lab.bench import predict_check  # which predicts

    known = gpus()
    if unknown := sorted(set(options.gpu or ()) - set(known)):
        raise ValueError(f"gpu: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if options.list:
        sheets = [[f"{x:g}" if isinstance(x, float) else x for x in gpu] for gpu in known.values()]
        print(markdown_table(Gpu._fields, sheets))
        return
    wanted = [known[name] for name in options.gpu or known]
    found = [{"part": "prediction"} | x for gpu in wanted for x in rows(gpu, options.n)]
    for gpu in wanted:
        mine = [x for x in found if x["gpu"] == gpu.name and x["scope"] == "op"]
        print(markdown_table(mine[0], [x.values() for x in mine]), f"\n{answer(gpu, options.n)}\n")
    if options.check:
        checked = [*predict_check.against_the_h200(), *predict_check.against_others()]
        for part in ("H200", "published"):
            mine = [x for x in checked if x["part"] == part]
            print(markdown_table(mine[0], [x.values() for x in mine]), "\n")
        found += checked
    if options.json:
        write_record(options.json, found, command=options.command)
