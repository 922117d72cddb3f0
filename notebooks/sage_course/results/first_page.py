"""The first page's table of what holds: the two papers' claims, our verdicts, and one number for each."""

from collections.abc import Iterable

from sage_lab.bench.ratios import OURS, PEER_NAMES, pays_from, peer_ratios, turns
from sage_lab.experiments.pretrain import MODELS
from sage_lab.experiments.table1 import PAPER_TABLE1, closest_setting, deviation
from sage_lab.experiments.video.verdicts import verdict_rows
from sage_lab.records import Row, markdown_table, read_record

from sage_course.results import claims, video
from sage_course.results.claims import CONTRADICTED, LARGEST_GAP, PARTLY, SUPPORTED, UNDECIDED
from sage_course.results.paired import BRANCHES, DIRECTIONS, PAIRED, PAIRED_SPARSE
from sage_course.results.pretraining import GPT, SAME_BATCH, TIMES, signed, step_times, timed_model
from sage_course.results.tables import TABLE1, TABLE2

MAIN_N = 4096
SPARSE_LEVELS, VIDEO_LENGTH = "ladder_sla2_h200", 32_760  # of the smaller one of the SLA2 paper's two models
NEWER = ("sdpa_cudnn", "fa4")  # peers that are newer than the paper's
ON_OURS = "holds on another GPU, an H200"  # the papers measured on GeForce cards
NOT_ON_OURS = "contradicted on another GPU, an H200"
WORDS = {SUPPORTED: "holds", PARTLY: "holds in part", UNDECIDED: "undecided", "not decided": "undecided"}
SIGNS = {"holds in part": "(✓)", "holds": "✓", "contradicted": "✗", "": "?"}  # by how a verdict begins
# The claims of video.verdicts that stand here, as this page words them.
VIDEO_CLAIMS = {
    "a learned router beats the heuristic": "SLA2's learned router beats SLA's fixed rule",
    "SLA2 at 97% beats SLA at 90%": "SLA2 at 97% sparsity is better than SLA at 90%",
    "full attention beats SLA2 at 97%": "Full attention is better than SLA2 at 97% sparsity",
    "QAT helps": "SLA2 is better trained with INT8 than quantised afterwards",
}


def verdicts() -> str:
    """Return the table: a claim, the verdict, and one number of ours."""
    lines = [accuracy(), *training(), dense_speed(), step_speed(), sparse_speed(), int8_share(), *video_training()]
    table = markdown_table(
        ("the papers say", "verdict", "our number"), [(x, with_sign(WORDS.get(y, y)), z) for x, y, z in lines]
    )
    gpts = claims.gpts_of(read_record(GPT))
    return f"{table}\n\nLosses and gradients of language models: {gpts}, if not said otherwise."


def with_sign(verdict: str) -> str:
    """Return a verdict behind its sign."""
    return f"{next(sign for start, sign in SIGNS.items() if verdict.startswith(start))} {verdict}"


def accuracy() -> tuple:
    """Return the line about Table 1 of the SageBwd paper."""
    record = read_record(TABLE1)
    best = closest_setting(record)
    errors = {sigma: max(map(deviation, record.select(sigma=sigma, **best))) for sigma in PAPER_TABLE1}
    where = f"with one scale per {best['granularity']}"
    later = max(error for sigma, error in errors.items() if sigma >= 3)
    number = f"within {max(errors.values()):.0%} of its numbers; within {later:.0%} from sigma 3 on"
    return "SageBwd has the errors of Table 1", f"holds {where}", number


def training() -> list[tuple]:
    """Return the lines about pre-training with SageBwd."""
    small, large, divergence, smoothing = claims.gpt_claims(read_record(GPT))
    without_noise = claims.without_noise(read_record(SAME_BATCH))
    fragile = claims.most_error_prone(read_record(TABLE2))
    found = {
        "SageBwd trains as well as exact attention with few tokens per batch": small,
        f"SageBwd ends {LARGEST_GAP:.1%} behind with many tokens per batch": large,
        "SageBwd falls behind once no noise hides the bias of its gradient": without_noise,
        "SageBwd diverges without QK-norm, with many tokens per batch": divergence,
        "SageBwd needs K-smoothing": smoothing,
        "SageBwd's errors grow in dS": fragile,
    }
    return [(words, x.verdict, x.number or x.ours.replace("95% interval ", "")) for words, x in found.items()]


def dense_speed() -> tuple:
    """Return the line about SageBwd's time, and in how many shapes newer peers are faster."""
    both = {"scope": "autograd", "direction": "fwd+bwd", "cuda_graph": False, "layout": "bhnd", "head_dim": 128}
    shapes = [(where, peer_ratios(of)) for where, of in turns(read_record(PAIRED).select(**both))]
    main = {where["causal"]: found for where, found in shapes if where["n_q"] == MAIN_N}
    peers = ("sdpa_flash", *NEWER)
    number = ", ".join(f"{main[False][peer]:.2f}x {PEER_NAMES[peer]}" for peer in peers)
    number += f" (with a causal mask {', '.join(f'{main[True][peer]:.2f}x' for peer in peers)}), D=128"
    losses = {PEER_NAMES[peer]: sum(found[peer] < 1 for _, found in shapes) for peer in NEWER}
    faster = ", ".join(f"{name} in {count} of {len(shapes)} shapes" for name, count in losses.items() if count)
    words = "SageBwd is up to 1.67x as fast as FlashAttention-2 (RTX 4090)"
    verdict = f"{ON_OURS}; faster than ours at D=128: {faster}" if faster else ON_OURS
    return words, verdict, f"{number}, {MAIN_N:,} tokens"


