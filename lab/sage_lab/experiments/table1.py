"""The SageBwd paper's Table 1, errors of O, dQ, dK, dV on Gaussian inputs, recomputed.

Queries and keys have standard deviation sigma. The paper names neither N, D, the tiles nor which entries of P and dS
share a scale, so the sweep tries them all.
"""

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from sage_lab.plan import Run
from sage_lab.records import Record, Row, markdown_table
from sage_ref.sagebwd.settings import GRANULARITIES, SageBwdSettings
from sage_ref.tracing import cosine, exact_intermediates, relative_l2, sagebwd_intermediates

TENSORS = ("O", "dQ", "dK", "dV")
PAPER = tomllib.loads(Path(__file__).with_name("paper_tables.toml").read_text(encoding="utf-8"))  # as printed
# (cosine, relative L2) by sigma: of O, dQ, dK, dV.
PAPER_TABLE1 = {int(sigma): errors for sigma, errors in PAPER["table1"].items()}
SETTING = ("n", "head_dim", "block_q", "block_kv", "granularity")
# What the paper leaves open, in every combination.
LENGTHS, HEAD_DIMS, BLOCKS = (1024, 2048, 4096), (64, 128), ((32, 32), (64, 64), (128, 64), (128, 128))


def table1_inputs(n: int, head_dim: int, sigma: float, seed: int, device: str = "cpu") -> list[Tensor]:
    """Draw Q, K with standard deviation sigma and V, dO with 1: bfloat16 [1, 1, N, D], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    deviations = (sigma, sigma, 1.0, 1.0)
    draws = (torch.randn(1, 1, n, head_dim, generator=generator) * deviation for deviation in deviations)
    return [x.to(device, torch.bfloat16) for x in draws]


@dataclass(frozen=True)
class Table1Run(Run):
    """The inputs that share exact results."""

    n: int
    head_dim: int
    sigma: int


def table1_rows(run: Table1Run, seeds: int) -> list[Row]:
    """Return means over seeds, for every tile and granularity."""
    n, head_dim, sigma = run.n, run.head_dim, run.sigma
    errors: dict[tuple, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        inputs = table1_inputs(n, head_dim, sigma, seed)
        exact = exact_intermediates(*inputs, SageBwdSettings())
        for (block_q, block_kv), granularity in itertools.product(BLOCKS, GRANULARITIES):
            settings = SageBwdSettings(block_q=block_q, block_kv=block_kv, granularity=granularity)
            quantized = sagebwd_intermediates(*inputs, settings)
            for tensor in TENSORS:
                error = cosine(quantized[tensor], exact[tensor]), relative_l2(quantized[tensor], exact[tensor])
                errors.setdefault((block_q, block_kv, granularity, tensor), []).append(error)
    rows = []
    for (block_q, block_kv, granularity, tensor), values in errors.items():
        cosines, norms = zip(*values, strict=True)
        paper_cosine, paper_rel_l2 = PAPER_TABLE1[sigma][TENSORS.index(tensor)]
        setting = dict(zip(SETTING, (n, head_dim, block_q, block_kv, granularity), strict=True))
        measured = {
            "cosine": round(mean(cosines), 6),
            "rel_l2": round(mean(norms), 6),
        }
        paper = {"paper_cosine": paper_cosine, "paper_rel_l2": paper_rel_l2}
        rows.append(setting | {"sigma": sigma, "tensor": tensor} | measured | paper)
    return rows


def deviation(row: Row) -> float:
    """Return the distance of a row's relative L2 from the paper's, as a fraction of the paper's."""
    return abs(row["rel_l2"] / row["paper_rel_l2"] - 1)


def settings_of(record: Record) -> list[dict]:
    """Return every setting of the sweep, as a dict that `Record.select` takes."""
    found = dict.fromkeys(tuple(row[name] for name in SETTING) for row in record.rows)
    return [dict(zip(SETTING, values, strict=True)) for values in found]


def closest_setting(record: Record) -> dict:
    """Return the setting whose worst entry over all sigmas and tensors is closest to the paper's Table 1."""
    return min(settings_of(record), key=lambda setting: max(map(deviation, record.select(**setting))))


def table1_runs(lengths: Sequence[int]) -> list[Table1Run]:
    """Return the whole sweep: lengths, head sizes and standard deviations."""
    return list(itertools.starmap(Table1Run, itertools.product(lengths, HEAD_DIMS, PAPER_TABLE1)))


def table1_text(rows: list[Row]) -> str:
    """Return the paper's table with ours at the closest setting."""
    record = Record({}, rows)
    best = closest_setting(record)
    setting = "N={n} D={head_dim} tiles {block_q}x{block_kv}, scales per {granularity}".format(**best)
    lines = []
    for sigma in PAPER_TABLE1:
        found = record.select(sigma=sigma, **best)
        lines.append((sigma, *(f"{row['rel_l2']:.4f} (paper {row['paper_rel_l2']:.4f})" for row in found)))
    table = markdown_table(("sigma", *TENSORS), lines)
    return f"Relative L2 error at the setting that is closest to the paper's, {setting}; mean over seeds:\n\n{table}"
