"""`python -m sage_lab repair`: the effect of each remedy of `REMEDIES` on the errors of dS, dQ and dK, and its cost.

Measured on the recorded captures of two trained models, and on hard cases: Gaussian inputs with one thing wrong. Inputs
are float64 numbers that bfloat16 holds, and O is rounded to bfloat16, as the kernels' O is; all other errors come from
INT8. Every error is the relative L2 distance to exact attention in float64.

There are three bases. "as printed" and "kernels" are SageBwd with the paper's and with the kernels' scales. "exact"
quantises nothing: it shows the error that delta inherits from O's 16 bits, and how a wide O or a different delta
changes it.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor

from sage_lab.experiments.repair_cost import cost
from sage_lab.experiments.table2 import CAPTURES
from sage_lab.plan import Plan, Run, opened
from sage_lab.records import RECORDED, Row, markdown_table, write_record
from sage_lab.repairs import REMEDIES, RepairedSettings, scales_in_a_record, with_remedy
from sage_lab.training.capture import TENSORS, read_capture
from sage_ref.sagebwd.settings import MATMULS, SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates

BASES = {
    "as printed": SageBwdSettings.printed(is_causal=True, output_dtype=torch.bfloat16),
    "kernels": SageBwdSettings(is_causal=True, output_dtype=torch.bfloat16),
    "exact": SageBwdSettings(is_causal=True, output_dtype=torch.bfloat16, exact_matmuls=MATMULS),
}
OF_EXACT = ("none", "matching delta", "wide O")  # the remedies that change something where nothing is in INT8
MEASURED = ("delta", "dP", "dS", "O", "dQ", "dK", "dV")
CAPTURE, HARD = "capture", "hard case"
SEED = 0
TOKENS = 512  # of a hard case
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # Q, K, V, dO, each [B, H, N, D]


def values_share(q: Tensor, k: Tensor, v: Tensor, do: Tensor, generator: torch.Generator) -> Inputs:
    """Add one vector to all values, eight times as long as a value is (notebook 05)."""
    shared = torch.randn(v.shape[-1], generator=generator)
    return q, k, v + 8 * shared * v.norm(dim=-1).mean() / shared.norm(), do


def spread_out(x: Tensor, factor: float) -> Tensor:
    """Multiply one token in 64."""
    return torch.where(torch.arange(x.shape[-2])[:, None] % 64 == 32, factor * x, x)


# Changes to Gaussian Q, K, V and dO with standard deviation 1.
HARD_CASES: dict[str, Callable[..., Inputs]] = {
    "Gaussian": lambda q, k, v, do, _: (q, k, v, do),
    "sharp scores": lambda q, k, v, do, _: (5 * q, 5 * k, v, do),
    "values share an offset": values_share,
    "outlier values": lambda q, k, v, do, _: (q, k, spread_out(v, 30), do),
    "outlier gradients": lambda q, k, v, do, _: (q, k, v, spread_out(do, 30)),
    "keys share an offset": lambda q, k, v, do, _: (q, k + 8, v, do),
}


def hard_case(name: str, tokens: int) -> Inputs:
    """Draw a hard case with two heads of 64 features."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = [torch.randn(1, 2, tokens, 64, generator=generator) for _ in TENSORS]
    return tuple(x.bfloat16() for x in HARD_CASES[name](*drawn, generator))


def errors(inputs: Inputs, exact: dict[str, Tensor], settings: RepairedSettings) -> Row:
    """Measure one pass."""
    q, k, v, do = (x.double() for x in inputs)
    is_random = "stochastic" in (settings.p_rounding, settings.ds_rounding)
    settings = replace(settings, generator=torch.Generator().manual_seed(SEED)) if is_random else settings
    found = sagebwd_intermediates(q, k, v, do, settings)
    return {name: relative_l2(found[name], exact[name]) for name in MEASURED}


def case_rows(inputs: Inputs) -> Iterator[Row]:
    """Measure a row per base and remedy."""
    exact = exact_intermediates(*inputs, BASES["exact"])
    for base, base_settings in BASES.items():
        for remedy in OF_EXACT if base == "exact" else REMEDIES:
            settings = with_remedy(base_settings, remedy)
            row = {"base": base, "remedy": remedy} | scales_in_a_record(settings)
            yield row | errors(inputs, exact, settings)


@dataclass(frozen=True)
class RepairRun(Run):
    """One layer of a capture, or one hard case."""

    source: str
    case: str
    layer: int | None


def cost_rows(head_dim: int) -> list[Row]:
    """Return a row per remedy of the kernels: `Cost`, and no time as long as no kernel has it."""
    return [
        {"remedy": remedy} | cost(with_remedy(BASES["kernels"], remedy), head_dim)._asdict() | {"ms": None}
        for remedy in REMEDIES
    ]


def relative_errors(rows: Sequence[Row], tensor: str, **chosen: str) -> dict[str, float]:
    """Return each remedy's error divided by that without one: the geometric mean over the cases `chosen`."""
    rows = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    without = {(row["case"], row["layer"]): row[tensor] for row in rows if row["remedy"] == "none"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["remedy"], []).append(row[tensor] / without[row["case"], row["layer"]])
    return {remedy: geometric_mean(found) for remedy, found in ratios.items()}


def repair_table(rows: Sequence[Row]) -> str:
    """Return errors divided by those without a remedy, on captures and on values that share an offset."""
    columns = {
        f"{base}: {tensor}": relative_errors(rows, tensor, base=base, source=CAPTURE)
        for base in ("as printed", "kernels")
        for tensor in ("dS", "dQ", "dK")
    }
    columns["offset, kernels: dQ"] = relative_errors(rows, "dQ", base="kernels", case="values share an offset")
    lines = [(remedy, *(f"{column[remedy]:.2f}" for column in columns.values())) for remedy in REMEDIES]
    return markdown_table(("remedy", *columns), lines)


def repair_command(options: argparse.Namespace) -> None:
    captures = {name: read_capture(RECORDED / f"{name}.safetensors") for name in CAPTURES.values()}
    runs = [RepairRun(CAPTURE, name, layer) for name, capture in captures.items() for layer in capture.layers]
    runs += [RepairRun(HARD, name, None) for name in HARD_CASES]

    def measure(run: RepairRun, _: object) -> list[Row]:
        if run.source == CAPTURE:
            inputs = tuple(captures[run.case].layers[run.layer][name] for name in TENSORS)
        else:
            inputs = hard_case(run.case, TOKENS)
        return [run.facts | row for row in case_rows(inputs)]

    with opened(Plan("repair", [runs]), Path("runs"), TOKENS) as work:
        work.finish(measure)
        print("Errors divided by those without a remedy:\n\n" + repair_table(work.rows))
        facts = {"captures": [f"{name}.safetensors" for name in captures], "seed": SEED}
        facts |= {"cost": cost_rows(head_dim=128), "head_dim_of_cost": 128}
        write_record(options.json, work.rows, command=options.command, **facts)
        work.parts.remove()
