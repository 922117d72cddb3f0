"""The SageBwd paper's Tables 1 and 2, recomputed.

Table 1: error of O, dQ, dK, dV on Gaussian inputs whose queries and keys have standard deviation sigma. The paper
names neither N, D, the tiles nor which entries of P and dS share a scale, so `table1_sweep` tries them all.
Table 2: error of every intermediate on activations captured from language models, with QK-norm and without.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from sage_ref.records import Record, Row, replaced
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import cosine, exact_intermediates, grad_scores_bound, relative_l2, rms, sagebwd_intermediates

TENSORS = ("O", "dQ", "dK", "dV")
# (cosine, relative L2) as printed in the paper: sigma -> O, dQ, dK, dV.
PAPER_TABLE1 = {
    1: ((0.9999, 0.0160), (0.9998, 0.0184), (0.9998, 0.0220), (0.9999, 0.0159)),
    3: ((0.9992, 0.0389), (0.9971, 0.0758), (0.9970, 0.0777), (0.9992, 0.0387)),
    5: ((0.9982, 0.0603), (0.9798, 0.2014), (0.9799, 0.2007), (0.9982, 0.0605)),
    8: ((0.9953, 0.0972), (0.8900, 0.4666), (0.8886, 0.4699), (0.9953, 0.0973)),
    10: ((0.9933, 0.1161), (0.7823, 0.6648), (0.7820, 0.6684), (0.9933, 0.1157)),
}
# Layer 11 of the paper's 325M model, 2.1M tokens per step, QK-norm, N = 4096.
PAPER_TABLE2 = {
    "delta": (0.9973, 0.0736), "P": (0.9917, 0.1293), "dP": (1.0, 0.0), "dS": (0.9789, 0.2045),
    "O": (0.9969, 0.0793), "dQ": (0.9664, 0.2579), "dK": (0.9537, 0.3074), "dV": (0.9985, 0.0540),
}  # fmt: skip
# In notebooks/recorded: Q, K, V and dO of some layers of two models that differ in QK-norm alone.
CAPTURES = {"QK-norm": "capture_qk_norm_h200", "no QK-norm": "capture_plain_h200"}
SETTING = ("n", "head_dim", "block_q", "block_kv", "granularity")


class Table1Sweep(NamedTuple):
    """Which settings to try; every combination is."""

    lengths: Sequence[int] = (1024, 2048, 4096)
    head_dims: Sequence[int] = (64, 128)
    blocks: Sequence[tuple[int, int]] = ((32, 32), (64, 64), (128, 64), (128, 128))
    granularities: Sequence[str] = ("block", "row")
    seeds: Sequence[int] = (0, 1, 2, 3, 4)


def table1_inputs(n: int, head_dim: int, sigma: float, seed: int, device: str = "cpu") -> list[Tensor]:
    """Q, K with standard deviation sigma and V, dO with 1: bfloat16 [1, 1, N, D], drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    deviations = (sigma, sigma, 1.0, 1.0)
    draws = (torch.randn(1, 1, n, head_dim, generator=generator) * deviation for deviation in deviations)
    return [x.to(device, torch.bfloat16) for x in draws]


def table1_sweep(sweep: Table1Sweep, checkpoint: Path, device: str = "cpu") -> Iterator[list[Row]]:
    """One list of rows per (N, D, sigma): mean and standard deviation over seeds, for every tile and granularity.

    Finished lists are kept in `checkpoint`, so a killed sweep goes on where it was; remove it when all is recorded.
    """
    done = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    for n, head_dim, sigma in itertools.product(sweep.lengths, sweep.head_dims, PAPER_TABLE1):
        name = f"{n} {head_dim} {sigma} {list(sweep.blocks)} {list(sweep.granularities)} {list(sweep.seeds)}"
        if name not in done:
            done[name] = _table1_rows(n, head_dim, sigma, sweep, device)
            with replaced(checkpoint) as temporary:
                temporary.write_text(json.dumps(done))
        yield done[name]


def _table1_rows(n: int, head_dim: int, sigma: int, sweep: Table1Sweep, device: str) -> list[Row]:
    errors: dict[tuple, list[tuple[float, float]]] = {}
    for seed in sweep.seeds:
        inputs = table1_inputs(n, head_dim, sigma, seed, device)
        exact = exact_intermediates(*inputs, SageBwdSettings())
        for (block_q, block_kv), granularity in itertools.product(sweep.blocks, sweep.granularities):
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
            "rel_l2_std": round(stdev(norms), 6) if len(norms) > 1 else None,
        }
        paper = {"paper_cosine": paper_cosine, "paper_rel_l2": paper_rel_l2}
        rows.append(setting | {"sigma": sigma, "tensor": tensor} | measured | paper)
    return rows


def deviation(row: Row) -> float:
    """How far a row's relative L2 is from the paper's, as a fraction of the paper's."""
    return abs(row["rel_l2"] / row["paper_rel_l2"] - 1)


def settings_of(record: Record) -> list[dict]:
    """Every setting of the sweep, as a dict that `Record.select` takes."""
    found = dict.fromkeys(tuple(row[name] for name in SETTING) for row in record.rows)
    return [dict(zip(SETTING, values, strict=True)) for values in found]


def closest_setting(record: Record) -> dict:
    """The setting whose worst entry over all sigmas and tensors is closest to the paper's Table 1."""
    return min(settings_of(record), key=lambda setting: max(map(deviation, record.select(**setting))))


def closest_setting_per_sigma(record: Record) -> dict[int, dict]:
    """For each row (sigma) of the paper's table, the setting whose worst tensor is closest to it."""
    return {
        sigma: min(settings_of(record), key=lambda s: max(map(deviation, record.select(sigma=sigma, **s))))
        for sigma in PAPER_TABLE1
    }


def table2_rows(captures: dict[int, dict[str, Tensor]], settings: SageBwdSettings) -> list[Row]:
    """One row per layer and intermediate: cosine, relative L2, RMS, and for dS the bound on its RMS.

    captures: layer -> {"query", "key", "value", "grad_output"}, each [B, H, N, D]. Records from before rows said how
    they were quantised are of the printed choice, `SageBwdSettings.printed`.
    """
    rows = []
    for layer, tensors in captures.items():
        inputs = [tensors[name] for name in ("query", "key", "value", "grad_output")]
        exact, quantized = exact_intermediates(*inputs, settings), sagebwd_intermediates(*inputs, settings)
        for name, y in exact.items():
            bound = grad_scores_bound(exact["dP"], exact["delta"]) if name == "dS" else None
            rows.append(
                {
                    "layer": layer,
                    "tensor": name,
                    "cosine": round(cosine(quantized[name], y), 6),
                    "rel_l2": round(relative_l2(quantized[name], y), 6),
                    "rms": float(f"{rms(y):.4g}"),
                    "rms_bound": bound and float(f"{bound:.4g}"),
                    "paper_cosine": PAPER_TABLE2[name][0],
                    "paper_rel_l2": PAPER_TABLE2[name][1],
                }
                | settings.in_a_record
            )
    return rows


def most_error_prone(rows: Iterable[Row]) -> list[Row]:
    """Those rows of one model in `table2_rows` that are of the layer with the largest error of dQ."""
    rows = list(rows)
    worst = max((row for row in rows if row["tensor"] == "dQ"), key=lambda row: row["rel_l2"])["layer"]
    return [row for row in rows if row["layer"] == worst]
