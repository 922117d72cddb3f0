"""The arms that are compared, the runs of the plan in the order of what they decide, and what they should cost.

Every arm starts from the same pre-trained weights, sees the same videos and makes as many steps; its row says what it
changes. The decisive ones run with every seed, first; the others with the first seed alone.

Costs are predicted from counted arithmetic and rates that an H200 showed in other measurements of this project
(`Rates`). They are there to plan with: records hold what was measured.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import markdown_table
from sage_lab.training.video_flow import FlowSettings
from sage_lab.training.video_router import RouterSettings
from sage_ref.sla2 import block_count, selected_count


class Arm(NamedTuple):
    """changes: to the model's configuration. router, alpha: of `RouterSettings`. stage1: whether there is one.

    tuned: whether there is a stage 2. judged_as: another arm whose weights this one takes, changed, without training.
    """

    changes: dict[str, Any]
    router: str = "learned"
    alpha: str = "learned"
    stage1: bool = True
    tuned: bool = True
    judged_as: str | None = None


SLA2 = {"attention": "sla2"}
FULL, NOT_TUNED, AFTERWARDS = "full", "full, not fine-tuned", "SLA2, quantised afterwards"
ARMS = {
    FULL: Arm({"attention": "exact"}, stage1=False),
    NOT_TUNED: Arm({"attention": "exact"}, stage1=False, tuned=False),
    "SLA2": Arm(SLA2),
    "SLA2, 16 bit": Arm(SLA2 | {"quantize": False}),
    AFTERWARDS: Arm(SLA2 | {"quantize": True}, judged_as="SLA2, 16 bit"),
    "router at its start": Arm(SLA2, router="identity"),
    "SLA at 90%": Arm({"attention": "sla", "sparsity": 0.9}, stage1=False),
    "sparse only": Arm(SLA2, alpha="one"),
    "no stage 1": Arm(SLA2, stage1=False),
    "SLA2 at 90%": Arm(SLA2 | {"sparsity": 0.9}),
    "random router": Arm(SLA2, router="random"),
    "rows in order": Arm(SLA2 | {"cube": (1, 1, 1)}),
    "SLA2 at 95%": Arm(SLA2 | {"sparsity": 0.95}),
    "SLA2 at 85%": Arm(SLA2 | {"sparsity": 0.85}),
    "SLA at 97%": Arm({"attention": "sla"}, stage1=False),
    "SageBwd": Arm({"attention": "sagebwd"}, stage1=False),
}
# In the order of what they decide. An arm that is judged as another comes with that one.
DECISIVE = (
    FULL, "SLA2", "SLA2, 16 bit", "router at its start", "SLA at 90%", "sparse only", "no stage 1", "rows in order",
)  # fmt: skip
SINGLE = tuple(name for name, arm in ARMS.items() if name not in DECISIVE and arm.judged_as is None)


class Run(NamedTuple):
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """As a file's name."""
        plain = self.arm.replace("%", "")
        return "".join(letter if letter.isalnum() else "_" for letter in plain) + f"_seed{self.seed}"

    @property
    def stage1(self) -> "Run":
        """The run whose stage 1 serves this one, too: INT8 is of stage 2 alone."""
        fit = _fit(ARMS[self.arm])
        return Run(next(name for name, other in ARMS.items() if _fit(other) == fit), self.seed)


def _fit(arm: Arm) -> tuple:
    """All that stage 1 depends on."""
    return {name: x for name, x in arm.changes.items() if name != "quantize"}, arm.router, arm.alpha, arm.stage1


