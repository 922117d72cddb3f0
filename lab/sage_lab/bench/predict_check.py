"""Predictions against what was measured: by us on the H200, level by level, and by others on GPUs that we don't have.

Our own record timed each kernel alone, so that each picked its clock. Others timed programs of their own: SageBwd's
kernels are not ours, which take two passes backward, so a difference there needn't be the model's.
"""

import json
from collections.abc import Iterator
from importlib import resources

from sage_lab.bench.choose import kernel_of
from sage_lab.bench.predict import (
    INT8,
    PEER,
    PORTABLE,
    TOKENS,
    around_ms,
    compiled_rows,
    gain,
    kernel_ms,
    op_ms,
    tops,
)
from sage_lab.bench.timing_model import Gpu, gpus, milliseconds
from sage_lab.records import Row, read_record

MEASURED = "bench_h200"
N = 8192
SPARSITY = 0.97


def against_the_h200() -> Iterator[Row]:
    """Every portable level's kernels without a mask, with the launches that were measured."""
    record = read_record(MEASURED)
    for head_dim in (64, 128):
        shape = {"n_q": N, "head_dim": head_dim, "causal": False, "scope": "kernel"}
        for direction, levels in PORTABLE.items():
            for level in levels:
                (measured,) = record.select(provider="sage_kernels", level=level, direction=direction, **shape)
                ms = kernel_ms(gpus()["H200"], direction, level, head_dim, N, False)
                yield {
                    "part": "H200", "head_dim": head_dim, "direction": direction, "level": level,
                    "ms_predicted": round(ms, 4), "ms_measured": measured["ms_median"],
                    "predicted_over_measured": round(ms / measured["ms_median"], 3),
                }  # fmt: skip


def against_others() -> Iterator[Row]:
    """What others published, each with its source."""
    path = resources.files("sage_lab.bench") / "published.json"
    for row in json.loads(path.read_text())["rows"]:
        predicted = QUANTITIES[row["quantity"]](gpus()[row["gpu"]], row)
        yield {
            "part": "published", "gpu": row["gpu"], "what": row["what"], "head_dim": row["head_dim"], "n": row["n"],
            "causal": row["causal"], "predicted": round(predicted, 2), "published": row["published"],
            "predicted_over_published": round(predicted / row["published"], 3), "source": row["source"],
        }  # fmt: skip


def predicted_tops(gpu: Gpu, row: Row) -> float:
    ms = op_ms(gpu, PEER, row["direction"], row["head_dim"], row["n"], row["causal"])
    return tops(ms, row["direction"], row["n"], row["causal"])


def predicted_share(gpu: Gpu, row: Row) -> float:
    """Of what the tensor cores could do in 16 bit."""
    return predicted_tops(gpu, row) / (2 * gpu.float16 * gpu.multiprocessors * gpu.clock_ghz / 1e3)


def predicted_ratio(gpu: Gpu, row: Row) -> float:
    """The speed of INT8 over that of FlashAttention-2."""
    return gain(gpu, row["direction"], row["head_dim"], row["n"], row["causal"])


def predicted_sparse(gpu: Gpu, row: Row) -> float:
    """Level 0's time over that of SLA2's sparse loop in INT8, with quantisation; router and linear branch are left out.

    So this is more than SLA2 can reach.
    """
    heads = TOKENS // row["head_dim"]
    (sparse,) = [x for x in compiled_rows(gpu) if x["kernel"] == "sla2_forward" and x["head_dim"] == row["head_dim"]]
    ms = (1 - SPARSITY) * milliseconds(kernel_of(sparse), gpu, heads, row["n"], False)
    dense = kernel_ms(gpu, "fwd", 0, row["head_dim"], row["n"], False)
    return dense / (ms + around_ms(gpu, INT8, "fwd", row["n"]))


QUANTITIES = {
    "tops": predicted_tops,
    "share": predicted_share,
    "ratio": predicted_ratio,
    "sparse": predicted_sparse,
}
