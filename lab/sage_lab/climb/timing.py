"""Times of a reader's function on this GPU, taken in turn with our levels and PyTorch's attention."""

from functools import partial
from pathlib import Path

import torch

from sage_lab.bench.case import Case, Shape
from sage_lab.bench.contenders import Absent, Entry
from sage_lab.bench.dense import forward_levels
from sage_lab.bench.judge import require_close
from sage_lab.bench.ratios import OURS, PEER_NAMES
from sage_lab.bench.timing import require_gpu
from sage_lab.climb.launches import DTYPE, Attention
from sage_lab.climb.problems import HEADS, N, Problem
from sage_lab.records import Row

PEERS = ("sdpa_flash", "sdpa_cudnn")


def timed(source: str, attention: Attention, problems: list) -> list[Row]:
    """Return a row per problem and contender. Nobody is timed whose result is wrong; a reader's raises RuntimeError."""
    require_gpu()
    rows = []
    for problem in (Problem(*x) for x in problems):
        case = Case(Shape(1, HEADS, HEADS, N, problem.head_dim, problem.is_causal), dtype=DTYPE)
        call = partial(attention, *case.tensors[:3], is_causal=problem.is_causal)
        entry = Entry("climb", source, None, call, require_close(call(), case.exact[0], name="attention"))
        make = {"reader": lambda entry=entry: entry} | forward_levels(case, "op")
        make |= {name: lambda name=name, case=case: case.peer(name).entry("fwd") for name in PEERS}
        for row in case.turn(make, Absent(), scope="op", direction="fwd"):
            is_peer = row["op"] != "climb"
            level = f"level{row['level']}" if row["provider"] == OURS else row["provider"]
            name = PEER_NAMES.get(level, level) if is_peer else Path(source).stem
            rows.append({"name": name, "peer": is_peer, "gpu": torch.cuda.get_device_name(), **row})
    return rows
