"""Widgets of the notebooks. Each takes functions that the reader wrote, and its figure shows what they compute."""

from collections.abc import Callable, Mapping, Sequence

import torch
from sage_lab.records import Row
from torch import Tensor

from sage_course.figures.live import Board, Live, live
from sage_course.figures.style import BLACK, BLUE, GREEN, ORANGE, RED, SKY, panels, show_matrix
from sage_course.results.hopper_model import UNIT_NAMES, unit_clocks
from sage_course.teaching import letter_inputs
from sage_ref.quantization import fake_quantize
from sage_ref.tracing import relative_l2


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sentence(int8_scores: Callable) -> Live:
    """Notebook 00: any sentence, its attention, the same from the reader's INT8 scores, and the difference."""

    def draw(text="banana bandana"):
        q, k, _, _ = (x[0, 0] for x in letter_inputs(text or " "))
        exact = torch.softmax(q @ k.mT / 8, -1)
        int8 = torch.softmax(int8_scores(q, k), -1)
        height = max(3.0, 0.16 * len(text))  # so that letters do not lie on one another
        title = f"relative error of P: {relative_l2(int8, exact):.3f}"
        figure, axes = panels(3, width=1.2 * height, height=height, title=title)
        for ax, (name, p) in zip(
            axes, {"exact": exact, "INT8": int8, "INT8 - exact": int8 - exact}.items(), strict=True
        ):
            show_matrix(ax, p, title=name, x="key", y="query")
            ax.set_xticks(range(len(text)), text, fontsize=9)
            ax.set_yticks(range(len(text)), text, fontsize=9)
        return figure

    return live(draw, text=str)


def one_score(through_the_softmax: Callable) -> Live:
    """Notebook 01: a row of six scores, one of which moves; P, O, delta and the reader's dS follow."""
    scores, value, grad_output = draws(0, 1, 6), draws(1, 6), 1.0

    def draw(score=0):
        s = scores.clone()
        s[0, 2] = score
        p = torch.softmax(s, -1)
        dp = grad_output * value[None]
        ds = through_the_softmax(p, dp)
        figure, axes = panels(3, title=f"O = {(p @ value).item():.2f}, delta = {(p * dp).sum().item():.2f}")
        for ax, (name, row), color in zip(axes, {"S": s, "P": p, "dS": ds}.items(), (BLACK, BLUE, ORANGE), strict=True):
            ax.bar(range(6), row[0].tolist(), color=color)
            ax.set(title=name, xlabel="key", xticks=range(6))
        axes[0].set_ylim(-6.5, 6.5)
        axes[1].set_ylim(0, 1)
        return figure

    return live(draw, score=range(-6, 7))


def quantizer_bench(psi_of_blocks: Callable) -> Live:
    """Notebook 02: the reader's quantiser on a matrix of some distribution, with an outlier, by block size."""
    matrices = {"normal": draws(0, 256, 64), "uniform": torch.rand(256, 64, generator=torch.Generator().manual_seed(0))}
    matrices["heavy tails"] = draws(0, 256, 64) / draws(1, 256, 64).abs().clamp(min=0.1)

    def draw(outlier=1, log2_block=4, distribution="normal"):
        x = matrices[distribution].clone()
        x[0, 0] = outlier * x.abs().max()
        blocks, errors = [2**i for i in range(9)], []
        for block in blocks:
            s, x_hat = psi_of_blocks(x, block)
            errors.append(relative_l2(s.repeat_interleave(block)[:, None] * x_hat, x))
        _, x_hat = psi_of_blocks(x, 2**log2_block)
        figure, axes = panels(2, width=4.2, title=f"error with blocks of {2**log2_block}: {errors[log2_block]:.4f}")
        axes[0].hist(x_hat.flatten().float().numpy(), bins=range(-128, 129, 4), color=SKY)
        axes[0].set(xlabel="integer", ylabel="entries", yscale="log")
        axes[1].loglog(blocks, errors, "o-", color=BLACK)
        axes[1].plot(2**log2_block, errors[log2_block], "o", color=RED, markersize=10)
        axes[1].set_xscale("log", base=2)
        axes[1].set(xlabel="tokens in a block", ylabel="relative error")
        return figure

    return live(draw, outlier=range(1, 21), log2_block=range(9), distribution=list(matrices))


def shared_offset(smooth_key: Callable) -> Live:
    """Notebook 03: all keys share an offset in one channel; the reader removes it by hand, or by `smooth_key`."""
    q, keys = draws(0, 64, 16), draws(1, 64, 16)

    def draw(offset=8, channel=3, removed=0):
        k, guess = keys.clone(), torch.zeros(16)
        k[:, channel] += offset
        guess[channel] = removed
        exact = q @ k.mT
        changed = {"as it is": torch.zeros(16), "by hand": guess, "smooth_key": k - smooth_key(k)[0]}
        errors = {
            name: relative_l2(fake_quantize(q) @ fake_quantize(k - shift).mT + q @ (0 * k + shift).mT, exact)
            for name, shift in changed.items()
        }
        title = "error of S: " + ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
        figure, axes = panels(2, width=4.2, title=title)
        show_matrix(axes[0], k - guess, title="keys after your change", x="channel", y="key")
        axes[0].set_xticks(range(0, 16, 3))
        axes[1].bar(list(errors), list(errors.values()), color=[RED, ORANGE, GREEN])
        axes[1].set(ylabel="relative error of S in INT8")
        return figure

    return live(draw, removed=range(-4, 13), offset=range(17), channel=range(16))


