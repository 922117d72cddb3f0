"""What notebooks 00 to 02 claim, measured again: their inputs, the library's functions, and the figures' data."""

import math
from functools import partial

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from sage_ref import sagebwd_attention
from sage_ref.attention import attention_backward, attention_forward
from sage_ref.course.figures import draw_block_sizes, draw_probabilities, error_map, panels, show_letters, show_matrix
from sage_ref.course.teaching import bytes_kept_for_backward, letter_inputs
from sage_ref.experiments.table1 import table1_inputs
from sage_ref.quantization import fake_quantize, integer_matmul, quantize, quantized_matmul
from sage_ref.sagebwd.settings import SageBwdSettings
from sage_ref.tracing import cosine, relative_l2, rms, trace

TEXT, WORD = "less precise attention is still attention", "attention"
sagebwd = partial(sagebwd_attention, backend="reference")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def matrix(generator):
    """The running example of notebook 02: 256 Gaussian tokens with 64 channels."""
    return torch.randn(256, 64, generator=generator)


# Notebook 00


def test_00_a_repeated_word_finds_itself():
    q, k, _, _ = letter_inputs(TEXT)
    p = torch.softmax(q @ k.mT / 8, -1)[0, 0]
    first, second = TEXT.index(WORD), TEXT.rindex(WORD)
    later = range(1, len(WORD))  # the letter before the word's first letter is a space, twice
    assert all(p[first + i, second + i] > 5 * p[first + i].median() for i in later)
    assert all(p[second + i, first + i] > 5 * p[second + i].median() for i in later)


def test_00_removing_the_mean_key_removes_more_than_half_of_the_error():
    q, k, v, _ = letter_inputs(TEXT, key_offset=20.0)
    exact = F.scaled_dot_product_attention(q, k, v)
    error_raw, error_smooth = (relative_l2(sagebwd(q, k, v, smooth_k=smooth), exact) for smooth in (False, True))
    assert error_smooth < 0.02
    assert error_smooth < error_raw / 2
    torch.testing.assert_close(
        F.scaled_dot_product_attention(q, k - k.mean(-2, keepdim=True), v), exact, rtol=0, atol=1e-4
    )


def test_00_rounding_has_a_gradient_in_one_entry_only():
    q, k, v, do = (x.requires_grad_() for x in letter_inputs(TEXT))
    scores = fake_quantize(q) @ fake_quantize(k).mT / 8
    o = fake_quantize(torch.softmax(scores, -1), (1, None)) @ fake_quantize(v)
    (dq,) = torch.autograd.grad(o, q, do)
    assert dq.count_nonzero() == 1


def test_00_sagebwd_has_the_gradients_that_rounding_has_not():
    q, k, v, do = letter_inputs(TEXT, key_offset=20.0)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, do)
    ours = torch.autograd.grad(sagebwd(*inputs), inputs, do)
    assert all(cosine(*pair) > 0.998 for pair in zip(ours, exact, strict=True))


def test_00_sharp_attention_hurts_ds_dq_and_dk_most():
    soft, sharp = (trace(*table1_inputs(256, 64, sigma, seed=0), SageBwdSettings.printed()) for sigma in (1, 10))
    for name in ("dS", "dQ", "dK"):
        assert sharp[name].rel_l2 > 3 * max(sharp[other].rel_l2 for other in ("P", "O", "delta", "dV"))
    assert soft["dQ"].rel_l2 > 3 * soft["dS"].rel_l2  # rounding dS, not its own error, is what dQ suffers from
    assert sharp["dQ"].rel_l2 < 1.3 * sharp["dS"].rel_l2  # the other way round
    assert soft["dP"].rel_l2 < 1e-6


def test_00_the_error_map_shows_every_tensor_with_its_error():
    errors = {name: error.rel_l2 for name, error in trace(*letter_inputs(TEXT), SageBwdSettings.printed()).items()}
    _, (ax,) = panels(1)
    error_map(ax, errors, title="letters")
    shown = [text.get_text() for text in ax.texts if text.get_text()]
    assert shown == [
        line for name in ("P", "O", "delta", "dQ", "dV", "dP", "dS", "dK") for line in (name, f"{errors[name]:.1%}")
    ]


def test_00_letters_label_rows_and_columns():
    _, (ax,) = panels(1)
    show_matrix(ax, torch.rand(len(WORD), len(TEXT)), title="P", x="key", y="query")
    show_letters(ax, WORD, TEXT)
    assert "".join(label.get_text() for label in ax.get_yticklabels()) == WORD
    assert "".join(label.get_text() for label in ax.get_xticklabels()) == TEXT


# Notebook 01


@pytest.fixture
def last_word():
    q, k, v, do = (x[0, 0].double() for x in letter_inputs(TEXT))
    return q[-len(WORD) :], k, v, do[-len(WORD) :]


