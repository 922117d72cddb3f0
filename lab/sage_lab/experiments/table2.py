"""The SageBwd paper's Table 2, errors of every intermediate on captured activations.

The activations are from two trained models, with and without QK-norm.
"""

from collections.abc import Iterable

from sage_lab.experiments.table1 import PAPER
from sage_lab.records import Row, markdown_table
from sage_lab.training.capture import Capture, attention_errors
from sage_ref.sagebwd.settings import SageBwdSettings

PAPER_TABLE2 = PAPER["table2"]  # (cosine, relative L2) by tensor
# In notebooks/recorded: Q, K, V and dO of some layers of two models that differ in QK-norm alone.
CAPTURES = {"QK-norm": "capture_qk_norm_h200", "no QK-norm": "capture_plain_h200"}


def most_error_prone(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the layer with the largest error of dQ, from one model's `capture_rows`."""
    rows = list(rows)
    worst = max((row for row in rows if row["tensor"] == "dQ"), key=lambda row: row["rel_l2"])["layer"]
    return [row for row in rows if row["layer"] == worst]


def capture_rows(name: str, capture: Capture) -> list[Row]:
    """Return `attention_errors` of one capture, quantised as printed; each row with the paper's numbers."""
    rows = []
    for row in attention_errors(capture.layers, SageBwdSettings.printed(is_causal=True)):
        paper = dict(zip(("paper_cosine", "paper_rel_l2"), PAPER_TABLE2[row["tensor"]], strict=True))
        rows.append({"capture": name, "qk_norm": capture.provenance["run"]["qk_norm"]} | row | paper)
    return rows


def table2_text(rows: list[Row]) -> str:
    """Return the errors of one capture's layer where that of dQ is largest."""
    worst = most_error_prone(rows)
    columns = ("tensor", "cosine", "rel_l2", "rms", "paper_cosine", "paper_rel_l2")
    table = markdown_table(columns, [[row[x] for x in columns] for row in worst])
    return f"{worst[0]['capture']}, layer {worst[0]['layer']}, where the error of dQ is largest:\n\n{table}"
