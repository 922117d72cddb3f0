"""Notebook 00: eight bits, scores on integers, and the mean key."""

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draw, watched


def to_int8(x, dim):
    scale = x.abs().amax(dim, keepdim=True) / 127
    divisor = torch.where(scale > 0, scale, 1.0)
    integers = torch.round(x / divisor).to(torch.int8)
    return scale, integers


def integer_product(a, b):
    return a.int() @ b.int()  # 8-bit factors, 32-bit sums


def int8_scores(q, k):
    s_q, q_hat = to_int8(q, (-2, -1))
    s_k, k_hat = to_int8(k, (-2, -1))
    return integer_product(q_hat, k_hat.mT) * s_q * s_k / q.shape[-1] ** 0.5


def without_mean_key(k):
    return k - k.mean(dim=-2, keepdim=True)


def _tensors() -> list[tuple]:
    return [
        *[(draw(0, 4, 6), -1), (-draw(1, 3, 5).abs(), 0), (draw(2, 2, 3, 4), (-2, -1))],
        *[(1e-7 * draw(3, 4, 6), -1), (1e-15 * draw(3, 4, 6), 0)],
        (draw(4, 4, 6) * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), -1),  # a row of 0
    ]


GAPS = {
    "to_int8": Gap(to_int8, _tensors, (
        Mistake("x / divisor", "x / scale", "Where all is zero, the scale is 0, and 0/0 is NaN: divide by `divisor`."),
        Mistake("x / divisor", "x / (scale + 1e-8)",
                "That changes small numbers: a gradient may be smaller than 1e-8. Divide by `divisor`."),
        Mistake("x / divisor", "x / (scale + 1e-12)",
                "That changes small numbers: a gradient may be as small as that. Divide by `divisor`."),
        Mistake("x / divisor", "x / scale.clamp(min=1e-3)",
                "A scale may be smaller than that, and then integers are lost. Divide by `divisor`."),
        Mistake(".to(torch.int8)", ".to(torch.int8) * scale",
                "That is X again, rounded: return the integers alone, without their scale."),
        Mistake("x.abs().amax(dim, keepdim=True) / 127", "127 / x.abs().amax(dim, keepdim=True)",
                "That is 1 / s. The scale is one integer step: the largest magnitude divided by 127."),
        Mistake("x.abs().amax(dim, keepdim=True) / 127", "127 / x.abs().amax(dim, keepdim=True)",
                "That is 1 / s. The scale is the size of one integer step: s times the integers is X again.",
                (("x / divisor", "x * scale"),)),
        Mistake("x.abs().amax(dim, keepdim=True) / 127", "x.abs().amax(dim, keepdim=True) / 127.5",
                "The largest magnitude becomes 127, not 127.5."),
        Mistake("x.abs()", "x",
                "The largest entry is not the largest magnitude: large negative entries count, too. Take `x.abs()`."),
        Mistake("x.abs().amax(dim, keepdim=True)", "x.max()",
                "That is the largest entry of all. A scale needs the largest magnitude, `x.abs()`, *along dim*."),
        Mistake("x.abs().amax(dim, keepdim=True)", "max(abs(x))",
                "Python's `max` compares rows. `x.abs().amax(dim, keepdim=True)` compares all entries along dim."),
        Mistake("x.abs().amax(dim, keepdim=True) / 127",
                "(x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / 255",
                "Here 0 stays 0, and the integers go from -127 to 127: the largest magnitude divided by 127."),
        Mistake("x.abs().amax(dim, keepdim=True)", "x.abs().max()",
                "That is one scale for everything. There is one for all entries *along dim*."),
    ), watched, right=(
        ("x.abs().amax(dim, keepdim=True) / 127",
         "torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True)) / 127"),
        ("x / divisor", "x.double() / divisor"),
    )),
    "int8_scores": Gap(int8_scores,
        lambda: [(draw(3, 5, 16), 4 * draw(4, 7, 16)), (draw(5, 1, 2, 6, 4), draw(6, 1, 2, 6, 4))], (
        Mistake(" * s_q * s_k", "", "The integers stand for numbers s times as large: both scales must come back in."),
        Mistake(" * s_q * s_k", " / (s_q * s_k)", "Multiply by the scales: numbers are integers times their scale."),
        Mistake("to_int8(k, (-2, -1))", "to_int8(k, -1)",
                "That is a scale for each key. All of K has one: `(-2, -1)`, as for Q."),
        Mistake("k_hat.mT", "k_hat.T", "`.T` reverses all dimensions, also those of batch and heads: use `.mT`."),
        Mistake("q.shape[-1] ** 0.5", "q.shape[-2] ** 0.5", "D is the number of channels, the last dimension."),
        Mistake("integer_product(q_hat, k_hat.mT)", "(q_hat.float() @ k_hat.float().mT)",
                "You multiplied floats. `integer_product` multiplies the integers `q_hat` and `k_hat`."),
        Mistake("integer_product(q_hat, k_hat.mT)", "(q_hat @ k_hat.mT)",
                "The sums of 8-bit products overflow in 8 bits: use `integer_product`."),
    ), watched, right=(
        ("* s_q * s_k / q.shape[-1] ** 0.5", "* (s_q * s_k / q.shape[-1] ** 0.5)"),
        ("* s_q * s_k", "* s_q.double() * s_k"),
    )),
    "without_mean_key": Gap(without_mean_key, lambda: [(3 + draw(7, 2, 1, 5, 4),)], (
        Mistake("dim=-2", "dim=-1", "The mean runs over tokens: it is a key, [.., 1, D]."),
        Mistake("dim=-2", "dim=1", "The second dimension is the head. Tokens are the last but one."),
        Mistake("k - k.mean", "k.mean", "That is the mean key. Subtract it from every key."),
        Mistake("dim=-2", "dim=(0, 1, 2)", "Every batch entry and head has its own mean key: over tokens only."),
        Mistake("dim=-2, keepdim=True", "dim=0", "The first dimension is the batch. Tokens are the last but one."),
    ), right=(
        ("k.mean(dim=-2, keepdim=True)", "k.sum(-2, keepdim=True) / k.shape[-2]"),
        ("k.mean(", "k.double().mean("),
    )),
}  # fmt: skip