@dataclass(frozen=True)
class VideoPlan:
    """seeds: of the decisive arms; all others take the first. stage1_steps, steps: of the two stages.

    videos, levels: of the grid on which flow matching's loss is judged. samples: from equal noise. restored: videos of
    which noise at level `restored_level` is taken away again. sampling_steps: from noise level 1 to 0.
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
    samples: int = 8
    restored: int = 16
    restored_level: float = 0.7
    sampling_steps: int = 24
    watched: int = 4
    judged_batch: int = 4
    autocast: bool = True
    compile: bool = True
    backend: str = "triton"

    def config(self, model: VideoDiTConfig, arm: str) -> VideoDiTConfig:
        """The arm's; model: that of the pre-trained weights."""
        blocks = {name: getattr(self, name) for name in ("sparsity", "block_q", "block_kv", "backend")}
        return replace(model, **blocks | ARMS[arm].changes)

    def stage1(self, run: Run) -> RouterSettings:
        arm = ARMS[run.arm]
        return RouterSettings(
            steps=self.stage1_steps,
            micro_batch_size=RouterSettings.batch_size,
            warmup_steps=self.stage1_steps // 10,
            report_every=max(1, self.stage1_steps // 2),
            query_blocks=self.query_blocks,
            router=arm.router,
            alpha=arm.alpha,
            autocast=self.autocast,
            seed=run.seed,
        )

    def stage2(self, run: Run) -> FlowSettings:
        return FlowSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            micro_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup_steps=self.steps // 15,
            weight_decay=0.0,
            report_every=-(-self.steps // self.reports),
            seed=run.seed,
            purpose="finetune",
            average=self.average,
            alpha_rate=0.0 if ARMS[run.arm].alpha == "one" else self.alpha_rate,
            autocast=self.autocast,
            compile=self.compile,
        )


# Too small to show anything, large enough to try the program.
CPU_PLAN = VideoPlan(
    seeds=(0, 1),
    sparsity=0.75,
    block_q=16,
    block_kv=8,
    stage1_steps=4,
    query_blocks=2,
    steps=4,
    batch_size=2,
    reports=2,
    videos=4,
    levels=2,
    samples=2,
    restored=2,
    sampling_steps=3,
    watched=1,
    judged_batch=4,
    autocast=False,
    compile=False,
    backend="reference",
)
PLANS = {"gpu": VideoPlan(), "cpu": CPU_PLAN}


def planned(plan: VideoPlan) -> list[Run]:
    """All runs that train, in the order of what they decide; arms judged as another are part of that one's run."""
    decisive = [Run(arm, seed) for seed in plan.seeds for arm in DECISIVE]
    return decisive + [Run(arm, plan.seeds[0]) for arm in SINGLE]


class Rates(NamedTuple):
    """Of an H200, assumed: operations and bytes per second, and ns for each head and token of SLA2, both passes.

    exact: cuDNN's attention, both passes, at 16,384 tokens. linear: of matmuls between. elementwise_bytes: that all
    else moves for each channel of a token and layer in both passes. sla2_linear_ns: SLA2 without its sparse loop;
    sla2_block_ns: what each selected block adds. forward: the share of both passes that the forward pass takes.
    """

    exact: float = 5.2e14
    linear: float = 3.5e14
    memory: float = 3.5e12
    elementwise_bytes: float = 150.0
    sla2_linear_ns: float = 3.4
    sla2_block_ns: float = 0.85
    forward: float = 0.3
    stage1_seconds: float = 0.06  # of a step, all layers
    per_run_seconds: float = 5.0  # models built, checkpoints written


def attention_flops(config: VideoDiTConfig) -> float:
    """Exact attention of one video, both passes, all layers: 3.5 times the forward pass's 4 N^2 width."""
    return 3.5 * 4 * config.tokens**2 * config.width * config.layers


def step_seconds(config: VideoDiTConfig, videos: int, rates: Rates = Rates()) -> float:  # noqa: B008 (immutable)
    """A training step, predicted."""
    tokens, width = videos * config.tokens, config.width
    linear = 6 * 12 * width**2 * tokens * config.layers / rates.linear
    elementwise = rates.elementwise_bytes * width * tokens * config.layers / rates.memory
    if config.attention in ("exact", "sagebwd"):
        attention = videos * attention_flops(config) / rates.exact
    else:
        selected = selected_count(config.sparsity, block_count(config.tokens, config.block_kv))
        each = 1e-9 * (rates.sla2_linear_ns + rates.sla2_block_ns * selected)
        attention = tokens * config.heads * config.layers * each
    return linear + elementwise + attention


def run_seconds(plan: VideoPlan, model: VideoDiTConfig, arm: str, clips: int = 6) -> float:
    """A run with all that is measured, predicted."""
    rates, config, traits = Rates(), plan.config(model, arm), ARMS[arm]
    judged = (plan.videos + clips) * plan.levels + plan.samples * plan.sampling_steps
    judged += plan.restored * round(plan.restored_level * plan.sampling_steps)
    twins = 1 + sum(other.judged_as == arm for other in ARMS.values())
    seconds = rates.per_run_seconds + twins * judged * rates.forward * step_seconds(config, 1)
    has_own_stage1 = traits.stage1 and Run(arm, 0).stage1.arm == arm
    seconds += has_own_stage1 * plan.stage1_steps * rates.stage1_seconds
    return seconds + traits.tuned * plan.steps * step_seconds(config, plan.batch_size)


def plan_table(plan: VideoPlan, model: VideoDiTConfig, finished: Sequence[str] = ()) -> str:
    """Every run with its predicted seconds and the minutes up to its end; the last one is the first to be cut."""
    lines, total = [], 0.0
    for number, run in enumerate(planned(plan), start=1):
        seconds = run_seconds(plan, model, run.arm)
        total += seconds
        step = 1000 * step_seconds(plan.config(model, run.arm), plan.batch_size)
        state = "done" if run.name in finished else ""
        lines.append((number, run.arm, run.seed, f"{step:.0f}", f"{seconds:.0f}", f"{total / 60:.1f}", state))
    return markdown_table(("", "arm", "seed", "ms per step", "seconds", "minutes so far", ""), lines)


def facts_of(plan: VideoPlan) -> dict[str, Any]:
    """For a record's provenance."""
    return {"plan": asdict(plan), "arms": {name: arm._asdict() for name, arm in ARMS.items()}}
