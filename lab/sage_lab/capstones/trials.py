"""Trials of a forward kernel that was written from a blank page: inputs by milestone, the oracle, verdicts with hints.

    for result in run(attention, ATTENTION):
        print(result)

`observe` calls the reader's function, and `judge` compares what it returned with attention in float64. The bar is one
that INT8 passes. If it is missed, the results of likely mistakes are computed in float64, too (`signs`), and the
mistake whose result is the reader's gives the hint. So a hint doesn't depend on how the kernel is written.
"""

import hashlib
import math
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_lab.capstones.observe import observe

BAR = 0.08  # of INT8: the largest relative error of a row of O
EXACT_BAR = 0.004  # where every rounding is exact: 1/128 for 1/127 is twice that
TAIL_BAR = 0.065  # where cutting off costs 8% to 16%
BLOCKS = (16, 32, 64, 128)  # sizes of tiles that mistakes are computed for
SIGN_BAR = 0.2  # how far a result may be from a mistake's that explains it


class Trial(NamedTuple):
    """One call: its arguments by name, how the tensors lie in memory, and what is asked of the result."""

    arguments: dict[str, Any]
    layouts: dict[str, str] = {}  # see `observe.laid_out`
    hint: str = ""  # where no likely mistake explains the result, and for NaN unless int8; "": that of the milestone
    bar: float = BAR
    int8: bool = False  # whether kernels must be seen to round to INT8, and to multiply it
    rounded: Tensor | None = None  # O, where it is that of rounded Q and K alone: exact attention is far from it


class Milestone(NamedTuple):
    name: str
    points: int
    trials: Callable[[torch.Generator], list[Trial]]
    hint: str


class Capstone(NamedTuple):
    """A function that the reader's file defines, and its milestones in the order in which to reach them."""

    function: str
    milestones: tuple[Milestone, ...]


class Verdict(NamedTuple):
    """kind: "" if all is right, else what is wrong, in a word. error: the worst relative error of a row, if known."""

    kind: str = ""
    hint: str = ""
    found: str = ""
    error: float | None = None


class Result(NamedTuple):
    """The outcome of a milestone: the first verdict that isn't right, else the one with the largest error."""

    milestone: str
    points: int
    verdict: Verdict

    def __str__(self) -> str:
        kind, hint, found, error = self.verdict
        shown = f"{hint} ({found})" if kind else f"right, a row is off by {error:.1%} of its size at most"
        return f"{self.points} {self.milestone}: {shown}"


def run(function: Callable, capstone: Capstone, seed: int = 0, device: str = "cpu") -> Iterator[Result]:
    """Try a function on all milestones; yield the outcome of each."""
    for milestone in capstone.milestones:
        worst = Verdict()
        for trial in milestone.trials(generator_of(seed, milestone.name)):
            verdict = tried(function, trial, milestone.hint, device)
            worst = verdict if verdict.kind or (verdict.error or 0) >= (worst.error or 0) else worst
            if verdict.kind:
                break
        yield Result(milestone.name, 0 if worst.kind else milestone.points, worst)


def tried(function: Callable, trial: Trial, hint: str, device: str = "cpu") -> Verdict:
    """Make one trial. hint: that of its milestone."""
    try:
        observed = observe(function, trial.arguments, trial.layouts, device)
    except Exception as error:
        file = function.__code__.co_filename
        while error.__cause__ is not None:  # Triton's interpreter wraps what goes wrong in a kernel
            error = error.__cause__
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f"line {lines[-1]}: " if lines else ""
        return Verdict("raised", f"{function.__name__} raised an error.", f"{where}{type(error).__name__}: {error}")
    return judge(trial, observed, hint)


def generator_of(*names: Any) -> torch.Generator:
    """Return a generator whose seed depends on these names alone, or numbers."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


def judge(trial: Trial, observed: dict[str, Any], hint: str) -> Verdict:
    """Return the verdict on what a call was observed to do, with the trial's sizes. hint: that of the milestone."""
    verdict = verdict_on(trial, observed, hint)
    sizes = ", ".join(
        f"{name} {list(trial.arguments[name].shape)}" for name in ("q", "k", "table") if name in trial.arguments
    )
    return verdict._replace(found=f"{verdict.found}; {sizes}".removeprefix("; ")) if verdict.kind else verdict


