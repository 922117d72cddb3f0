"""Results of fine-tuning a video model, for notebook 13: arms, the paper's claims, times, pictures.

Their records come from `python -m sage_lab video finetune --all` and `video speed` on a GPU.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageSequence
from safetensors.torch import load_file
from sage_lab.experiments.video.plan import AFTERWARDS, FULL, NOT_TUNED, VideoRun
from sage_lab.experiments.video.runs import DRAWN
from sage_lab.experiments.video.speed import speed_table
from sage_lab.experiments.video.verdicts import (
    ALL_COLUMNS,
    COLUMNS,
    LOSS,
    Difference,
    bootstrap,
    mean_cell,
    paired,
    verdict_rows,
    verdict_table,
)
from sage_lab.records import RECORDED, Record, how_timed, markdown_table, read_record
from torch import Tensor

from sage_course.figures.video import Films, arms_figure, films_of, selected_figure

ARMS, SPEED, PICTURES = "video_h200.json", "video_speed_h200.json", "video_pictures"  # in the folder of records
# VisionReward at 97% sparsity, if the arm doesn't say otherwise. The paper's full model was not fine-tuned.
PAPER_SCORES = {
    NOT_TUNED: 0.1084, "SLA2": 0.1039, AFTERWARDS: 0.0850, "router at its start": 0.0876, "SLA at 90%": 0.0872,
    "SLA2 at 95%": 0.1023, "SLA2 at 90%": 0.1093, "SLA2 at 85%": 0.1135,
}  # fmt: skip
SHOWN = ("loss", "on real clips", "PSNR to full, dB", "attention's error", "objects kept")  # of COLUMNS
COLUMN_WORDS = dict(zip(ALL_COLUMNS, ("made-up scenes", "real clips", "PSNR", "SSIM", "objects kept"), strict=True))


class Text(str):
    """Markdown, which a notebook renders."""

    def _repr_markdown_(self) -> str:
        return str(self)


def record_of(name: str) -> Record:
    return read_record(RECORDED / name)


def comparison() -> list[Text | Figure]:
    """Return what a notebook displays: the table of arms, their losses beside full attention's, and the claims."""
    record = record_of(ARMS)
    more = {arm: above_full(record, arm) for arm in dict.fromkeys(row["arm"] for row in record.rows)}
    found = {arm: difference for arm, difference in more.items() if difference is not None}
    figure = arms_figure(found, title="What each arm loses against full attention", caption=record.caption)
    return [arms(record), _closed(figure), claims(record)]


def pictures() -> list[Figure | Films]:
    """Return what a notebook displays: a restored scene, films from equal noise, what the router selected."""
    record = record_of(ARMS)
    names = {"truth": "restored_truth"} | {arm: f"{name}_restored" for arm, name in _drawn(record).items()}
    # Every second frame, and two samples: a notebook must stay small.
    restored = films_of({arm: _strip(name)[:, ::2] for arm, name in names.items()})
    films = films_of({arm: video[:, ::2] for arm, video in samples().items() if arm in (FULL, "SLA2")})
    return [restored, films, _closed(selection(record))]


def samples() -> dict[str, Tensor]:
    """Return each arm's sample [3, T, size, size] in [-1, 1], at half its size; all began with equal noise."""
    return {arm: _film(name) for arm, name in _drawn(record_of(ARMS)).items()}


def speed() -> list[Text]:
    """Return what a notebook displays: times of a training step and of sampling, with SLA2 and its competitors."""
    record = record_of(SPEED)
    left_out = record.provenance.get("not_timed", {})
    more = "".join(f" Not timed: {contender}, {reason}." for contender, reason in left_out.items())
    plan = record.provenance["plan"]
    counts = f"Medians of {plan['repetitions']} steps and {plan['sampled']} samplings"
    return [Text(f"{speed_table(record.rows)}\n\n{counts}, {how_timed(record.rows)}; {record.caption}.{more}")]


def above_full(record: Record, arm: str) -> Difference | None:
    """Return by how much the arm's loss is above full attention's; None if no seed has both."""
    more = None if arm == FULL else paired(record.rows, FULL, arm, LOSS)
    return None if more is None else bootstrap(more)