def test_01_the_long_way_and_the_delta_trick_agree(last_word):
    q, k, v, do = last_word
    forward = attention_forward(q, k, v)
    backward = attention_backward(do, q, k, v, forward.output, forward.log_sum_exp)
    p, dp = backward.probabilities, backward.grad_probabilities
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    ds = (jacobian @ dp[:, :, None]).squeeze(-1)
    torch.testing.assert_close(backward.grad_scores, ds, rtol=0, atol=1e-12)
    assert ds.sum(-1).abs().max() < 1e-12
    assert ds.sum(-2).abs().max() > 1
    torch.testing.assert_close(ds @ (k - k.mean(0)), ds @ k, rtol=0, atol=1e-11)
    assert (ds @ k).norm() / backward.grad_query.norm() == pytest.approx(math.sqrt(k.shape[-1]))


def test_01_backward_costs_two_and_a_half_times_forward(last_word):
    q, k, v, do = last_word
    forward = attention_forward(q, k, v)
    counts = []
    for function, arguments in (
        (attention_forward, (q, k, v)),
        (attention_backward, (do, q, k, v, forward.output, forward.log_sum_exp)),
    ):
        with FlopCounterMode(display=False) as counter:
            function(*arguments)
        counts.append(counter.get_total_flops())
    one_matmul = 2 * q.shape[0] * k.shape[0] * q.shape[1]
    assert counts == [2 * one_matmul, 5 * one_matmul]


@pytest.mark.parametrize("n", [128, 512])
def test_01_autograd_keeps_p_and_fused_attention_the_log_sum_exp(n):
    def naive_attention(q, k, v):
        return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v

    inputs = torch.randn(3, 1, 1, n, 64)
    assert bytes_kept_for_backward(naive_attention, *inputs) == 4 * n**2 + 12 * n * 64
    assert bytes_kept_for_backward(F.scaled_dot_product_attention, *inputs) == (16 * 64 + 4) * n
    assert bytes_kept_for_backward(sagebwd, *inputs) == (16 * 64 + 4) * n


def test_01_averaging_two_halves_is_no_softmax(last_word):
    q, k, v, _ = last_word
    exact = attention_forward(q, k, v).output
    halves = [attention_forward(q, k[half], v[half]).output for half in (slice(0, 20), slice(20, None))]
    assert relative_l2((halves[0] + halves[1]) / 2, exact) > 0.3


# Notebook 02


def test_02_a_cast_doubles_the_error_and_shrinks(matrix):
    s = matrix.abs().max() / 127
    truncated, rounded = (matrix / s).to(torch.int8), torch.round(matrix / s)
    assert relative_l2(s * truncated, matrix) / relative_l2(s * rounded, matrix) == pytest.approx(2, rel=0.02)
    assert ((s * truncated - matrix) * matrix.sign()).mean() / s == pytest.approx(-0.5, abs=0.02)
    assert rms(s * rounded - matrix) / s == pytest.approx(1 / math.sqrt(12), rel=0.02)


def test_02_only_the_crest_factor_counts(matrix, generator):
    for x in (torch.rand(256, 64, generator=generator) * 2 - 1, matrix, matrix * matrix.abs(), 1e-7 * matrix):
        crest_factor = x.abs().max().item() / rms(x)
        assert relative_l2(fake_quantize(x), x) == pytest.approx(crest_factor / 127 / math.sqrt(12), rel=0.1)


def test_02_an_outlier_leaves_few_integers_and_spoils_what_shares_its_scale(matrix):
    matrix[100, 7] = 100.0
    quantized = quantize(matrix)
    assert quantized.values.unique().numel() < 16  # fewer than four bits
    assert (quantized.values == 0).double().mean() > 0.25
    others = torch.ones(256, 64, dtype=torch.bool)
    others[100, 7] = False
    shapes = ((1, None), (None, 1), (64, None), (None, None))
    errors = [relative_l2(fake_quantize(matrix, shape)[others], matrix[others]) for shape in shapes]
    assert errors == sorted(errors)
    assert errors[-1] > 10 * errors[0]


def test_02_small_blocks_buy_little_for_gaussians(matrix):
    gain = relative_l2(fake_quantize(matrix), matrix) / relative_l2(fake_quantize(matrix, (1, None)), matrix)
    assert 1.3 < gain < 2.0


def test_02_the_block_size_figure_plots_the_error_and_where_the_model_ends(matrix):
    others = torch.ones(256, 64, dtype=torch.bool)
    others[100, 7] = False
    for outlier, ends in ((0.0, False), (30.0, False), (1000.0, True)):
        x = torch.where(others, matrix, outlier)
        _, (ax,) = panels(1)
        draw_block_sizes(ax, x, where=others, title="")
        measured, model = (line.get_ydata() for line in ax.lines)
        assert list(ax.lines[0].get_xdata()) == [2**i for i in range(9)]
        assert measured[6] == relative_l2(fake_quantize(x, (64, None))[others], x[others])
        assert (model[-1] > 2 * measured[-1]) == ends
        assert ends or measured == pytest.approx(model, rel=0.05)


