"""The command `predict`: does INT8 attention pay on a GPU that we don't have? A prediction from counted instructions.

`choose` compiled the portable kernels for the GPU's compute capability; `cost_model` says how long they should take.
The peer, FlashAttention-2, stands in our ladder: forward it is level 0. Backward, level 0 takes two passes with 7
matmuls and FlashAttention-2 one pass with 5, so it is given 5 / 7 of level 0's time. The passes around the INT8 kernels
smooth, quantise and transpose; memory limits them. The Hopper levels are not predicted, because they were measured.

`--check` compares predictions with what was measured: by us on the H200, level by level, each kernel timed alone; and
by others on GPUs that we don't have. Others timed programs of their own: SageBwd's kernels are not ours, which take two
passes backward, so a difference there need not be the model's.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import NamedTuple

from sage_lab.bench.cost_model import TABLE, Gpu, gpus, kernel_of, milliseconds
from sage_lab.command_line import positive
from sage_lab.records import Row, markdown_table, read_record, write_record

MEASURED, MEASURED_ON, MEASURED_N = "bench_h200", "H200", 8192
HEAD_DIMS = (64, 128)
TOKENS = 4 * 2048  # heads times head size, of all samples, as in `bench`
OPERATIONS = {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}  # over those of the forward pass, as `bench` counts them
INT8, PEER = "INT8", "FlashAttention-2"
WORTH = 1.05  # times as fast: a smaller gain is within the prediction's error
SPARSITY = 0.97  # of SLA2's published time


class Pass(NamedTuple):
    """One pass of attention as a user calls it: a level's kernels, and bytes moved around them."""

    level: int  # the last of the portable levels if -1
    share: float  # of the time of the level's kernels
    bytes: int  # per number of a [B, H, N, D] tensor


# Forward: Q and V are read and their copies written; K is read twice, its mean first. Backward: dO and O are read, dO^
# is written, Q^ and K^ are transposed; FlashAttention-2 reads dO and O for delta.
PASSES = {
    (PEER, "fwd"): Pass(0, 1.0, 0),
    (PEER, "bwd"): Pass(0, 5 / 7, 4),
    (INT8, "fwd"): Pass(-1, 1.0, 11),
    (INT8, "bwd"): Pass(-1, 1.0, 9),
}


@cache
def compiled_kernels(capability: int) -> dict[str, dict[int, list[Row]]]:
    """Return what `choose` compiled for the newest GPU that is not newer: by "fwd", "bwd" or "sla2", then by level."""
    rows = read_record(TABLE).rows
    compiled = max(x["capability"] for x in rows if x["capability"] <= capability and x["kernel"] == "forward")
    found: dict[str, dict[int, list[Row]]] = {"fwd": {}, "bwd": {}, "sla2": {}}
    for row in rows:
        if row["capability"] == compiled:
            kind = row["kernel"].partition("_")[0]
            levels = found[{"forward": "fwd", "sla2": "sla2"}.get(kind, "bwd")]
            levels.setdefault(row["level"], []).append(row)
    return found


def portable_levels(direction: str) -> list[int]:
    """Return the levels that any GPU can run."""
    return sorted(compiled_kernels(gpus()[MEASURED_ON].capability)[direction])


