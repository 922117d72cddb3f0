"""`python -m sage_lab repair`: what each remedy of `REMEDIES` does to the errors of dS, dQ and dK, and what it costs.

Measured on the recorded captures of two trained models, and on hard cases: Gaussian inputs with one thing wrong. Inputs
are float64 numbers that bfloat16 holds, and O is rounded to bfloat16, as the kernels' O is; all else that errs is INT8.
Every error is the relative L2 distance to exact attention in float64.

Three bases. "as printed" and "kernels" are SageBwd with the paper's and with the kernels' scales. "exact" quantises
nothing: what is left is the error that delta inherits from O's 16 bits, and what a wide O or another delta does to it.

An error that every step repeats is worse than one that averages out. So each row has the error of one pass, and with
"repeated_" that of the mean of many: the two differ where rounding is stochastic.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor
from tqdm import tqdm

from sage_lab.command_line import from_zero, input_path, positive
from sage_lab.experiments.repair_cost import cost
from sage_lab.experiments.table2 import CAPTURES
from sage_lab.plan import FinishedParts
from sage_lab.records import RECORDED, Row, markdown_table, only_writer, write_record
from sage_lab.repairs import REMEDIES, RepairedSettings, scales_in_a_record, with_remedy
from sage_lab.training.capture import TENSORS, read_capture
from sage_ref.sagebwd.settings import MATMULS, SageBwdSettings
from sage_ref.tracing import exact_intermediates, relative_l2, sagebwd_intermediates

BASES = {
    "as printed": SageBwdSettings.printed(is_causal=True, output_dtype=torch.bfloat16),
    "kernels": SageBwdSettings(is_causal=True, output_dtype=torch.bfloat16),
    "exact": SageBwdSettings(is_causal=True, output_dtype=torch.bfloat16, exact_matmuls=MATMULS),
}
OF_EXACT = ("none", "matching delta", "wide O")  # what changes something where nothing is in INT8
MEASURED = ("delta", "dP", "dS", "O", "dQ", "dK", "dV")
AVERAGED = ("dQ", "dK")
CAPTURE, HARD = "capture", "hard case"
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # Q, K, V, dO, each [B, H, N, D]


def values_share(q: Tensor, k: Tensor, v: Tensor, do: Tensor, generator: torch.Generator) -> Inputs:
    """All values have one vector in common, eight times as long as a value is (notebook 05)."""
    shared = torch.randn(v.shape[-1], generator=generator)
    return q, k, v + 8 * shared * v.norm(dim=-1).mean() / shared.norm(), do


def spread_out(x: Tensor, factor: float) -> Tensor:
    """One token in 64 is `factor` times as large as the others."""
    return torch.where(torch.arange(x.shape[-2])[:, None] % 64 == 32, factor * x, x)


# What is done to Gaussian Q, K, V and dO with standard deviation 1.
HARD_CASES: dict[str, Callable[..., Inputs]] = {
    "Gaussian": lambda q, k, v, do, _: (q, k, v, do),
    "sharp scores": lambda q, k, v, do, _: (5 * q, 5 * k, v, do),
    "values share an offset": values_share,
    "outlier values": lambda q, k, v, do, _: (q, k, spread_out(v, 30), do),
    "outlier gradients": lambda q, k, v, do, _: (q, k, v, spread_out(do, 30)),
    "keys share an offset": lambda q, k, v, do, _: (q, k + 8, v, do),
}


def hard_case(name: str, tokens: int, head_dim: int, seed: int) -> Inputs:
    """Two heads."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(1, 2, tokens, head_dim, generator=generator) for _ in TENSORS]
    return tuple(x.bfloat16() for x in HARD_CASES[name](*drawn, generator))


def settings_to_try() -> Iterator[tuple[str, str, RepairedSettings]]:
    """(base, remedy, settings)."""
    for base, settings in BASES.items():
        for remedy in OF_EXACT if base == "exact" else REMEDIES:
            yield base, remedy, with_remedy(settings, remedy)


def errors(inputs: Inputs, exact: dict[str, Tensor], settings: RepairedSettings, draws: int, seed: int) -> Row:
    """Of one pass, and of the mean of `draws` passes, which only stochastic rounding tells apart."""
    q, k, v, do = (x.double() for x in inputs)
    is_random = "stochastic" in (settings.p_rounding, settings.ds_rounding)
    settings = replace(settings, generator=torch.Generator().manual_seed(seed)) if is_random else settings
    found = [sagebwd_intermediates(q, k, v, do, settings) for _ in range(draws if is_random and draws > 1 else 1)]
    row = {name: relative_l2(found[0][name], exact[name]) for name in MEASURED}
    means = {name: torch.stack([x[name] for x in found]).mean(0) for name in AVERAGED}
    return row | {f"repeated_{name}": relative_l2(x, exact[name]) for name, x in means.items()}