def verdict_on(trial: Trial, observed: dict[str, Any], hint: str) -> Verdict:
    q, found = trial.arguments["q"], observed["result"]
    if observed["jump"]:
        return Verdict("jump", JUMP, observed["jump"])
    if observed["outside"] and "table" in observed["outside"] and "table" not in trial.layouts:
        return Verdict("outside", ENTRIES, observed["outside"])
    if observed["outside"]:
        where = LAYOUT if trial.layouts else OUTSIDE if is_ragged(trial.arguments) else ELSEWHERE
        return Verdict("outside", where if trial.int8 else trial.hint or where, observed["outside"])
    if observed["changed"]:
        return Verdict("changed", CHANGED, ", ".join(observed["changed"]))
    if not observed["launched"]:
        return Verdict("not launched", NO_LAUNCH)
    if not isinstance(found, Tensor) or found.shape != q.shape or found.dtype != q.dtype:
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        return Verdict("form", FORM, f"expected {q.dtype} {list(q.shape)}, found {shown}")
    oracle, found = Oracle(trial.arguments), found.double().cpu()
    if observed["undefined"]:
        return Verdict("undefined", trial.hint or UNDEFINED)
    errors = row_errors(found, oracle.output() if trial.rounded is None else trial.rounded.double())
    worst = errors.nan_to_num(torch.inf, torch.inf).argmax()
    error, row = errors.flatten()[worst].item(), torch.unravel_index(worst, errors.shape)
    if error <= trial.bar:
        if trial.int8 and (sign := not_int8(observed)):
            return Verdict("not INT8", *sign, error)
        if (trial.layouts or trial.int8) and observed["copied"]:
            return Verdict("copied", COPIED, f"no kernel got {', '.join(observed['copied'])}", error)
        return Verdict(error=error)
    shown = f"row {[int(x) for x in row]} of O is off by {error:.3g} times its size, {trial.bar} are allowed"
    if not found.isfinite().all():
        rows = ~found.isfinite().all(-1)
        shown = (
            f"{int(rows.sum())} of {rows.numel()} rows of O hold NaN or infinity, first {rows.nonzero()[0].tolist()}"
        )
        return Verdict("NaN", NAN if trial.int8 else trial.hint or NAN, shown, error)
    if trial.rounded is not None:
        return Verdict("not INT8", ROUNDS, shown, error)
    kind, explained = explain(oracle, found)
    return Verdict(kind or "value", explained or trial.hint or hint, shown, error)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each row in units of the expected row, or of the mean row where that is larger."""
    size = expected.norm(dim=-1)
    return (found - expected).norm(dim=-1) / size.clamp(min=size.mean().clamp(min=1e-30))


def is_ragged(arguments: dict[str, Any]) -> bool:
    """Return whether a tile may be partial: elsewhere, lengths are multiples of 64 or of the blocks that are given."""
    sizes = arguments.get("block_q", 64), arguments.get("block_kv", 64)
    return any(arguments[name].shape[2] % size for name, size in zip("qk", sizes, strict=True))


def not_int8(observed: dict[str, Any]) -> tuple[str, str] | None:
    """Return a hint and what was found if kernels don't round to INT8, or a product isn't one that is allowed."""
    dots = observed["dots"]
    shown = f"tl.dot of {', '.join(dots) or 'nothing'}"
    if "i8 x i8 -> i32" not in dots:
        return NO_INT8, shown
    if observed["given"]:
        return GIVEN, f"{observed['given']} is int8, is read, and no kernel has written it"
    allowed = {"i8 x i8 -> i32", "f16 x f16 -> f32", "bf16 x bf16 -> f32"}
    return None if allowed.issuperset(dots) else (WIDE, shown)


class Oracle:
    """Attention in float64 for the arguments of a trial, and what it gives with likely mistakes made."""

    def __init__(self, arguments: dict[str, Any]):
        self.q, k, v = (arguments[name].double() for name in ("q", "k", "v"))
        self.batch, self.heads, self.n_q, self.head_dim = self.q.shape
        self.n_k, self.own_k, self.own_v = k.shape[2], k, v
        self.k, self.v = (x.repeat_interleave(self.heads // k.shape[1], 1) for x in (k, v))
        self.c = 1 / math.sqrt(self.head_dim)
        self.is_causal, self.table = arguments.get("is_causal", False), arguments.get("table")
        self.block_q, self.block_kv = arguments.get("block_q"), arguments.get("block_kv")
        if self.table is not None:  # blocks that no row lists may be NaN, and 0 NaN is NaN
            self.k, self.v = self.k.nan_to_num(0), self.v.nan_to_num(0)

    def seen(self, *, offset: int | None = None, table: Tensor | None = None) -> Tensor:
        """Return bool [B, H, Nq, Nk]: which keys a query sees, with key <= query + offset if causal."""
        query, key = torch.arange(self.n_q)[:, None], torch.arange(self.n_k)
        offset = self.n_k - self.n_q if offset is None else offset
        visible = key <= query + offset if self.is_causal else torch.ones(self.n_q, self.n_k, dtype=torch.bool)
        visible = visible.expand(self.batch, self.heads, -1, -1)
        table = self.table if table is None else table
        return visible if table is None else visible & self.listed(table)

    def listed(self, table: Tensor) -> Tensor:
        """Return bool [B, H, Nq, Nk]: which keys lie in the blocks of a query's row."""
        blocks = (table[..., None] == torch.arange(-(-self.n_k // self.block_kv))).any(-2)
        rows = blocks.repeat_interleave(self.block_q, 2)[:, :, : self.n_q]
        return rows.repeat_interleave(self.block_kv, 3)[..., : self.n_k]

    @cached_property
    def visible(self) -> Tensor:
        return self.seen()

    def output(self, *, q=None, k=None, v=None, c=None, visible=None, scores=None, divide=True) -> Tensor:
        """Return O, with what is given in the place of what belongs there."""
        q, k, v = (own if x is None else x for own, x in ((self.q, q), (self.k, k), (self.v, v)))
        visible = self.visible if visible is None else visible
        s = q @ k.mT * (self.c if c is None else c) if scores is None else scores
        s = s.masked_fill(~visible, -torch.inf)
        m = s.amax(-1, keepdim=True)
        p = torch.exp(s - m.masked_fill(m == -torch.inf, 0))
        l = p.sum(-1, keepdim=True)
        return p @ v / torch.where(l == 0, 1, l) if divide else p @ v

    def steps(self, block: int) -> Iterator[Tensor]:
        """Yield the keys of every tile of the loop, in its order, [B, H, Nq, block]; beyond the end: n_k or more."""
        within = torch.arange(block)
        if self.table is None:
            for j in range(-(-self.n_k // block)):
                yield (j * block + within).expand(self.batch, self.heads, self.n_q, block)
            return
        for blocks in self.table.long().unbind(-1):
            first = torch.where(blocks < 0, self.n_k, blocks * self.block_kv)
            yield first.repeat_interleave(self.block_q, 2)[:, :, : self.n_q, None] + within

    def online(
        self, block: int, l_power: int = 1, o_power: int = 1, drop: int = 0, changed: Callable | None = None
    ) -> Tensor:
        """Return what the loop over tiles gives if l and O are rescaled by this power of the right factor.

        drop: how many tiles are missing at the end. changed: makes of P~ and its rows' maxima what O is added up of.
        """
        s = (self.q @ self.k.mT * self.c).masked_fill(~self.visible, -torch.inf)
        s = torch.cat((s, torch.full_like(s[..., :1], -torch.inf)), -1)
        m, l, weights = torch.full_like(s[..., :1], -torch.inf), torch.zeros_like(s[..., :1]), torch.zeros_like(s)
        steps = list(self.steps(block))
        for keys in steps[: len(steps) - drop]:
            keys = keys.clamp(max=self.n_k)
            s_t = s.gather(-1, keys)
            m_new = torch.maximum(m, s_t.amax(-1, keepdim=True))
            safe = m_new.masked_fill(m_new == -torch.inf, 0)
            rescale, p = torch.exp(m - safe).masked_fill(m == -torch.inf, 1), torch.exp(s_t - safe)
            l = l * rescale**l_power + p.sum(-1, keepdim=True)
            p = changed(p, p.amax(-1, keepdim=True).clamp(min=1e-30)) if changed else p
            weights = (weights * rescale**o_power).scatter_add(-1, keys, p)
            m = m_new
        return weights[..., : self.n_k] @ self.v / torch.where(l == 0, 1, l)


def explain(oracle: Oracle, found: Tensor) -> tuple[str, str]:
    """Return the name and the hint of the likely mistake whose result is nearest to what was found; "" for none."""
    expected, best = oracle.output(), (SIGN_BAR, "", "")
    off = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if (found.norm(dim=-1) < 0.01 * expected.norm(dim=-1)).double().mean() > 0.5:
        return ("diagonal", DIAGONAL) if oracle.is_causal and oracle.table is None else ("zero", ZERO)
    for name, hint, results in signs(oracle):
        for result in results():
            apart = float((found - result).norm() / result.norm().clamp(min=1e-30))
            if apart < min(best[0], off / 2):
                best = apart, name, hint
    factor = float((found * expected).sum() / (expected * expected).sum())
    if not best[1] and (found - factor * expected).norm() < 0.3 * (found - expected).norm():
        return "factor", FACTOR
    return best[1:]


Sign = tuple[str, str, Callable[[], Iterator[Tensor]]]


def signs(x: Oracle) -> Iterator[Sign]:
    """Yield likely mistakes, each with a hint and the results that it may have on these inputs."""
    blocks = BLOCKS if x.table is None else (x.block_kv,)
    smooth = x.k - x.k.mean(2, keepdim=True)

    def with_zero_keys():
        for block in blocks:
            if extra := -x.n_k % block:
                k, v = (torch.nn.functional.pad(y, (0, 0, 0, extra)) for y in (x.k, x.v))
                visible = torch.nn.functional.pad(x.visible, (0, extra), value=not x.is_causal)
                if x.table is not None:
                    last = (x.table == x.n_k // block).any(-1)
                    visible[..., x.n_k :] = last.repeat_interleave(x.block_q, 2)[:, :, : x.n_q, None]
                yield x.output(k=k, v=v, visible=visible)

    def swapped():
        for k, v in ((x.own_k, x.own_v), (x.k, x.v)):
            order = lambda y: y.transpose(0, 1).reshape(y.shape)  # noqa: E731
            yield x.output(k=order(k).repeat_interleave(x.heads // k.shape[1], 1).nan_to_num(0),
                           v=order(v).repeat_interleave(x.heads // v.shape[1], 1).nan_to_num(0))  # fmt: skip
        yield x.output().transpose(0, 1).reshape(x.q.shape)

    def one_head():
        yield x.output(k=x.k[:, :1].expand_as(x.k), v=x.v[:, :1].expand_as(x.v))
        yield x.output(k=x.k[:1].expand_as(x.k), v=x.v[:1].expand_as(x.v))
        yield x.output(k=x.k[:1, :1].expand_as(x.k), v=x.v[:1, :1].expand_as(x.v))

    def untransposed():
        for k in (x.k, smooth) if x.n_k % x.head_dim == 0 else ():
            tiles = [x.q @ tile for tile in k.split(x.head_dim, 2)]
            yield x.output(scores=torch.cat(tiles, -1) * x.c)

    def first_scale():
        for block in blocks:
            for y, name in ((x.k, "k"), (x.v, "v")):
                scale = torch.stack([tile.abs().amax((2, 3)) for tile in y.split(block, 2)], -1)
                ratio = (scale[..., :1] / scale.clamp(min=1e-30)).repeat_interleave(block, -1)[..., : x.n_k, None]
                yield x.output(**{name: y * ratio})

    def overflow():
        def flipped(y, block):
            high = torch.cat([tile.amax((2, 3), keepdim=True).expand_as(tile) for tile in y.split(block, 2)], 2)
            low = torch.cat([tile.amin((2, 3), keepdim=True).expand_as(tile) for tile in y.split(block, 2)], 2)
            return torch.where((y >= 127.5 / 128 * high) & (high >= -low), -y, y)

        for block_q in BLOCKS if x.table is None else (x.block_q,):
            q = flipped(x.q, block_q)
            for block in blocks:
                v = flipped(x.v, block)
                for k in (x.k, smooth):
                    yield x.output(q=q, k=flipped(k, block), v=v)
                    yield x.output(q=q, k=flipped(k, block))
                yield x.output(v=v)

    def diagonal():
        for block in blocks if x.is_causal else ():
            first = torch.arange(x.n_q)[:, None] // block * block
            start = (first + x.n_k - x.n_q).clamp(min=0) // block * block
            yield from (x.output(visible=x.visible & (torch.arange(x.n_k) < end)) for end in (start, first + block))

    def cut_off():
        for way in (torch.trunc, torch.floor, lambda y: torch.trunc(y + 0.5)):
            for k in (x.k, smooth):
                scales = (y.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127 for y in (x.q, k))
                q, k = (way(y / scale) * scale for y, scale in zip((x.q, k), scales, strict=True))
                yield x.output(q=q, k=k)

    def dropped():
        yield x.output(visible=x.visible & (torch.arange(x.n_k) < x.n_q))
        for block in blocks:
            yield x.output(visible=x.visible & (torch.arange(x.n_k) < x.n_k // block * block))
            yield x.output(visible=x.visible & (torch.arange(x.n_k) < (-(-x.n_k // block) - 1) * block))
            if x.table is not None:
                yield x.online(block, drop=1)

    def causal(*offsets):
        return lambda: (x.output(visible=x.seen(offset=offset)) for offset in offsets if x.is_causal)

    def online(*powers, **keywords):
        return lambda: (x.online(block, *powers, **keywords) for block in blocks)

    yield "zero keys", RAGGED, with_zero_keys
    yield "off by one", OFF_BY_ONE, causal(x.n_k - x.n_q - 1, x.n_k - x.n_q + 1)
    yield "top left", TOP_LEFT, causal(0) if x.n_q != x.n_k else causal()
    yield "not causal", NOT_CAUSAL, causal(x.n_k)
    yield "diagonal", DIAGONAL, diagonal
    yield "no scale", NO_C, lambda: iter([x.output(c=1.0)])
    yield "scale twice", C_TWICE, lambda: iter([x.output(c=x.c**2)])
    yield "scores off by 1%", NEARLY, lambda: (x.output(c=x.c * factor) for factor in (127 / 128, 128 / 127))
    yield "base 2", BASE_2, lambda: iter([x.output(c=x.c * math.log(2))])
    yield "base e", BASE_E, lambda: iter([x.output(c=x.c * math.log2(math.e))])
    yield "last tile", LAST_TILE, dropped
    yield "cut off", CUT_OFF, cut_off
    yield "l not rescaled", L_RESCALE, online(0, 1)
    yield "O not rescaled", O_RESCALE, online(1, 0)
    yield "nothing rescaled", RESCALE, online(0, 0)
    yield "not divided", NOT_DIVIDED, lambda: iter([x.output(divide=False)])
    yield "heads", HEADS, swapped
    yield "one head", ONE_HEAD, one_head
    yield "K not transposed", TRANSPOSE, untransposed
    yield "scale of the first tile", FIRST_SCALE, first_scale
    yield "overflow", OVERFLOW, overflow
    yield "P^ wraps", P_RANGE, online(changed=lambda p, top: torch.where(p > top / 2, p - top * 256 / 255, p))
    yield "P^ cut off", TAIL, online(changed=lambda p, top: (127 * p / top).floor() * top / 127)
    yield "no s_P", FACTOR, online(changed=lambda p, top: 127 * p / top)
    yield "smoothed along the features", SMOOTH_AXIS, lambda: iter([x.output(k=x.k - x.k.mean(-1, keepdim=True))])
    if x.table is not None:
        yield from table_signs(x)


def table_signs(x: Oracle) -> Iterator[Sign]:
    """Yield likely mistakes with the look-up table."""
    table = x.table
    counts, width = (table >= 0).sum(-1, keepdim=True), torch.arange(table.shape[-1])

    def seen(*tables):
        return lambda: (x.output(visible=x.seen(table=other.expand_as(table))) for other in tables)

    everything = torch.arange(-(-x.n_k // x.block_kv)).expand(*table.shape[:3], -1)
    yield "all keys", ALL_KEYS, lambda: iter([x.output(visible=x.seen(table=everything))])
    yield "steps for blocks", STEPS, seen(torch.where(width < counts, width, -1))
    rows = torch.arange(1, table.shape[2] + 1)[:, None] * x.block_q + x.n_k - x.n_q
    if x.is_causal:
        yield "end at the diagonal", STEPS_END, seen(torch.where(width * x.block_kv < rows, table, -1))
    if x.block_q != x.block_kv:
        key, first = torch.arange(x.n_k), torch.where(table < 0, x.n_k, table * x.block_q)[..., None]
        rows = ((key >= first) & (key < first + x.block_kv)).any(-2).repeat_interleave(x.block_q, 2)[:, :, : x.n_q]
        yield "begins at block_q", BEGINS, lambda: iter([x.output(visible=x.seen(table=everything) & rows)])
    yield "one row", ONE_ROW, seen(table[:, :, :1])
    yield "one table", ONE_TABLE, seen(table[:, :1], table[:1], table.transpose(0, 1).reshape(table.shape))


ELSEWHERE = (
    "A program touches memory that belongs to no tensor. Do its length (Nq, Nk), heads (H, Hkv), program ids and "
    "strides belong to *this* tensor?"
)
OUTSIDE = ELSEWHERE + " Which rows of the last tile exist? Loads and stores both need a mask."
ENTRIES = (
    "A program reads beyond the table. A row has table.shape[3] entries, and ceil(Nq / block_q) rows belong to each "
    "(b, h). Is b = n // H and h = n % H in program n?"
)
JUMP = (
    "Triton's interpreter takes `break`, `continue` and `return` in a loop, but its compiler doesn't. Put the rest of "
    "the loop's body under an `if`."
)
CHANGED = "An argument was overwritten, which its caller still needs."
COPIED = (
    "A copy was made in PyTorch. Kernels get the arguments as they came, with their strides: no `contiguous()`, "
    "`repeat_interleave` or `float()`. K's mean may come from PyTorch, but it is subtracted in a kernel."
)
NO_LAUNCH = "No Triton kernel was launched. The kernel is the exercise."
FORM = "O has the shape and the dtype of q."
UNDEFINED = (
    "NaN or infinity became an integer, and C doesn't say which. Is there a 0 / 0? A block of zeros has scale 0. "
    "What a masked load without `other=` gives is undefined, too."
)
ZERO = (
    "O is 0 in most rows. All scores of a row can be far below 0: does m start at -inf, and stay there after a tile "
    "without keys? Then: is O stored at all?"
)
FACTOR = "All of O is too large, or too small, by one factor. By which scales do P^ and V^ become P~ and V again?"
NAN = (
    "NaN comes from rows of O that were never stored (is the grid large enough?), -inf minus -inf, 0 / 0, or a masked "
    "load without `other=`: what it gives is undefined, and 0 NaN is NaN."
)
P_RANGE = "P^ doesn't fit: P~ is at most 1 and int8 ends at 127, so P^ = round(127 P~)."
NO_INT8 = "No product of INT8 with INT8 was seen: quantise Q and K, and pass int8 tiles to tl.dot."
ROUNDS = (
    "Q and K are 0.4 steps of their scale here, beside one large feature. Rounded to INT8 they are 0, and O is the "
    "mean of V; yours isn't. Does a kernel round Q and K to integers, with s = max|X| / 127?"
)
GIVEN = "Rounding belongs to the exercise: a kernel turns Q and K into int8, not PyTorch."
CUT_OFF = "`.to(tl.int8)` cuts off: Q and K aren't rounded to nearest. Take tl.floor(x + 0.5) before. Is s max / 127?"
WIDE = (
    "Besides INT8, products may be of float16 operands, summed in float32, as `tl.dot` does without out_dtype. float32 "
    "operands are slower than both, and sums in 16 bit overflow."
)
RAGGED = "Keys that don't exist took part with the score 0. Give them the score -inf: loading them as 0 isn't enough."
OFF_BY_ONE = "The causal mask is off by one: query i sees key i + Nk - Nq itself, and none after it."
TOP_LEFT = "The causal mask starts at the top left. The last query sees the last key: key <= query + Nk - Nq."
NOT_CAUSAL = "With is_causal=True queries still see later keys."
DIAGONAL = (
    "The loop ends too early: the last query of tile i sees the keys up to (i + 1) BLOCK - 1 + Nk - Nq. All tiles that "
    "the diagonal crosses take part."
)
NO_C = "The scores lack c = 1 / sqrt(D)."
C_TWICE = "The scores are multiplied by c = 1 / sqrt(D) twice."
NEARLY = (
    "The scores are about 1% too large or too small, although no rounding changes them here. Is a scale max / 127 both "
    "on the way to integers and back?"
)
BASE_2 = "2^x is not e^x: exp2 needs scores that were multiplied by log2(e)."
BASE_E = "The scores were multiplied by log2(e), but e^x is taken. Take exp2, or leave the factor out."
LAST_TILE = "Keys at the end did not take part. The loop has ceil(Nk / BLOCK) tiles: rounded up, and of Nk, not of Nq."
L_RESCALE = "O is rescaled when the maximum rises, and l isn't. Both were summed with the old maximum."
O_RESCALE = "l is rescaled when the maximum rises, and O isn't. Both were summed with the old maximum."
RESCALE = "When a later tile raises the maximum, what happens to the l and the O that are already there?"
NOT_DIVIDED = "O is not divided by l at the end."
HEADS = "A head met the keys, or got the output, of another: batch and head change places somewhere."
ONE_HEAD = "All heads, or all sequences of the batch, read the keys of the first one."
TRANSPOSE = "S = Q K^T: a tile of K is multiplied without being transposed."
FIRST_SCALE = "All tiles of K, or of V, were given the scale of the first. Each has its own."
OVERFLOW = (
    "The largest numbers changed their sign: they were rounded to 128, which int8 doesn't have. The scale is max / 127."
)
SMOOTH_AXIS = "K was smoothed along the wrong axis. Subtract the mean over tokens: it changes a row of S by a constant."
GROUPS = "Query heads of one group are neighbours: head h reads key head h // (H / Hkv)."
ALL_KEYS = "All keys took part. Only the listed blocks do."
STEPS = "The first blocks took part, not the listed ones: a step of the loop is not the number of a block."
BEGINS = "Block j of the keys begins at key j * block_kv, as its blocks are block_kv long. block_q is for the queries."
STEPS_END = "The loop ends at the diagonal, but the place of a listed block in its row says nothing about its keys."
ONE_ROW = "All blocks of queries used the table's first row."
ONE_TABLE = "A head, or a sequence, used the table of another. The table has strides for batch and heads, too."


# --- inputs ---


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def between(generator: torch.Generator, low: int, high: int) -> int:
    """Draw an integer from [low, high)."""
    return int(torch.randint(low, high, (), generator=generator))


def inputs(
    generator: torch.Generator, n_q: int, n_k: int, d: int = 32, batch: int = 1, heads: int = 1, kv_heads: int = 0,
    ramp: float = 0.0, dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:  # fmt: skip
    """Draw Q, K, V. ramp: by how much the scores grow from the first key to the last, roughly.

    V has a part that all tokens share, so that a row of O is never small: a sum of weights that isn't 1 is then seen.
    """
    kv_heads = kv_heads or heads
    rising = torch.linspace(-0.5, 0.5, n_k)[:, None] * (ramp / math.sqrt(d))
    q = 1.2 * normal(generator, batch, heads, n_q, d) + (1 if ramp else 0)
    k = 1.2 * normal(generator, batch, kv_heads, n_k, d) + rising
    v = normal(generator, batch, kv_heads, n_k, d) + normal(generator, batch, kv_heads, 1, d)
    return {name: x.to(dtype) for name, x in (("q", q), ("k", k), ("v", v))}


def one_head(generator):
    yield Trial(inputs(generator, 192, 64, ramp=-6.0))
    yield Trial(inputs(generator, 64, 128, d=64, ramp=-9.0))


def many_tiles(generator):
    yield Trial(inputs(generator, 64, 256, ramp=9.0))
    x = inputs(generator, 64, 128)
    x["k"] *= 2 ** torch.linspace(-2, 1, 128).half()[:, None]
    x["v"] *= 2 ** torch.linspace(-2, 1, 128).half()[:, None]
    yield Trial(x)
    x = inputs(generator, 64, 64, d=128)
    x["q"] += 2
    x["k"] -= 5
    yield Trial(x, hint="All scores of a row can be far below 0: where does m start?")
    x = inputs(generator, 64, 128)
    yield Trial(x | {"q": 0.1 * x["q"], "v": 1000 + 100 * x["v"]}, hint=HALF)


HALF = "V is about 1,000 here, so its sums exceed 65,504, float16's largest number. Add up in float32."


def batch_and_heads(generator):
    yield Trial(inputs(generator, 64, 64, batch=2, heads=3))
    yield Trial(inputs(generator, 64, 64, batch=3, heads=2))


def ragged(generator):
    first, second, few, many = (between(generator, *ends) for ends in ((65, 96), (65, 96), (1, 16), (140, 160)))
    for n_q, n_k in ((first, second), (16, few), (1, many)):
        yield Trial(inputs(generator, n_q, n_k, heads=2))


def strides(generator):
    layouts = ("transposed", "columns", "sliced")
    first = between(generator, 0, 3)
    for number in range(3):
        names = (layouts[(first + number + place) % 3] for place in range(3))
        dtype = (torch.float16, torch.float32)[number % 2]
        x = inputs(generator, 64, 64, batch=2 if number else 1, heads=2, dtype=dtype)
        yield Trial(x, dict(zip("qkv", names, strict=True)))
    x = inputs(generator, 64, 64, batch=2, heads=2)
    x |= {name: x[name][:, :1].expand_as(x[name]).contiguous() for name in "kv"}
    yield Trial(x, {"k": "expanded", "v": "expanded"})


def causal(generator):
    n, more = between(generator, 50, 80), between(generator, 66, 80)
    for n_q, n_k in ((64, 64), (n, n + between(generator, 5, 40)), (1, n + more)):
        yield Trial(inputs(generator, n_q, n_k, heads=2) | {"is_causal": True})
    n += more
    yield Trial(inputs(generator, n, n - between(generator, 20, 40)) | {"is_causal": True}, hint=UNSEEN)


def signed(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw -1 and 1."""
    return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1


def beside_large(generator: torch.Generator, n_k: int = 64) -> Trial:
    """Return a trial in which Q and K round to 0, but for one large feature each that meets 0.

    Whatever shares a scale, it is that of the large feature, 508 / 127, and the others are 0.4 of it.
    """
    direction, values = signed(generator, 1, 1, 1, 32), signed(generator, 2, 1, 1, 1, 32)
    sign, large = torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1, -1]]).repeat(n_k // 4, 1).split(1, -1)
    x = {"q": 1.6 * direction.repeat(1, 1, 64, 1), "k": 1.6 * direction * sign, "v": 3 * torch.where(sign > 0, *values)}
    x["q"][..., 0], x["q"][..., 1], x["k"][..., 0], x["k"][..., 1:2] = 508, 0, 0, 508 * large
    return Trial({name: y.half() for name, y in x.items()}, rounded=1.5 * values.sum(0).expand_as(x["q"]))


def capstone(function: str, last: Callable[[torch.Generator], Trial], milestones: tuple[Milestone, ...]) -> Capstone:
    """Return milestones that end in one more trial each: it needs integers, so exact attention reaches none."""

    def with_last(trials):
        def drawn(generator):
            yield from trials(generator)
            yield last(generator)

        return drawn

    return Capstone(function, tuple(x._replace(trials=with_last(x.trials)) for x in milestones))


def truly_int8(generator):
    v = signed(generator, 1, 2, 64, 32)
    v[:, :, :, :16] = 1
    # A large number and many of 0.98 s in every row: cut off, these are 0. Products meet large ones with 0 alone.
    x = {name: 0.98 * signed(generator, 1, 1, 64, 32) for name in "qk"} | {"v": 3 * v[:, :1]}
    x["q"][..., 0], x["q"][..., 1], x["k"][..., 0] = 127, 0, 0
    x["k"][..., 1] = torch.tensor([127, -127]).repeat(32)
    yield Trial({name: y.half() for name, y in x.items()}, int8=True, hint=CUT_OFF)
    # Every row holds the largest number, so every rounding is exact, whatever shares a scale. P~ is 0 or 1.
    direction, sign = signed(generator, 1, 2, 1, 32), signed(generator, 1, 2, 64, 1)
    sign[:, :, 0], sign[:, :, 63] = -1, 1
    x = {"q": 2 * direction.expand(1, 2, 64, 32), "k": 2 * direction * sign, "v": 3 * v}
    yield Trial({name: y.half().contiguous() for name, y in x.items()}, bar=EXACT_BAR, int8=True)
    # One large and many small probabilities, which together weigh more: about 1.5 steps of P^ each.
    x = {"q": signed(generator, 1, 1, 64, 32), "k": 0.2 * normal(generator, 1, 1, 64, 32), "v": v[:, :1]}
    x["q"][..., 0], x["k"][..., 0] = 10, 0
    x["k"][..., ::32, 0] = 2.5
    yield Trial({name: y.half() for name, y in x.items()}, hint=TAIL, bar=TAIL_BAR)
    x = inputs(generator, 64, 64)
    x["v"] *= 2 ** torch.randint(-2, 3, (64, 1), generator=generator).half()
    yield Trial(x, int8=True, hint=TOKENS)
    x = inputs(generator, 64, 64)
    x["q"], x["k"] = torch.zeros_like(x["q"]), torch.zeros_like(x["k"])
    yield Trial(x, hint=ZEROS)
    # Of 16 keys one has a large score, one minus it and 14 have 0. 127 exp(-2.205) is 14, so P^ is exact, too.
    direction = signed(generator, 1, 1, 1, 32)
    x = {"q": 0.5 * direction.expand(1, 1, 64, 32), "k": torch.zeros(1, 1, 64, 32), "v": torch.zeros(1, 1, 64, 32)}
    x["k"][:, :, 3::16], x["k"][:, :, 10::16] = 0.78 * direction, -0.78 * direction
    x["v"][:, :, 3::16] = 3 * signed(generator, 32)
    yield Trial({name: y.half().contiguous() for name, y in x.items()}, hint=NEARLY, bar=EXACT_BAR)


EXACT = (
    "Every number is a multiple of its scale here and P~ is 0 or 1, so that no rounding changes anything. Is a scale "
    "max / 127, and the same on the way to integers and back?"
)
ZEROS = "Q and K are 0 here: their scale is 0, all scores are equal, and O is the mean of V. What is 0 / 0?"
TAIL = (
    "Many small probabilities weigh as much as a large one here. `.to(tl.int8)` cuts off: round P^ to nearest. Is the "
    "largest P~ of a tile as large as its scale says?"
)
TOKENS = "The rows of V differ in size. P V adds over keys, so a scale of V^ must be the same for all keys of a tile."


LAYOUT = (
    "All four strides of every tensor are its own, the last one included. O has strides, too, and the dtype of q: "
    "`torch.empty_like(q)` copies q's strides."
)


def shared_heads(generator):
    yield Trial(inputs(generator, 64, 64, batch=2, heads=4, kv_heads=2))
    yield Trial(inputs(generator, 64, 64, heads=3, kv_heads=1), {"k": "transposed", "v": "transposed"})


ATTENTION = capstone(
    "attention",
    beside_large,
    (
        Milestone("one head", 3, one_head,
            "S = c Q K^T, P = softmax(S), O = P V. Is s max|X| / 127, and there once? s_Q belongs to rows of S, s_K to "
            "columns. Is l a sum over keys? Is 0.7 rounded up?"),
        Milestone("tiles that raise the maximum", 4, many_tiles,
            "What does one step of the loop do to m, l and O? Has every tile its own scales?"),
        Milestone("batch and heads", 2, batch_and_heads,
            "Every (batch, head) has its program. Which offset does each tensor need?"),
        Milestone("ragged ends", 3, ragged, "The last tile is partial: which of its queries and keys exist?"),
        Milestone("any strides, any dtype", 3, strides, LAYOUT),
        Milestone("causal", 3, causal, "Query i sees the keys up to i + Nk - Nq."),
        Milestone("really INT8", 4, truly_int8, EXACT),
        Milestone("shared heads", 2, shared_heads, GROUPS),
    ),
)  # fmt: skip


# --- the sparse kernel ---


def listed_inputs(
    generator: torch.Generator, n_q: int, n_k: int, block_q: int, block_kv: int, *, width: int = 0, short: bool = False,
    hidden: bool = False, **keywords: Any,
) -> dict[str, Any]:  # fmt: skip
    """Draw Q, K, V and a table of `width` random blocks a row (0: all), in any order.

    short: rows end with -1 after a while, one at once. hidden: no row lists the first block, and it is NaN.
    """
    x = inputs(generator, n_q, n_k, **keywords)
    batch, heads = x["q"].shape[:2]
    rows, columns = -(-n_q // block_q), -(-n_k // block_kv)
    table = torch.rand(batch, heads, rows, columns - hidden, generator=generator).argsort(-1).int() + hidden
    table = table[..., : width or columns].contiguous()
    if hidden:
        x["k"][:, :, :block_kv] = x["v"][:, :, :block_kv] = torch.nan
    if short:
        counts = torch.randint(1, table.shape[-1] + 1, table.shape[:3], generator=generator)
        counts[..., between(generator, 0, rows)] = 0
        table = torch.where(torch.arange(table.shape[-1]) < counts[..., None], table, -1)
    return x | {"table": table, "block_q": block_q, "block_kv": block_kv}


def all_listed(generator):
    yield Trial(listed_inputs(generator, 64, 64, 64, 32))
    x = listed_inputs(generator, 64, 128, 32, 32, d=64, ramp=6.0)
    yield Trial(x | {"table": x["table"].sort().values})
    x = listed_inputs(generator, 64, 128, 32, 32)
    yield Trial(x | {"q": 0.1 * x["q"], "v": 1000 + 100 * x["v"]}, hint=HALF)


def some_listed(generator):
    yield Trial(listed_inputs(generator, 128, 128, 32, 16, width=3))
    yield Trial(listed_inputs(generator, 64, 128, 32, 32, width=2, hidden=True), hint=UNLISTED)


def tables(generator):
    yield Trial(listed_inputs(generator, 64, 64, 32, 16, width=2, batch=2, heads=3))
    x = listed_inputs(generator, 64, 64, 32, 16, width=3, batch=2, heads=2)
    yield Trial(x, {"table": "sliced"}, TABLE)
    yield Trial(x, {"table": "columns"}, TABLE)


def short_rows(generator):
    yield Trial(listed_inputs(generator, 96, 96, 32, 16, width=4, short=True), hint=SHORT)
    yield Trial(listed_inputs(generator, 64, 64, 16, 32, short=True, heads=2), hint=SHORT)


def ragged_blocks(generator):
    n = between(generator, 1, 7)
    x = listed_inputs(generator, 64 + n, 48 + n, 32, 16, width=3, heads=2)
    missing = (x["table"] != 3).all(-1)
    x["table"][..., 0] = torch.where(missing, 3, x["table"][..., 0])  # the partial block, wherever it stands
    yield Trial(x)
    yield Trial(listed_inputs(generator, n, 16 + n, 64, 32))


def sparse_strides(generator):
    for number, names in enumerate((("transposed", "columns", "sliced"), ("sliced", "transposed", "columns"))):
        x = listed_inputs(generator, 64, 64, 32, 32, width=1 + number, batch=2, heads=2,
                          dtype=(torch.float16, torch.float32)[number])  # fmt: skip
        yield Trial(x, dict(zip("qkv", names, strict=True)) | {"table": "sliced"})


def sparse_causal(generator):
    n = between(generator, 50, 64)
    for n_q, n_k in ((64, 64), (n, n + 16)):
        x = listed_inputs(generator, n_q, n_k, 16, 16, width=3, heads=2)
        x["table"][..., 0] = torch.where((x["table"] != 0).all(-1), 0, x["table"][..., 0])
        yield Trial(x | {"is_causal": True})
    x = listed_inputs(generator, 48, 48, 16, 16, d=128)
    x["q"], x["k"], x["table"] = x["q"] + 2, x["k"] - 5, x["table"].sort(descending=True).values  # first the future
    yield Trial(x | {"is_causal": True}, hint=ZERO)
    yield Trial(listed_inputs(generator, 64, 64, 16, 16, width=2) | {"is_causal": True}, hint=UNSEEN)


def sparse_int8(generator):
    for trial in truly_int8(generator):
        n_k = trial.arguments["k"].shape[2]
        table = torch.arange(n_k // 32).flip(0).int().expand(1, trial.arguments["q"].shape[1], 2, -1)
        yield trial._replace(arguments=trial.arguments | {"table": table.contiguous(), "block_q": 32, "block_kv": 32})


def beside_large_and_listed(generator: torch.Generator) -> Trial:
    """Return such a trial with three blocks of keys, of which one is not listed and NaN."""
    trial, hidden = beside_large(generator, n_k=96), between(generator, 0, 3)
    for name in "kv":
        trial.arguments[name][:, :, 32 * hidden : 32 * hidden + 32] = torch.nan
    blocks = torch.tensor([j for j in (2, 0, 1) if j != hidden]).int()
    facts = {"table": blocks.expand(1, 1, 2, 2).contiguous(), "block_q": 32, "block_kv": 32}
    return trial._replace(arguments=trial.arguments | facts, hint=UNLISTED)


UNLISTED = (
    "A block that no row lists holds NaN here. Kernels don't read it, not even for a scale or a mean, nor to mask it."
)
TABLE = "The table is a part of a larger one here: all four of its strides count."
SHORT = "From the first -1 on, a row lists nothing. A row that lists nothing at all has O = 0. What is 0 / 0?"
UNSEEN = (
    "Some queries see no key here, and their O is 0. What are 0 / 0 and -inf minus -inf? A large negative number "
    "instead of -inf gives the mean of V."
)

SPARSE = capstone(
    "sparse_attention",
    beside_large_and_listed,
    (
        Milestone("one head, every block listed", 2, all_listed,
            "With all blocks in a row this is attention. Check m, l and O in one step of the loop."),
        Milestone("listed blocks alone", 4, some_listed, "A step of the loop reads its block's number from the table."),
        Milestone("a table for each head", 4, tables, "Row (b, h, i) of the table belongs to block i of Q[b, h]."),
        Milestone("short and empty rows", 3, short_rows, SHORT),
        Milestone("ragged ends", 3, ragged_blocks,
            "The last block may be partial, wherever it is listed: which keys and queries exist?"),
        Milestone("any strides, any dtype", 3, sparse_strides, LAYOUT),
        Milestone("causal", 3, sparse_causal, "Query i sees the listed keys up to i + Nk - Nq."),
        Milestone("really INT8", 3, sparse_int8, EXACT),
    ),
)  # fmt: skip
