"""Notebook 00: eight bits, scores on integers, and the mean key."""

import torch

from sage_course.check import Gap, Mistake
from sage_course.lessons import draw


def to_int8(x, dim):
    scale = x.abs().amax(dim, keepdim=True) / 127
    integers = torch.round(x / scale).to(torch.int8)
    return scale, integers


def integer_product(a, b):
    return a.int() @ b.int()  # 8-bit factors, 32-bit sums


def int8_scores(q, k):
    s_q, q_hat = to_int8(q, (-2, -1))
    s_k, k_hat = to_int8(k, (-2, -1))
    return integer_product(q_hat, k_hat.mT) * s_q * s_k / q.shape[-1] ** 0.5


def without_mean_key(k):
    return k - k.mean(dim=-2, keepdim=True)


GAPS = {
    "to_int8": Gap(to_int8, lambda: [(draw(0, 4, 6), -1), (-draw(1, 3, 5).abs(), 0), (draw(2, 2, 3, 4), (-2, -1))], (
        Mistake("x.abs().amax", "x.amax", "The largest magnitude may belong to a negative number."),
        Mistake("torch.round(x / scale)", "(x / scale)", "Round first: a cast cuts off."),
        Mistake(" / 127", "", "The scale is one step: the largest magnitude over 127."),
        Mistake("x / scale", "x * scale", "X^ = round(X / s)."),
        Mistake(".to(torch.int8)", "", "Rounded, but still floats: `.to(torch.int8)`."),
        Mistake(".to(torch.int8)", ".to(torch.int32)", "They fit into 8 bits: `.to(torch.int8)`."),
        Mistake("""x.abs().amax(dim, keepdim=True) / 127
    integers = torch.round(x / scale)""",
                """127 / x.abs().amax(dim, keepdim=True)
    integers = torch.round(x * scale)""",
                "That is 1 / s. The scale is the size of one step: multiplied by it, the integers are X again."),
        Mistake("x.abs().amax(dim, keepdim=True) / 127", "x.abs().amax(dim, keepdim=True) / 127.5", "127, not 127.5."),
    )),
    "int8_scores": Gap(int8_scores,
        lambda: [(draw(3, 5, 16), 4 * draw(4, 7, 16)), (draw(5, 1, 2, 6, 4), draw(6, 1, 2, 6, 4))], (
        Mistake(" / q.shape[-1] ** 0.5", "", "S = Q K^T / sqrt(D)."),
        Mistake(" * s_q * s_k", "", "The scales come back in: the integers stand for s times as much."),
        Mistake(" * s_k", "", "The scale of K is missing."),
        Mistake("integer_product(q_hat, k_hat.mT)", "(q_hat @ k_hat.mT)",
                "The sums of 8-bit products overflow in 8 bits: use `integer_product`."),
        Mistake("integer_product(q_hat, k_hat.mT) * s_q * s_k", "q @ k.mT",
                "Those are the exact scores: nothing is rounded."),
        Mistake("q.shape[-1] ** 0.5", "q.shape[-1]", "Divide by the square root of D."),
    )),
    "without_mean_key": Gap(without_mean_key, lambda: [(3 + draw(7, 2, 1, 5, 4),)], (
        Mistake("dim=-2", "dim=-1", "The mean runs over tokens: it is a key, [.., 1, D]."),
        Mistake(".mean(dim=-2, keepdim=True)", ".mean()", "Every channel has its own mean."),
        Mistake("k - k.mean", "k + k.mean", "Subtract it."),
        Mistake("k - k.mean", "k.mean", "That is the mean key. Subtract it from every key."),
        Mistake(", keepdim=True", "", "Keep the dimension of the tokens, so that every head gets its own mean."),
        Mistake("dim=-2", "dim=(0, 1, 2)", "Every batch entry and head has its own mean key: over tokens only."),
        Mistake("dim=-2, keepdim=True", "dim=0", "The first dimension is the batch. Tokens are the last but one."),
    )),
}  # fmt: skip