def step_speed() -> tuple:
    """Return the line about a whole training step: it is faster at every length that was timed, or in part at some."""
    record = read_record(TIMES)
    model = MODELS[record.rows[0]["model"]]
    shape = f"D={model['width'] // model['heads']}"
    least = pays_from(read_record(PAIRED).rows)[f"{shape} causal"]
    ratios = {n: exact / ours for n, (exact, ours) in step_times(record).items()}
    number = ", ".join(f"{ratio:.2f}x at {n:,} tokens" for n, ratio in ratios.items())
    number += f", against the kernel that PyTorch chooses, in {timed_model(record)} with `Prologue`, {shape}, causal"
    number += f"; below {least:,} tokens `sdpa()` stays exact by default"
    words = "SageBwd speeds up a whole training step (our question: the papers time attention alone)"
    return words, verdict_on((ratio > 1 for ratio in ratios.values()), "holds on an H200"), number


def verdict_on(holds: Iterable[bool], everywhere: str = ON_OURS) -> str:
    """Return the verdict on times: a claim holds if it does in every case that was timed, and in part if in some."""
    holds = list(holds)
    return everywhere if all(holds) else PARTLY if any(holds) else CONTRADICTED


def sparse_speed() -> tuple:
    """Return the line about SLA2's time, and about the kernels that are faster with the same mask."""
    record, faster, numbers = read_record(PAIRED_SPARSE), [], []
    for n, direction in ((VIDEO_LENGTH, "fwd"), (VIDEO_LENGTH, "fwd+bwd"), (8192, "fwd+bwd")):
        rows = record.select(mask="random", n_q=n, direction=direction)
        ratios, mine = peer_ratios(rows), min((x for x in rows if x["provider"] == OURS), key=lambda x: x["ms_median"])
        faster += [PEER_NAMES[peer] for peer in ratios if ratios[peer] < 1]
        fastest = min(ratios, key=ratios.get)
        named = ", ".join(f"{ratios[peer]:#.3g}x {PEER_NAMES[peer]}" for peer in ("sdpa_flash", fastest))
        numbers.append(f"{named} ({DIRECTIONS[direction]}, {n:,} tokens, ours in {BRANCHES[mine['level']]})")
    words = "SLA2 at 97% sparsity is 18.6x as fast as FlashAttention-2 (forward, 32,760 tokens, RTX 5090)"
    always = [name for name in dict.fromkeys(faster) if faster.count(name) == len(numbers)]
    named = f"{', '.join(always)}, in some cases {', '.join(x for x in dict.fromkeys(faster) if x not in always)}"
    verdict = f"{ON_OURS}; with the same mask and without a linear branch, faster: {named}"
    return words, verdict, "; ".join(numbers)


def int8_share() -> tuple:
    """Return the line about what INT8 adds to SLA2's speed: level 3 is level 2's program in INT8, with its tiles."""
    record = read_record(SPARSE_LEVELS)
    where = {"n_q": VIDEO_LENGTH, "sparsity": 0.97, "direction": "fwd"}

    def gain(level: int, scope: str) -> float:
        in_16_bit, in_int8 = (record.select(level=x, scope=scope, **where)[0]["ms_median"] for x in (2, level))
        return in_16_bit / in_int8

    same, hopper = ([gain(level, scope) for scope in ("kernel", "op")] for level in (3, 4))
    number = (
        f"{same[0]:.2f}x in the kernel, {same[1]:.2f}x for the whole pass ({hopper[0]:.2f}x and {hopper[1]:.2f}x"
        f" with the default on Hopper, a program that has no 16-bit form), {VIDEO_LENGTH:,} tokens"
    )
    verdict = verdict_on(ratio > 1.25 for ratio in same)
    return "INT8 makes SLA2 about 1.3x as fast (forward)", NOT_ON_OURS if verdict == CONTRADICTED else verdict, number


def video_training() -> list[tuple]:
    """Return the lines about fine-tuning a video model with SLA2."""
    found: dict[str, Row] = {row["claim"]: row for row in verdict_rows(video.record_of(video.ARMS).rows)}
    lines = []
    for claim, words in VIDEO_CLAIMS.items():
        row = found[claim]
        change, low, high = (signed(-1000 * row[name], ".2f") for name in ("mean", "high", "low"))
        saved = f"squared error {change}/1000 ({low} to {high}, {row['seeds']} seeds)"
        lines.append((words, row["verdict"], saved))
    return lines
