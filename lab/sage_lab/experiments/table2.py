"""`python -m sage_lab table2`: the SageBwd paper's Table 2, errors of every intermediate on captured activations.

The activations are from two trained models, with and without QK-norm.
"""

import argparse
from collections.abc import Iterable

from torch import Tensor

from sage_lab.command_line import input_path
from sage_lab.records import RECORDED, Row, markdown_table, write_record
from sage_lab.training.capture import attention_errors, read_capture
from sage_ref.sagebwd.settings import SageBwdSettings

# Layer 11 of the paper's 325M model, 2.1M tokens per step, QK-norm, N = 4096.
PAPER_TABLE2 = {
    "delta": (0.9973, 0.0736), "P": (0.9917, 0.1293), "dP": (1.0, 0.0), "dS": (0.9789, 0.2045),
    "O": (0.9969, 0.0793), "dQ": (0.9664, 0.2579), "dK": (0.9537, 0.3074), "dV": (0.9985, 0.0540),
}  # fmt: skip
# In notebooks/recorded: Q, K, V and dO of some layers of two models that differ in QK-norm alone.
CAPTURES = {"QK-norm": "capture_qk_norm_h200", "no QK-norm": "capture_plain_h200"}
MEASURES = {"cosine": ".4f", "rel_l2": ".4f", "rms": ".1e"}


def table2_rows(captures: dict[int, dict[str, Tensor]], settings: SageBwdSettings) -> list[Row]:
    """Return `attention_errors` of captured layers, each row with the paper's cosine and relative L2.

    Rows of old records don't say how they were quantised: as printed, `SageBwdSettings.printed`.
    """
    return with_paper(attention_errors(captures, settings))


def with_paper(rows: Iterable[Row]) -> list[Row]:
    paper = {
        name: dict(zip(("paper_cosine", "paper_rel_l2"), found, strict=True)) for name, found in PAPER_TABLE2.items()
    }
    return [row | paper[row["tensor"]] for row in rows]


def most_error_prone(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the layer with the largest error of dQ, from one model's `table2_rows`."""
    rows = list(rows)
    worst = max((row for row in rows if row["tensor"] == "dQ"), key=lambda row: row["rel_l2"])["layer"]
    return [row for row in rows if row["layer"] == worst]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capture", type=input_path, nargs="+", metavar="FILE", help="of `capture`; default: the recorded ones"
    )


def table2_command(options: argparse.Namespace) -> None:
    settings = SageBwdSettings.printed(is_causal=True)
    header, columns, rows, facts = ["tensor"], [list(PAPER_TABLE2)], [], []
    recorded = (RECORDED / f"{name}.safetensors" for name in CAPTURES.values())
    for path in options.capture or recorded:
        capture = read_capture(path)
        if "run" not in capture.provenance:
            raise ValueError(f"capture: expected a file of `python -m sage_lab capture`, got {path}")
        model = {"capture": path.stem, "qk_norm": capture.provenance["run"]["qk_norm"]}
        found = [model | row for row in table2_rows(capture.layers, settings)]
        worst = most_error_prone(found)
        header += [f"{path.stem}, layer {worst[0]['layer']}: cosine", "relative L2", "RMS"]
        columns += [[f"{row[name]:{digits}}" for row in worst] for name, digits in MEASURES.items()]
        rows, facts = rows + found, [*facts, {"file": path.name} | capture.provenance]
    header += ["paper: cosine", "relative L2"]
    columns += [[f"{x:.4f}" for x in column] for column in zip(*PAPER_TABLE2.values(), strict=True)]
    print("Of each capture the layer with the largest error of dQ; --json writes all layers.\n")
    print(markdown_table(header, list(zip(*columns, strict=True))))
    write_record(options.json, rows, command=options.command, captures=facts)