def test_02_a_scale_along_the_contraction_is_refused_and_wrong(matrix, generator):
    q, k = torch.randn(64, 64, generator=generator), matrix
    k[:, ::16] *= 20
    q_hat, k_hat = quantize(q, (1, None)), quantize(k, (None, 1))
    assert relative_l2(k_hat.dequantize(), k) < 0.01
    wrong = integer_matmul(q_hat.values, k_hat.values.mT) * q_hat.scale * k_hat.scale.mean()
    assert relative_l2(wrong, q @ k.mT) > 0.5
    with pytest.raises(ValueError, match="b: expected one scale along the contraction, got 64"):
        quantized_matmul(q_hat, k_hat.mT)
    assert relative_l2(quantized_matmul(q_hat, quantize(k, (1, None)).mT), q @ k.mT) < 0.02


def test_02_a_contraction_cut_into_tiles_has_a_scale_for_each(generator):
    p = torch.softmax(torch.randn(64, 256, generator=generator), -1)
    v = torch.randn(256, 64, generator=generator)
    v[200] *= 20
    tiles = [slice(start, start + 64) for start in range(0, 256, 64)]
    in_tiles = sum(quantized_matmul(quantize(p[:, keys], (1, None)), quantize(v[keys])) for keys in tiles)
    at_once = quantized_matmul(quantize(p, (1, None)), quantize(v))
    assert relative_l2(in_tiles, p @ v) < 0.7 * relative_l2(at_once, p @ v)


def test_02_float32_is_exact_for_1024_terms_and_not_for_1041():
    ones = torch.full((1, 1041), 127, dtype=torch.int8)
    short = ones[:, :1024].float()
    assert (short @ short.mT).item() == 127**2 * 1024
    assert (ones.float() @ ones.float().mT).item() != 127**2 * 1041
    assert integer_matmul(ones, ones.mT).item() == 127**2 * 1041
    assert (ones @ ones.mT).item() == (127**2 * 1041 + 128) % 256 - 128  # int8 wraps


def test_02_stochastic_rounding_loses_one_draw_and_wins_the_average(matrix, generator):
    block = matrix[:64]
    nearest = relative_l2(fake_quantize(block), block)
    draws = torch.stack([fake_quantize(block, rounding="stochastic", generator=generator) for _ in range(1000)])
    for count in (1, 2, 10, 100, 1000):
        assert relative_l2(draws[:count].mean(0), block) / nearest == pytest.approx(math.sqrt(2 / count), rel=0.1)


@pytest.mark.parametrize("contraction", [16, 256, 4096])
def test_02_a_product_has_root_two_of_its_factors_error_at_any_length(contraction, generator):
    a, b = torch.randn(2, 128, contraction, generator=generator)
    a_hat, b_hat = quantize(a), quantize(b)
    epsilon = math.hypot(relative_l2(a_hat.dequantize(), a), relative_l2(b_hat.dequantize(), b)) / math.sqrt(2)
    error = relative_l2(quantized_matmul(a_hat, b_hat.mT), a.double() @ b.double().mT)
    assert error / epsilon == pytest.approx(math.sqrt(2), rel=0.03)


def test_02_a_flat_row_vanishes_beside_a_sharp_one():
    p = torch.full((2, 1024), 1 / 1024)
    p[0] = F.one_hot(torch.tensor(0), 1024)
    assert fake_quantize(p)[1].sum() == 0
    assert fake_quantize(p, (1, None))[1].sum() == pytest.approx(1, rel=1e-3)


def test_02_in_between_small_probabilities_hold_a_share_of_the_weight():
    lost = {}
    for sigma in (1, 3, 10):
        scores = sigma * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
        p = torch.exp(scores - scores.amax(-1, keepdim=True))
        zero = quantize(p, (1, None)).values == 0
        lost[sigma] = zero.double().mean().item(), ((p * zero).sum(-1) / p.sum(-1)).mean().item()
    assert lost[1][0] < 0.05
    assert lost[3][0] > 0.8
    assert lost[10][0] > 0.99
    assert lost[3][1] > 0.05
    assert max(lost[1][1], lost[10][1]) < 0.01


def test_02_the_probability_figure_accounts_for_every_entry_and_all_probability():
    scores = 3 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    _, (ax,) = panels(1)
    draw_probabilities(ax, p, title="")
    assert sum(patch.get_height() for patch in ax.containers[0]) == pytest.approx(1, rel=1e-4)
    assert ax.patches[-1].get_xy()[:, 1].max() == pytest.approx(_largest_share(p), rel=1e-4)
    assert ax.lines[0].get_xdata()[0] == pytest.approx(1 / 254)


def _largest_share(p):
    """The most probability in one bin of the figure, six bins to a factor of ten and all below 1e-6 in the first."""
    weights = p.double() / p.double().sum(-1, keepdim=True) / len(p)
    bins = (6 * (p.double().clamp(min=1e-6).log10() + 6)).floor().clamp(0, 35).long()
    return torch.zeros(36, dtype=torch.float64).index_add_(0, bins.flatten(), weights.flatten()).max().item()
