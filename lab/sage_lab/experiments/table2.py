"""The SageBwd paper's Table 2, errors of every intermediate on captured activations.

The activations are from two trained models, with and without QK-norm.
"""

from collections.abc import Iterable

from torch import Tensor

from sage_lab.records import Row, markdown_table
from sage_lab.training.capture import Capture, attention_errors
from sage_ref.sagebwd.settings import SageBwdSettings

# Layer 11 of the paper's 325M model, 2.1M tokens per batch, QK-norm, N = 4096.
PAPER_TABLE2 = {
    "delta": (0.9973, 0.0736), "P": (0.9917, 0.1293), "dP": (1.0, 0.0), "dS": (0.9789, 0.2045),
    "O": (0.9969, 0.0793), "dQ": (0.9664, 0.2579), "dK": (0.9537, 0.3074), "dV": (0.9985, 0.0540),
}  # fmt: skip
# In notebooks/recorded: Q, K, V and dO of some layers of two models that differ in QK-norm alone.
CAPTURES = {"QK-norm": "capture_qk_norm_h200", "no QK-norm": "capture_plain_h200"}


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


def capture_rows(name: str, capture: Capture) -> list[Row]:
    """Return the rows of one capture, quantised as printed."""
    model = {"capture": name, "qk_norm": capture.provenance["run"]["qk_norm"]}
    return [model | row for row in table2_rows(capture.layers, SageBwdSettings.printed(is_causal=True))]


def table2_text(rows: list[Row]) -> str:
    """Return the errors of one capture's layer where that of dQ is largest."""
    worst = most_error_prone(rows)
    columns = ("tensor", "cosine", "rel_l2", "rms", "paper_cosine", "paper_rel_l2")
    table = markdown_table(columns, [[row[x] for x in columns] for row in worst])
    return f"{worst[0]['capture']}, layer {worst[0]['layer']}, where the error of dQ is largest:\n\n{table}"