def tile_loop(forward_tile: Callable) -> Live:
    """Notebook 04: the reader's loop over tiles of keys, one step at a time, from an m that may be edited."""
    scores, values = 2 * draws(0, 4, 32), draws(1, 32, 8)
    v_hat = torch.round(values / (values.abs().max() / 127)).to(torch.int8)
    s_v = (values.abs().max() / 127)[None, None]

    def draw(turn=1, m_at_start="-inf"):
        m = torch.full((4, 1), float(m_at_start))
        l, o = torch.zeros(4, 1), torch.zeros(4, 8)
        for j in range(turn):
            s_ij, v_j = scores[:, 4 * j : 4 * j + 4], v_hat[4 * j : 4 * j + 4]
            m, l, o = forward_tile(s_ij, s_v, v_j, m, l, o)
        seen = scores[:, : 4 * turn]
        exact = torch.softmax(seen, -1) @ values[: 4 * turn]
        error = relative_l2(o / l, exact)
        figure, axes = panels(3, title=f"after {turn} of 8 tiles: O / l is off by {error:.3f}")
        for ax, (name, x) in zip(axes, {"m": m, "l": l}.items(), strict=False):
            ax.bar(range(4), x[:, 0].tolist(), color=BLUE)
            ax.set(title=name, xlabel="query")
        show_matrix(axes[2], o / l, title="O / l", x="feature", y="query")
        return figure

    return live(draw, turn=range(1, 9), m_at_start=["-inf", "0", "4", "100"])


def switchboard(errors: Callable[..., Mapping[str, float]], matmuls: Sequence[str]) -> Live:
    """Notebook 05b: each of the seven matmuls in INT8 or in 16 bit, and the errors of what they lead to.

    errors: takes exact_matmuls, a tuple of names, and gives the relative error by result.
    """

    def draw(**in_int8):
        exact = tuple(name for name in matmuls if not in_int8[name])
        found = errors(exact_matmuls=exact)
        figure, (ax,) = panels(1, width=6.0, title=f"{len(matmuls) - len(exact)} of {len(matmuls)} matmuls in INT8")
        bars = ax.bar(list(found), list(found.values()), color=BLUE)
        ax.bar_label(bars, [f"{x:.3f}" for x in found.values()], fontsize=9)
        ax.set(ylabel="relative error", ylim=(0, 1.1 * max(found.values()) or 1))
        return figure

    return Live(draw, dict.fromkeys(matmuls, bool), start={name: name != "dP" for name in matmuls})


def seeds_one_by_one(values: Tensor, gap: float, resampled_means: Callable, interval: Callable) -> Live:
    """Notebook 06b: the first seeds alone; would you sign the claim? The reader's interval, as seeds are added."""

    def draw(seeds=2):
        chosen = values[:seeds]
        choices = torch.randint(seeds, (4000, seeds), generator=torch.Generator().manual_seed(0))
        low, high = interval(resampled_means(chosen, choices)).tolist()
        figure, (ax,) = panels(
            1, width=6.0, title=f"{seeds} seeds: mean {chosen.mean():+.2f}%, {low:+.2f} to {high:+.2f}%"
        )
        ax.plot(chosen.tolist(), range(1, seeds + 1), "o", color=BLACK)
        ax.axvspan(low, high, color=SKY, alpha=0.4, label="95% interval")
        ax.axvline(gap, color=RED, label="the paper's gap")
        ax.set(xlabel="SageBwd's loss minus exact attention's, %", ylabel="seed", yticks=range(len(values) + 2))
        ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    return live(draw, seeds=range(2, len(values) + 1))


def instruction_prices(programs: Mapping[int, Sequence[Row]]) -> Live:
    """Notebook 08: what the model says if a level had more or fewer instructions of two kinds.

    programs: the counted rows of each level's programs, as `unit_clocks` takes them.
    """

    def draw(level=4, arithmetic=100, exponentials=100):
        share = {"arithmetic": arithmetic / 100, "exp2": exponentials / 100}
        rows = [row | {"per_score": row["per_score"] * share.get(row["kind"], 1)} for row in programs[level]]
        now, before = unit_clocks(rows), unit_clocks(programs[level])
        title = f"level {level}: {now['sum']:.4f} clocks a score, {now['sum'] / before['sum'] - 1:+.0%}"
        figure, (ax,) = panels(1, width=6.5, title=title)
        places = torch.arange(len(UNIT_NAMES))
        for shift, name, clocks, color in ((-0.2, "as it is", before, SKY), (0.2, "changed", now, BLUE)):
            ax.barh(places + shift, [clocks[u] for u in UNIT_NAMES], 0.4, color=color, label=name)
        ax.set_yticks(places, list(UNIT_NAMES.values()), fontsize=9)
        ax.set(xlabel="clocks for a score")
        ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    return live(draw, level=list(programs), arithmetic=range(0, 201, 10), exponentials=range(0, 201, 10))


