"""Notebook 03c: the error of INT8 scores, RMS normalisation, the bound it gives, and the gradient through it."""

import math

import torch

from sage_course.gaps import Gap, Mistake
from sage_course.lessons import draw

HEAD_DIM = 16


def std_of_score_error(s_q, rms_q, s_k, rms_k):
    return math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)


def rms_norm(x, gain):
    return x * gain / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def bound_on_scores(gain_q, gain_k):
    return math.sqrt(len(gain_q)) * (gain_q * gain_k).abs().max().item()


def grad_through_norm(dy, x, gain):
    r = x.square().mean(-1, keepdim=True).sqrt()
    x_hat, dx_hat = x / r, gain * dy
    return (dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r


def _tokens() -> list[tuple]:
    gain = 1 + 0.3 * draw(0, HEAD_DIM)
    return [(3 * draw(1, 5, HEAD_DIM) + 2, gain), (1e-3 * draw(2, 2, 5, HEAD_DIM), gain)]


def _gains() -> list[tuple]:
    gain_q, gain_k = 1 + 0.3 * draw(3, HEAD_DIM), 1 + 0.3 * draw(4, HEAD_DIM)
    gain_q[3], gain_q[7], gain_k[7], gain_k[9] = -3.0, -2.0, 4.0, 5.0
    return [(gain_q, gain_k)]


GAPS = {
    "std_of_score_error": Gap(std_of_score_error, lambda: [(0.03, 1.3, 0.02, 2.1), (0.3, 10.0, 0.4, 5.0)], (
        Mistake(" / 12", "", "A rounding error with the scale s has the variance s^2 / 12."),
        Mistake(" / 12)", ") / 12", "The 12 belongs under the root: the variance is s^2 / 12."),
        Mistake("(s_q * rms_k) ** 2 + (s_k * rms_q) ** 2", "s_q ** 2 * rms_k + s_k ** 2 * rms_q",
                "A factor k multiplies the variance of an error by k^2: square the RMS, too."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "(s_q * rms_k + s_k * rms_q) / math.sqrt(12)",
                "The errors are independent, so their variances add, and not the errors themselves."),
        Mistake("(s_q * rms_k) ** 2 + (s_k * rms_q) ** 2", "s_q * rms_k + s_k * rms_q",
                "Variances are squares: an error with the scale s, times k, has the variance (s k)^2 / 12."),
        Mistake("(s_q * rms_k) ** 2 + (s_k * rms_q) ** 2", "(s_q * rms_q) ** 2 + (s_k * rms_k) ** 2",
                "The rounding error of Q is multiplied by K, and that of K by Q."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "(s_q * rms_q + s_k * rms_k) / math.sqrt(12)",
                "The error of Q is multiplied by K, and that of K by Q. Then their variances add, not the errors."),
        Mistake("(s_q * rms_k) ** 2 + (s_k * rms_q) ** 2", "(s_q / rms_q) ** 2 + (s_k / rms_k) ** 2",
                "These are relative errors. In a score, the error of Q is multiplied by K, and that of K by Q."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "rms_q * rms_k * math.sqrt((s_q ** 2 + s_k ** 2) / 12)",
                "Each error is multiplied by the other factor alone: that of Q by K, and that of K by Q."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12) / 8",
                "There are D terms, and the variance has the factor c^2: c^2 D = 1, so neither is left."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "8 * math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
                "There are D terms, and the variance has the factor c^2: c^2 D = 1, so neither is left."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)", "s_q * s_k / 12",
                "That is the product of the two errors. Each error is multiplied by the other factor itself."),
        Mistake("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)", "s_q * s_k / math.sqrt(12)",
                "That multiplies the two errors. Each error is multiplied by the other factor itself."),
        Mistake("(s_q * rms_k) ** 2 + (s_k * rms_q) ** 2", "s_q ** 2 + s_k ** 2",
                "The rounding error of Q is multiplied by K, and that of K by Q."),
    ), right=(
        ("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
         "math.hypot(s_q * rms_k, s_k * rms_q) / 12**0.5"),
        ("math.sqrt(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12)",
         "torch.tensor(((s_q * rms_k) ** 2 + (s_k * rms_q) ** 2) / 12).sqrt()"),
    )),
    "rms_norm": Gap(rms_norm, _tokens, (
        Mistake("mean(-1, keepdim=True)", "mean(-2, keepdim=True)",
                "Each token is divided by its own size: the mean runs over its channels."),
        Mistake("mean(-1, keepdim=True)", "sum(-1, keepdim=True)",
                "That makes every length 1. RMS is the root of a mean: the length becomes sqrt(D)."),
        Mistake("x * gain / torch.sqrt(x.square()", "(x - x.mean(-1, keepdim=True)) * gain / torch.sqrt(x.square()",
                "RMS norm does not subtract the mean. Layer norm does."),
        Mistake("x * gain / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)",
                "torch.nn.functional.layer_norm(x, x.shape[-1:], gain, eps=1e-6)",
                "RMS norm does not subtract the mean. Layer norm does."),
        Mistake("mean(-1, keepdim=True)", "mean()", "That is the size of all tokens together. Each has its own."),
        Mistake("x.square().mean(-1, keepdim=True)", "x.var(-1, keepdim=True)",
                "The variance subtracts the mean. RMS norm does not."),
        Mistake("torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)", "(x.abs().mean(-1, keepdim=True) + 1e-6)",
                "That is the mean magnitude. RMS is the root of the mean square."),
        Mistake("torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)",
                "(torch.sqrt(x.square().mean(-1, keepdim=True)) + 1e-6)",
                "The 1e-6 belongs under the root: add it to the mean square."),
    ), right=(
        ("/ torch.sqrt(", "* torch.rsqrt("),
        ("x * gain /", "gain * x.double() /"),
    )),
    "bound_on_scores": Gap(bound_on_scores, _gains, (
        Mistake("(gain_q * gain_k).abs().max().item()", "gain_q.abs().max().item() * gain_k.abs().max().item()",
                "That is a bound, but not the tightest: both gains of a channel meet in one product."),
        Mistake("math.sqrt(len(gain_q))", "len(gain_q)",
                "Without gains |q| |k| = D, and the score has the factor c = 1 / sqrt(D)."),
        Mistake(".max()", ".mean()", "All of q and k may lie in the channel with the largest gains."),
        Mistake(".max()", ".sum()", "A token has one length for all channels: at worst it lies in the best of them."),
        Mistake("math.sqrt(len(gain_q)) * ", "1 / math.sqrt(len(gain_q)) * ",
                "Both lengths are missing: without gains |q| |k| = D, and c D = sqrt(D)."),
    ), right=(
        ("math.sqrt(len(gain_q)) * (gain_q * gain_k).abs().max().item()",
         "(gain_q * gain_k).abs().max() * len(gain_q) ** 0.5"),
        ("(gain_q * gain_k)", "(gain_q.double() * gain_k)"),
    )),
    "grad_through_norm": Gap(grad_through_norm,
        lambda: [(draw(5, 6, HEAD_DIM), 3 * draw(6, 6, HEAD_DIM), 1 + 0.3 * draw(7, HEAD_DIM))], (
        Mistake("(dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True))", "dx_hat",
                "r depends on x, too. That way is missing."),
        Mistake("(dx_hat - x_hat", "(-x_hat", "The first way is missing: x is also the numerator of x_hat."),
        Mistake("dx_hat - x_hat", "dx_hat + x_hat",
                "The sign is wrong: a larger x makes a larger r, and so a smaller x_hat."),
        Mistake("(x_hat * dx_hat).mean", "(x_hat * dx_hat).sum",
                "r is the root of a mean, so each channel has one D-th of it: take a mean."),
        Mistake("gain * dy", "dy / gain", "y = gain * x_hat, so dx_hat is gain times dy."),
        Mistake("(x_hat * dx_hat).mean(-1, keepdim=True)", "(x_hat * dx_hat) / x.shape[-1]",
                "r is shared by all channels of a token: the gradients of all of them add up in dr."),
        Mistake("x_hat * (x_hat * dx_hat)", "x * (x * dx_hat)",
                "x stands where x_hat = x / r belongs, twice."),
        Mistake("(dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r",
                "dx_hat / r - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True) / r ** 2",
                "x_hat has one 1/r in it already: x_hat = x / r has the derivative -x / r^2 = -x_hat / r."),
        Mistake("(dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r",
                "dx_hat / r - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)",
                "Divide both ways by r: x_hat = x / r has the derivative -x / r^2 = -x_hat / r with respect to r."),
    ), right=(
        ("(dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r",
         "dx_hat / r - x * (x * dx_hat).mean(-1, keepdim=True) / r**3"),
        ("(dx_hat - x_hat * (x_hat * dx_hat).mean(-1, keepdim=True)) / r",
         "torch.func.vjp(lambda y: gain * y / y.square().mean(-1, keepdim=True).sqrt(), x)[1](dy)[0]"),
    )),
}  # fmt: skip
