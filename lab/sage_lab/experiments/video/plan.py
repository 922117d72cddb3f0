"""The arms that are compared, their settings, and the runs in the order of what they decide.

Every arm starts from the same pre-trained weights, sees the same videos and makes as many steps; its row says what it
changes. The decisive ones run with every seed, first; the others with the first seed alone.
"""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.plan import Plan, Run
from sage_lab.training.video_flow import FlowSettings
from sage_lab.training.video_router import RouterSettings
from sage_ref.sla2 import Relaxation


class Arm(NamedTuple):
    """An arm. changes: to the model's configuration. router, alpha: of `RouterSettings`. stage1: whether there is one.

    relaxation: fields of `Relaxation` in which stage 1 differs from the library's default.
    tuned: whether there is a stage 2. judged_as: a different arm whose weights this one uses, changed, untrained.
    """

    changes: dict[str, Any]
    router: str = "learned"
    alpha: str = "learned"
    stage1: bool = True
    relaxation: dict[str, Any] = {}
    tuned: bool = True
    judged_as: str | None = None


FULL, NOT_TUNED, AFTERWARDS = "full", "full, not fine-tuned", "SLA2, quantised afterwards"
_DATA = tomllib.loads(Path(__file__).with_name("arms.toml").read_text(encoding="utf-8"))
ARMS = {name: Arm(**facts) for name, facts in _DATA.items()}
for _arm in ARMS.values():
    if "cube" in _arm.changes:  # TOML has no tuples
        _arm.changes["cube"] = tuple(_arm.changes["cube"])
# In the order of what they decide. An arm that is judged as another comes with that one.
DECISIVE = (
    FULL, "SLA2", "SLA2, 16 bit", "router at its start", "SLA at 90%", "sparse only", "no stage 1", "rows in order",
    "SLA2, Eq. 16-17",
)  # fmt: skip
TRAINED = tuple(name for name, arm in ARMS.items() if arm.judged_as is None)


@dataclass(frozen=True)
class VideoRun(Run):
    """An arm with one seed."""

    arm: str
    seed: int


@dataclass(frozen=True)
class VideoPlan:
    """Settings of the experiment.

    seeds: of the decisive arms; all others take the first. stage1_steps, steps: of the two stages.
    videos, levels: of the grid on which flow matching's loss is judged.
    watched: videos on which attention's error is measured. judged_batch: videos of a pass; one number that divides all
    others saves compilations. backend: of all but exact attention; the reference would fill the memory.
    reports: validation losses and checkpoints of a run.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    sparsity: float = 0.97
    block_q: int = 128
    block_kv: int = 64
    stage1_steps: int = 200
    query_blocks: int = 4
    steps: int = 300
    batch_size: int = 8
    learning_rate: float = 1e-4
    alpha_rate: float = 50.0
    average: float = 0.98
    reports: int = 3
    videos: int = 48
    levels: int = 8
    watched: int = 4
    judged_batch: int = 4
    autocast: bool = True
    compile: bool = True
    backend: str = "triton"

    def config(self, model: VideoDiTConfig, arm: str) -> VideoDiTConfig:
        """Return an arm's configuration. model: that of the pre-trained weights."""
        blocks = {name: getattr(self, name) for name in ("sparsity", "block_q", "block_kv", "backend")}
        return replace(model, **blocks | ARMS[arm].changes)

    def stage1(self, run: VideoRun) -> RouterSettings:
        arm = ARMS[run.arm]
        return RouterSettings(
            steps=self.stage1_steps,
            micro_batch_size=2,
            warmup_steps=self.stage1_steps // 10,
            report_every=max(1, self.stage1_steps // 2),
            query_blocks=self.query_blocks,
            router=arm.router,
            alpha=arm.alpha,
            relaxation=Relaxation(**arm.relaxation),
            autocast=self.autocast,
            seed=run.seed,
        )

    def stage2(self, run: VideoRun) -> FlowSettings:
        same = ("steps", "batch_size", "learning_rate", "average", "autocast", "compile")
        return FlowSettings(
            **{name: getattr(self, name) for name in same},
            warmup_steps=self.steps // 15,
            weight_decay=0.0,
            report_every=-(-self.steps // self.reports),
            seed=run.seed,
            purpose="finetune",
            alpha_rate=0.0 if ARMS[run.arm].alpha == "one" else self.alpha_rate,
        )


PLANS = {
    "gpu": VideoPlan(),
    "cpu": VideoPlan(  # too small to show anything, large enough to try the program
        seeds=(0, 1), sparsity=0.75, block_q=16, block_kv=8, stage1_steps=4, query_blocks=2, steps=4, batch_size=2,
        reports=2, videos=4, levels=2, watched=1, autocast=False,
        compile=False, backend="reference",
    ),  # fmt: skip
}  # fmt: skip


def planned(plan: VideoPlan, arms: Collection[str] = TRAINED) -> Plan:
    """Return the runs of some arms, or of all, in the order of what they decide."""
    decisive = [VideoRun(arm, seed) for seed in plan.seeds for arm in DECISIVE if arm in arms]
    return Plan("video", decisive + [VideoRun(x, plan.seeds[0]) for x in TRAINED if x in arms and x not in DECISIVE])
