"""Training on a fixed corpus: what a step sees, what a report measures, and a run that was killed."""

from dataclasses import replace

import pytest
import torch
from pretrain_cases import CONFIG, sixteen_letters
from sage_lab.models.llama import Llama
from sage_lab.training.capture import next_token_loss
from sage_lab.training.full_batch import FullBatchSettings, FullBatchTraining, windows

EXACT = replace(CONFIG, layers=1, fused_prologue=False)
SAGEBWD = replace(EXACT, attention="sagebwd", backend="reference", granularity="block", block_q=8, block_kv=8)
SETTINGS = FullBatchSettings(
    steps=4, batch_size=8, learning_rate=1e-2, warmup_steps=1, report_every=2, sequences=8, micro_batch_size=2,
    validation_sequences=4,
)  # fmt: skip


def new_training(config=EXACT, **changes):
    return FullBatchTraining(sixteen_letters(), config, replace(SETTINGS, **changes))


def flat(gradients):
    return torch.cat([x.flatten() for x in gradients]).double()


def step_gradient(training):
    training.accumulate_gradients()
    return flat(x.grad for x in training.model.parameters())


# What a step sees


def test_windows_stand_side_by_side_each_with_its_next_token():
    corpus = sixteen_letters()
    found = windows(corpus, 5, 3, 4)
    expected = [corpus.tokens[start : start + 5].tolist() for start in (5, 9, 13)]
    assert found.tolist() == expected
    with pytest.raises(ValueError, match="^corpus: expected at least 10001 tokens, sixteen letters has 10000"):
        windows(corpus, 0, 1000, 10)


def test_a_step_sees_the_whole_corpus_and_validation_is_not_in_it():
    training = new_training()
    tokens = sixteen_letters().tokens.long()
    assert sorted(training.sequences.tolist()) == sorted(windows(sixteen_letters(), 0, 8, 24).tolist())
    assert training.validation[0].tolist() == tokens[8 * 24 : 9 * 24 + 1].tolist()
    loss = next_token_loss(training.model, training.sequences[:, :-1], training.sequences[:, 1:])
    expected = flat(torch.autograd.grad(loss, list(training.model.parameters())))
    for micro_batch_size in (1, 8):
        found = step_gradient(new_training(micro_batch_size=micro_batch_size))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_smaller_batch_is_drawn_anew_for_every_step_without_replacement():
    training = new_training(batch_size=4)
    drawn = []
    for training.step in (0, 1, 1):
        drawn.append(training.chosen().tolist())
    assert drawn[0] != drawn[1] == drawn[2]
    assert all(len(set(x)) == 4 for x in drawn)
    assert new_training(batch_size=4, seed=1).chosen().tolist() != drawn[0]
    assert new_training(seed=1).chosen() == slice(None)


def test_a_random_error_has_the_size_asked_for_and_is_another_in_every_step():
    exact, found = new_training(), []
    clean = step_gradient(exact)
    for step in (0, 1):
        training = new_training(random_error=0.01)
        training.step = step
        found.append(step_gradient(training) - clean)
        for x, y in zip(training.model.parameters(), exact.model.parameters(), strict=True):
            assert ((x.grad - y.grad).norm() / y.grad.norm()).item() == pytest.approx(0.01, rel=1e-2)
    assert torch.nn.functional.cosine_similarity(*found, dim=0).abs() < 0.1


def test_attention_in_bfloat16_leaves_all_else_in_float32():
    seen = []
    training = new_training(attention_in_bfloat16=True)
    core = training.model.blocks[0].attention.core
    core.core.register_forward_hook(lambda module, qkv, o: seen.append({x.dtype for x in (*qkv, o)}))
    logits = training.model(training.sequences[:2, :-1])
    assert seen == [{torch.bfloat16}]
    assert logits.dtype == torch.float32
    training.report([])
    assert 1e-4 < training.losses[0]["gradient_error"] < 0.05
    assert len(seen) == 1 + 2 + 4  # validation and the gradient in passes of two; the truth has a core of its own
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)


# What a report measures


def test_exact_attention_has_no_bias():
    row = new_training().report([1.0])
    assert (row["gradient_error"], row["score_gradient_error"], row["bias_square"]) == (0, 0, 0)
    assert row["exact_loss"] == pytest.approx(2.77, abs=0.2)  # guessing among 16
    assert row["noise_trace"] > 0


def test_bias_noise_and_errors_are_those_of_the_corpus():
    """The exact loss is that of exact attention at the run's weights, the others that of the attention in use."""
    training = new_training(SAGEBWD)
    with torch.no_grad():
        for weight in training.model.parameters():
            weight *= 3  # sharp enough for INT8 to show in the loss
    row = training.report([])
    twin = Llama(EXACT)
    twin.load_state_dict(training.model.state_dict())
    losses = [next_token_loss(model, training.sequences[:, :-1], training.sequences[:, 1:]).item()
              for model in (twin, training.model)]  # fmt: skip
    assert row["exact_loss"] == pytest.approx(losses[0], abs=1e-5)
    assert abs(row["exact_loss"] - losses[1]) > 1e-4
    exact, found = [], []
    for part in training.sequences.split(2):
        for model, gradients in ((twin, exact), (training.model, found)):
            loss = next_token_loss(model, part[:, :-1], part[:, 1:])
            gradients.append(flat(torch.autograd.grad(loss, list(model.parameters()))))
    exact, found = torch.stack(exact), torch.stack(found)
    error, truth = found.mean(0) - exact.mean(0), exact.mean(0)
    assert row["gradient_norm"] == pytest.approx(truth.norm().item(), rel=1e-5)
    assert row["bias_square"] == pytest.approx(error.square().sum().item(), rel=1e-3)
    assert row["gradient_error"] == pytest.approx((error.norm() / truth.norm()).item(), rel=1e-3)
    assert row["noise_trace"] == pytest.approx(2 * 24 * exact.var(0).sum().item(), rel=1e-4)
    names = [name for name, x in twin.named_parameters() for _ in range(x.numel())]
    scores = torch.tensor([("query" in name or "key" in name) and "attention_norm" not in name for name in names])
    expected = error[scores].norm() / truth[scores].norm()
    assert row["score_gradient_error"] == pytest.approx(expected.item(), rel=1e-3)
    row = new_training(SAGEBWD).report([])
    assert row["score_gradient_error"] > 2 * row["gradient_error"]
    assert new_training(SAGEBWD, micro_batch_size=8).report([])["noise_trace"] is None


# A run


def test_the_value_offset_is_one_where_all_tokens_are_the_same():
    training = new_training()
    assert 0 < training.value_offset() < 0.9
    training.sequences = torch.full_like(training.sequences, 3)
    assert training.value_offset() == pytest.approx(1.0, abs=1e-9)