def case_rows(inputs: Inputs, draws: int, seed: int) -> list[Row]:
    """One row per base and remedy."""
    exact = exact_intermediates(*inputs, BASES["exact"])
    return [
        {"base": base, "remedy": remedy} | scales_in_a_record(settings) | errors(inputs, exact, settings, draws, seed)
        for base, remedy, settings in settings_to_try()
    ]


def repair_cases(captures: Sequence[Path], options: argparse.Namespace) -> Iterator[tuple[Row, Callable[[], Inputs]]]:
    """What the rows of a case have in common, and its inputs."""
    for path in captures:
        capture = read_capture(path)
        if "run" not in capture.provenance:
            raise ValueError(f"capture: expected a file of `python -m sage_lab capture`, got {path}")
        for layer, tensors in capture.layers.items():
            names = {"source": CAPTURE, "case": path.stem, "layer": layer}
            yield names, lambda tensors=tensors: tuple(tensors[name] for name in TENSORS)
    for name in HARD_CASES:
        names = {"source": HARD, "case": name, "layer": None}
        yield names, lambda name=name: hard_case(name, options.tokens, options.head_dim, options.seed)


def cost_rows(head_dim: int) -> list[Row]:
    """One row per remedy of the kernels: `Cost`, and no time as long as no kernel has it."""
    return [
        {"remedy": remedy} | cost(with_remedy(BASES["kernels"], remedy), head_dim)._asdict() | {"ms": None}
        for remedy in REMEDIES
    ]


def relative_errors(rows: Sequence[Row], tensor: str, **chosen: str) -> dict[str, float]:
    """Remedy -> its error over that without one: the geometric mean over the cases `chosen`."""
    rows = [row for row in rows if all(row[name] == value for name, value in chosen.items())]
    without = {(row["case"], row["layer"]): row[tensor] for row in rows if row["remedy"] == "none"}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["remedy"], []).append(row[tensor] / without[row["case"], row["layer"]])
    return {remedy: geometric_mean(found) for remedy, found in ratios.items()}


def repair_table(rows: Sequence[Row], costs: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple]]:
    """Errors over those without a remedy, on the captures and on the values that share an offset; and the costs."""
    columns, header = [], ["remedy"]
    for base in ("as printed", "kernels"):
        for tensor in ("dS", "dQ", "dK", "repeated_dQ"):
            header.append(f"{base}: {tensor.replace('_', ' ')}")
            columns.append(relative_errors(rows, tensor, base=base, source=CAPTURE))
    header.append("offset, kernels: dQ")
    columns.append(relative_errors(rows, "dQ", base="kernels", case="values share an offset"))
    header += ["matmuls", "operations", "bytes per token"]
    lines = [
        (
            row["remedy"],
            *(f"{column[row['remedy']]:.2f}" for column in columns),
            *(f"{row[name]:+g}" for name in ("matmuls", "operations", "bytes_per_token")),
        )
        for row in costs
    ]
    return tuple(header), lines


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capture", type=input_path, nargs="+", metavar="FILE", help="of `capture`; default: the recorded ones"
    )
    parser.add_argument("--tokens", type=positive, default=512, help="of a hard case")
    parser.add_argument("--head-dim", type=positive, default=64, help="of a hard case")
    parser.add_argument("--draws", type=positive, default=16, help="passes that an error is averaged over")
    parser.add_argument("--seed", type=from_zero, default=0)


def run(options: argparse.Namespace) -> None:
    captures = options.capture or [RECORDED / f"{name}.safetensors" for name in CAPTURES.values()]
    arguments = (captures, options.tokens, options.head_dim, options.draws, options.seed)
    parts = FinishedParts(options.json or Path("runs/repair.json"), arguments)
    rows = []
    with only_writer(parts.path):
        for names, inputs in tqdm(list(repair_cases(captures, options)), unit="case"):
            found = parts.rows(str(names), lambda inputs=inputs: case_rows(inputs(), options.draws, options.seed))
            rows += [names | row for row in found]
    costs = cost_rows(head_dim=128)
    print("Errors over those without a remedy; costs are counted, for a head of 128.\n")
    print(markdown_table(*repair_table(rows, costs)))
    if options.json:
        facts = {"captures": [path.name for path in captures], "seed": options.seed, "draws": options.draws}
        write_record(options.json, rows, command=options.command, cost=costs, head_dim_of_cost=128, **facts)
    parts.remove()
