"""Results of fine-tuning a video model: arms, the paper's claims, times for RESULTS.md; pictures for notebook 13.

Their records come from `python -m sage_lab video finetune` on a GPU, and from the archived `video speed`.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from PIL import Image
from sage_lab.experiments.video.plan import AFTERWARDS, FULL, NOT_TUNED, VideoRun
from sage_lab.experiments.video.verdicts import (
    COLUMNS,
    Difference,
    bootstrap,
    mean_cell,
    paired,
    verdict_rows,
    verdict_table,
)
from sage_lab.records import RECORDED, Record, Row, markdown_table, read_record
from torch import Tensor

ARMS = "video_h200.json"  # in the folder of records
ABLATIONS, SPEED, PICTURES = "video_ablations_h200.json", "video_speed_h200.json", "video_pictures"  # archived
# VisionReward at 97% sparsity, if the arm doesn't say otherwise. The paper's full model was not fine-tuned.
PAPER_SCORES = {
    NOT_TUNED: 0.1084, "SLA2": 0.1039, AFTERWARDS: 0.0850, "router at its start": 0.0876, "SLA at 90%": 0.0872,
    "SLA2 at 95%": 0.1023, "SLA2 at 90%": 0.1093, "SLA2 at 85%": 0.1135,
}  # fmt: skip
TIMED = {  # the attentions of the archived `video speed`
    "sla2": "SLA2",
    "exact": "PyTorch's pick",
    "flash_attention_2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "flash_attention_4": "FlashAttention-4",
    "flex": "FlexAttention, as many keys",
}


class Text(str):
    """Markdown, which a notebook renders."""

    def _repr_markdown_(self) -> str:
        return str(self)


def record_of(name: str) -> Record:
    return read_record(RECORDED / name)


def results() -> str:
    """Return the tables of arms and claims, and the claims that only an archived record decides, for RESULTS.md."""
    record, earlier = record_of(ARMS), record_of(ABLATIONS)
    found, names = verdict_rows(record.rows), list(dict.fromkeys(row["arm"] for row in record.rows))
    decided = [row["claim"] for row in found]
    others = [row for row in verdict_rows(earlier.rows) if row["claim"] not in decided]
    between = (
        f"The arms and these claims were {record.caption}. The claims below need more arms. They were trained once "
        f"before, from a different start, and {earlier.caption}:"
    )
    return "\n\n".join([arms(record, names), verdict_table(found), between, verdict_table(others)])


def speed() -> str:
    """Return the times of a training step and of sampling, with SLA2 and its competitors, for RESULTS.md."""
    record = record_of(SPEED)
    left_out = record.provenance.get("not_timed", {})
    more = "".join(f" Not timed: {contender}, {reason}." for contender, reason in left_out.items())
    plan = record.provenance["plan"]
    counts = f"Medians of {plan['repetitions']} steps and {plan['sampled']} samplings"
    return f"{speed_table(record.rows)}\n\n{counts}, {record.timed}; {record.caption}.{more}"


def speed_table(rows: Sequence[Row]) -> str:
    """Return a table of milliseconds, and of how many times as long as SLA2 each takes."""
    of_sla2 = {(row["what"], row["tokens"]): row["ms_median"] for row in rows if row["provider"] == "sla2"}
    lines = []
    for row in rows:
        ratio = f"{row['ms_median'] / of_sla2[row['what'], row['tokens']]:.2f}"
        name = TIMED[row["provider"]]
        lines.append((row["what"], row["tokens"], name, row["ms_median"], ratio, row["memory_gb"] or ""))
    return markdown_table(("", "tokens", "attention", "ms", "times as long as SLA2", "GB"), lines)


def restored(names: Collection[str]) -> dict[str, Tensor]:
    """Return a scene [3, frames, size, size] in [-1, 1], and what the models of these arms made of it with noise."""
    seed = record_of(ARMS).provenance["plan"]["seeds"][0]
    names = {arm: f"{VideoRun(arm, seed).name}_restored" for arm in names}
    return {arm: _strip(name) for arm, name in ({"truth": "restored_truth"} | names).items()}


def above_full(record: Record, arm: str) -> Difference | None:
    """Return by how much the arm's loss is above full attention's; None if no seed has both."""
    more = None if arm == FULL else paired(record.rows, FULL, arm)
    return None if more is None else bootstrap(more)


def arms(record: Record, names: Collection[str]) -> Text:
    """Return a line per arm: its loss above full attention's, means over seeds, the paper's score."""
    lines = []
    for arm in names:
        found = record.select(arm=arm)
        more = above_full(record, arm)
        above = "" if more is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*(1000 * x for x in more[:3]))
        above = "diverged" if any(row.get("diverged") for row in found) else above
        score = f"{PAPER_SCORES[arm]:.4f}" if arm in PAPER_SCORES else ""
        lines.append((arm, len(found), above, *(mean_cell(found, *column) for column in COLUMNS.values()), score))
    header = ("arm", "seeds", "loss above full's, 1/1000 (95%)", *COLUMNS, "VisionReward in the paper")
    return Text(markdown_table(header, lines))


def claims(record: Record, words: Collection[str]) -> Text:
    """Return the paired difference and the verdict of some claims, on the loss."""
    return Text(verdict_table([row for row in verdict_rows(record.rows) if row["claim"] in words]))


def _strip(name: str) -> Tensor:
    """Read a PNG of square frames side by side at half its size: [3, frames, size, size] in [-1, 1]."""
    with Image.open(RECORDED / PICTURES / f"{name}.png") as strip:
        size, starts = strip.height, range(0, strip.width, strip.height)
        frames = [strip.convert("RGB").crop((x, 0, x + size, size)).reduce(2) for x in starts]
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(3, 0, 1, 2) / 127.5 - 1