def kernel_ms(gpu: Gpu, direction: str, level: int, head_dim: int, n: int, causal: bool) -> float:
    """Predict the kernels of a level, for 4 samples with 2048 / head_dim heads."""
    rows = compiled_kernels(gpu.capability)[direction][level]
    kernels = [kernel_of(row) for row in rows if row["head_dim"] == head_dim]
    return sum(milliseconds(kernel, gpu, TOKENS // head_dim, n, causal) for kernel in kernels)


def memory_ms(gpu: Gpu, provider: str, direction: str, n: int) -> float:
    """Predict what is done around the kernels, which memory limits."""
    return PASSES[provider, direction].bytes * TOKENS * n / (gpu.memory_gb_s * 1e6)


def attention_ms(gpu: Gpu, provider: str, direction: str, head_dim: int, n: int, causal: bool) -> float:
    """Predict attention as a user calls it. provider: INT8 or PEER. direction: "fwd", "bwd" or "fwd+bwd"."""
    total = 0.0
    for part in direction.split("+"):
        level, share, _ = PASSES[provider, part]
        level = portable_levels(part)[level]
        total += share * kernel_ms(gpu, part, level, head_dim, n, causal) + memory_ms(gpu, provider, part, n)
    return total


def tops(ms: float, direction: str, n: int, causal: bool) -> float:
    """Return 10^12 operations per second as `bench` counts them; a causal mask halves them."""
    return 4 * TOKENS * n * n * OPERATIONS[direction] / (1 + causal) / ms / 1e9


def gain(gpu: Gpu, direction: str, head_dim: int, n: int, causal: bool) -> float:
    """Predict how many times as fast as FlashAttention-2 INT8 is, quantisation included."""
    peer, int8 = (attention_ms(gpu, provider, direction, head_dim, n, causal) for provider in (PEER, INT8))
    return peer / int8


def prediction_rows(gpu: Gpu, n: int) -> Iterator[Row]:
    """Yield a row per level, head size and mask, kernels alone; then what a user calls, FlashAttention-2 and INT8."""
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            shape = {"part": "prediction", "gpu": gpu.name, "n": n, "head_dim": head_dim, "causal": causal}
            found = [
                ("kernel", level, direction, kernel_ms(gpu, direction, level, head_dim, n, causal))
                for direction in ("fwd", "bwd") for level in portable_levels(direction)
            ] + [
                ("op", provider, direction, attention_ms(gpu, provider, direction, head_dim, n, causal))
                for direction in OPERATIONS for provider in (PEER, INT8)
            ]  # fmt: skip
            for scope, level, direction, ms in found:
                named = {"scope": scope, "level": level, "direction": direction, "ms_predicted": round(ms, 4)}
                yield shape | named | {"tops_predicted": round(tops(ms, direction, n, causal), 1)}


def answer(gpu: Gpu, n: int) -> str:
    """Say in one sentence whether INT8 attention pays, without a mask."""
    parts = []
    for direction, name in (("fwd", "forward"), ("fwd+bwd", "forward + backward")):
        gains = [gain(gpu, direction, head_dim, n, False) for head_dim in HEAD_DIMS]
        parts.append(f"{name} {verdict(gains)} ({gains[0]:.2f} times as fast at D=64, {gains[1]:.2f} at D=128)")
    which = "INT8 attention" if gpu.capability != 90 else "INT8 attention without its Hopper levels"
    return f"Predicted for the {gpu.name}, {n:,} tokens, against FlashAttention-2: {which} {', '.join(parts)}."


def verdict(gains: list[float]) -> str:
    """Say whether INT8 pays, from its gain at each head size."""
    if min(gains) > WORTH:
        return "pays"
    return "pays at one head size" if max(gains) > WORTH else "does not pay"


def rows_against_our_record() -> Iterator[Row]:
    """Compare every portable level's kernels with our record, without a mask, at the launches that were measured."""
    record = read_record(MEASURED)
    for head_dim in HEAD_DIMS:
        shape = {"n_q": MEASURED_N, "head_dim": head_dim, "causal": False, "scope": "kernel"}
        for direction in ("fwd", "bwd"):
            for level in portable_levels(direction):
                (measured,) = record.select(provider="sage_kernels", level=level, direction=direction, **shape)
                ms = kernel_ms(gpus()[MEASURED_ON], direction, level, head_dim, MEASURED_N, False)
                yield {
                    "part": MEASURED_ON, "head_dim": head_dim, "direction": direction, "level": level,
                    "ms_predicted": round(ms, 4), "ms_measured": measured["ms_median"],
                    "predicted_over_measured": round(ms / measured["ms_median"], 3),
                }  # fmt: skip


def rows_against_others() -> Iterator[Row]:
    """Compare with what others published, each with its source."""
    for row in json.loads((resources.files("sage_lab.bench") / "published.json").read_text())["rows"]:
        predicted = published_quantity(gpus()[row["gpu"]], row)
        yield {
            "part": "published", **{name: row[name] for name in ("gpu", "what", "head_dim", "n", "causal")},
            "predicted": round(predicted, 2), "published": row["published"],
            "predicted_over_published": round(predicted / row["published"], 3), "source": row["source"],
        }  # fmt: skip


def published_quantity(gpu: Gpu, row: Row) -> float:
    """Predict what a row of published.json names.

    quantity "ratio": the speed of INT8 over that of FlashAttention-2; "tops": of FlashAttention-2; "share": the same
    over the rate of the tensor cores in 16 bit; "sparse": FlashAttention-2's time over that of SLA2's sparse loop in
    INT8 with quantisation. It leaves out router and linear branch, so SLA2 can't reach it.
    """
    direction, shape = row.get("direction", "fwd"), (row["head_dim"], row["n"], row["causal"])
    if row["quantity"] == "ratio":
        return gain(gpu, direction, *shape)
    if row["quantity"] == "sparse":
        _, level = max(compiled_kernels(gpu.capability)["sla2"].items())
        (sparse,) = (kernel_of(x) for x in level if x["head_dim"] == row["head_dim"])
        ms = (1 - SPARSITY) * milliseconds(sparse, gpu, TOKENS // row["head_dim"], row["n"], False)
        return kernel_ms(gpu, "fwd", 0, *shape) / (ms + memory_ms(gpu, INT8, "fwd", row["n"]))
    found = tops(attention_ms(gpu, PEER, direction, *shape), direction, *shape[1:])
    peak = 2 * gpu.float16 * gpu.multiprocessors * gpu.clock_ghz / 1e3
    return found if row["quantity"] == "tops" else found / peak


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `predict`."""
    parser.add_argument("--gpu", nargs="+", metavar="NAME", help="one or more of gpus.json; all if none is named")
    parser.add_argument("--n", type=positive, default=8192, help="tokens")
    parser.add_argument("--check", action="store_true", help="compare predictions with what was measured")


def predict_command(options: argparse.Namespace) -> None:
    """Predict what INT8 attention brings on a GPU that needn't be there."""
    known = gpus()
    if unknown := sorted(set(options.gpu or ()) - set(known)):
        raise ValueError(f"gpu: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    found = []
    for gpu in (known[name] for name in options.gpu or known):
        rows = list(prediction_rows(gpu, options.n))
        called = [row for row in rows if row["scope"] == "op"]
        print(f"{markdown_table(called[0], [row.values() for row in called])}\n\n{answer(gpu, options.n)}\n")
        found += rows
    for rows in (rows_against_our_record, rows_against_others) if options.check else ():
        checked = list(rows())
        print(markdown_table(checked[0], [row.values() for row in checked]), "\n")
        found += checked
    write_record(options.json, found, command=options.command)