def arms(record: Record) -> Text:
    """Return a line per arm: means over seeds, its loss above full attention's, the paper's score."""
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in record.rows):
        found = record.select(arm=arm)
        more = above_full(record, arm)
        above = "" if more is None else "{:+.3f} ({:+.3f} to {:+.3f})".format(*(1000 * x for x in more[:3]))
        above = "diverged" if any(row.get("diverged") for row in found) else above
        cells = [mean_cell(found, *COLUMNS[name]) for name in SHOWN]
        score = f"{PAPER_SCORES[arm]:.4f}" if arm in PAPER_SCORES else ""
        lines.append((arm, len(found), cells[0], above, *cells[1:], score))
    header = ("arm", "seeds", SHOWN[0], "loss above full's, 1/1000 (95%)", *SHOWN[1:], "VisionReward in the paper")
    left = record.provenance.get("unfinished")
    unfinished = f" {len(left)} of the plan's runs left; the record names them." if left else ""
    return Text(f"{markdown_table(header, lines)}\n\n{record.caption}.{unfinished}")


def claims(record: Record) -> Text:
    """Return each claim with its paired difference and verdict on the loss, then its verdicts on all measures."""
    found = verdict_rows(record.rows, ALL_COLUMNS)
    verdicts = {(row["claim"], row["on"]): row["verdict"] for row in found}
    lines = [
        (claim, *(verdicts.get((claim, column), "") for column in ALL_COLUMNS))
        for claim in dict.fromkeys(row["claim"] for row in found)
    ]
    table = verdict_table([row for row in found if row["on"] == LOSS])
    return Text(f"{table}\n\n{markdown_table(('claim', *COLUMN_WORDS.values()), lines)}\n\n{record.caption}.")


def selection(record: Record) -> Figure:
    """Draw the blocks that one block of queries selected, in the first head of the last layer."""
    row = record.select(arm="SLA2")[0]
    tensors = load_file(RECORDED / PICTURES / "selected.safetensors")
    frames = tensors["video"] / 127.5 - 1
    masks = _unpacked(tensors["selected"], row["tokens"] // math.prod(row["cube"]))
    layers, _, tm, tn = masks.shape
    side = math.isqrt(tn // frames.shape[1])
    cubes = (frames.shape[1], side, side)
    block = tm // 2 + tm // frames.shape[1] // 2 + side // 4  # in the middle of the video
    queries = (torch.arange(tn) // (tn // tm) == block).view(cubes)
    chosen = {f"layer {layers - 1}": masks[-1, 0, block].view(cubes)}
    return selected_figure(frames, chosen, queries, title="What one block of queries selected, first head")


def _closed(figure: Figure) -> Figure:
    """Close a figure, so that a notebook does not show it a second time at the end of the cell."""
    plt.close(figure)
    return figure


def _drawn(record: Record) -> dict[str, str]:
    """Return the run's name for each arm that has pictures."""
    seed = record.provenance["plan"]["seeds"][0]
    names = {arm: VideoRun(arm, seed).name for arm in DRAWN}
    return {arm: name for arm, name in names.items() if (RECORDED / PICTURES / f"{name}.gif").exists()}


def _film(name: str) -> Tensor:
    """Read a GIF at half its size: [3, T, size, size] in [-1, 1]."""
    with Image.open(RECORDED / PICTURES / f"{name}.gif") as film:
        return _halved([frame.convert("RGB") for frame in ImageSequence.Iterator(film)])


def _strip(name: str) -> Tensor:
    """Read a PNG of square frames side by side at half its size: [3, frames, size, size] in [-1, 1]."""
    with Image.open(RECORDED / PICTURES / f"{name}.png") as strip:
        size, starts = strip.height, range(0, strip.width, strip.height)
        return _halved([strip.convert("RGB").crop((x, 0, x + size, size)) for x in starts])


def _halved(frames: list[Image.Image]) -> Tensor:
    """Halve T pictures: [3, T, size, size] in [-1, 1]."""
    pixels = np.stack([frame.reduce(2) for frame in frames])
    return torch.from_numpy(pixels).permute(3, 0, 1, 2) / 127.5 - 1


def _unpacked(bits: Tensor, count: int) -> Tensor:
    """Unpack bits, highest first, into bool [..., count]."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1, count=count)).bool()