def paint_blocks(sparse_linear_head: Callable, block_q: int, block_kv: int) -> Live:
    """Notebook 10: blocks painted by hand, the mass that they hold as alpha, and the error of the reader's mix."""
    rows = columns = 4
    q, k, v = (
        draws(seed, n, 8).double() for seed, n in enumerate((rows * block_q, columns * block_kv, columns * block_kv))
    )
    q, c = 3 * q, 8**-0.5
    p = torch.softmax(c * q @ k.mT, -1)
    held = p.unflatten(0, (rows, -1)).unflatten(2, (columns, -1)).sum(3).mean(1)  # [rows, columns]

    def draw(mask=tuple(tuple(i == j for j in range(columns)) for i in range(rows))):
        chosen = torch.tensor(mask)
        chosen[~chosen.any(1), 0] = True  # a row without a block would have no softmax,
        chosen[chosen.all(1), -1] = False  # and one with all of them no linear branch
        alpha = (held * chosen).sum(1)
        error = relative_l2(sparse_linear_head(q, k, v, chosen, alpha, c), p @ v)
        figure, axes = panels(2, width=4.0, title=f"{chosen.float().mean():.0%} of the blocks; error {error:.3f}")
        show_matrix(axes[0], held, title="mass of each block; red: selected", x="block of keys", y="block of queries")
        axes[0].plot(*chosen.nonzero().flip(1).T.tolist(), "s", color=RED, markersize=9)
        axes[1].bar(range(rows), alpha.tolist(), color=BLUE)
        axes[1].set(xlabel="block of queries", ylabel="alpha", ylim=(0, 1))
        return figure

    return live(draw, mask=Board)


def lists_and_bytes(bytes_read: Callable, block_q: int = 128, block_kv: int = 64, d: int = 128) -> Live:
    """Notebook 12: a mask painted by hand, its look-up lists, and the bytes by the reader's count."""
    size = 6

    def draw(mask=tuple(tuple(j in (i, i // 2) for j in range(size)) for i in range(size))):
        lists = [[j for j, on in enumerate(row) if on] for row in mask]
        counts = [bytes_read(len(row), size - len(row), block_q, block_kv, d) for row in lists]
        total = [sum(of) / 1024 for of in zip(*counts, strict=True)]
        figure, axes = panels(2, width=4.2, title="What the kernel reads")
        axes[0].set(
            title="look-up lists", xlim=(-1, size), ylim=(size - 0.5, -0.5), xlabel="place", ylabel="block of queries"
        )
        for i, row in enumerate(lists):
            for place, j in enumerate(row):
                axes[0].text(place, i, str(j), ha="center", va="center", fontsize=9)
        axes[1].bar(["dense", "as printed", "by list"], total, color=[BLACK, ORANGE, BLUE])
        axes[1].set(ylabel="KiB of a head")
        return figure

    return live(draw, mask=Board)


def row_sums_of(forms: Mapping[str, Callable], forward: Callable, inputs: Callable, c: float) -> Live:
    """Notebook 12c: the row sums of P when S is rounded and L is not, or both are, as scores grow.

    forms: the reader's functions by name, each (q, k, log_sum_exp, c) -> P. forward: (q, k, v) -> (O, L).
    """

    def draw(size=3):
        q, k, v, _ = inputs(size)
        _, log_sum_exp = forward(q, k, v)
        figure, axes = panels(len(forms), width=4.0, sharey=True, title=f"queries and keys of size {size}")
        for ax, (name, form) in zip(axes, forms.items(), strict=True):
            sums = form(q, k, log_sum_exp[..., None], c).sum(-1).flatten()
            ax.plot(sums.tolist(), ".", color=BLUE)
            ax.axhline(1, color=BLACK)
            ax.set(title=f"{name}: {sums.min():.2f} to {sums.max():.2f}", xlabel="query", ylabel="row sum of P")
        return figure

    return live(draw, size=range(1, 9))


def dither_bench(thresholds: Callable) -> Live:
    """Notebook 14: many roundings of one number averaged, to nearest and by the reader's thresholds."""

    def draw(hundredths=30, log2_entries=3):
        number, side = hundredths / 100, 2**log2_entries
        found = {
            "nearest": torch.full((side, side), float(round(number))),
            "ordered": torch.floor(number + thresholds(side, side)),
        }
        means = {name: (x.float().mean() - number).item() for name, x in found.items()}
        title = f"{side * side} entries of {number:.2f} steps: " + ", ".join(f"{n} {m:+.3f}" for n, m in means.items())
        figure, axes = panels(2, width=4.0, title=title)
        for ax, (name, x) in zip(axes, found.items(), strict=True):
            show_matrix(ax, x, title=f"{name}: mean {x.float().mean():.3f}", x="key", y="query", limit=1)
        return figure

    return live(draw, hundredths=range(0, 101, 5), log2_entries=range(7))
