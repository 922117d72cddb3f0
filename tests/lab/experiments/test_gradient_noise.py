"""Moments are unbiased and their errors honest, and what is measured is the gradient of the whole model."""

import json
import math
import re
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from pretrain_cases import CONFIG, STOCHASTIC, sixteen_letters
from sage_lab.__main__ import main
from sage_lab.experiments.gradient_noise import Accumulator, Moments, NoiseSettings, gradient_noise, noise_row
from sage_lab.models.llama import Llama
from sage_lab.records import read_record
from sage_lab.training.capture import next_token_loss
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import load_model


def moments_of(vectors, folds):
    """vectors: [batches, parameters]."""
    accumulator = Accumulator(folds, len(vectors))
    for number, vector in enumerate(vectors):
        accumulator.add(number, vector)
    return accumulator.moments()


def test_moments_are_their_formulas():
    """|m|^2: mean product of two folds' means; its error: jackknife over folds; trace: sample covariance."""
    vectors = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    found = moments_of(vectors, 4)
    folds = [vectors[fold::4].mean(0) for fold in range(4)]

    def square(kept):
        pairs = [(folds[a] @ folds[b]).item() for a in kept for b in kept if a != b]
        return sum(pairs) / len(pairs)

    left = [square([fold for fold in range(4) if fold != out]) for out in range(4)]
    variance = 3 / 4 * sum((x - sum(left) / 4) ** 2 for x in left)
    assert found.square == pytest.approx(square(range(4)))
    assert found.square_error == pytest.approx(variance**0.5)
    assert found.trace == pytest.approx(vectors.T.cov().trace().item())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Llama(CONFIG)


# Gradient noise of a model


def rows_of(model, settings, corpus=None):
    rows = gradient_noise(model, corpus or sixteen_letters(), settings)
    return {(row["variant"], row["group"]): row for row in rows}


def test_gradient_noise_is_its_definition_whatever_the_checkpoint_was_trained_with(model):
    """From the gradients of all batches, in double precision."""
    trained = replace(STOCHASTIC, block_q=8, block_kv=8, smooth_k=False, smooth_q=True, remedy="seven")
    other = Llama(trained)
    other.load_state_dict(model.state_dict())
    rows = rows_of(other, NoiseSettings(batches=6, sequences=2, folds=3, variants=("per block, nearest",)))
    exact, errors = [], []
    for number in range(6):
        batch = sixteen_letters().batch(2, CONFIG.context, seed=0, step=number)
        quantized = replace(STOCHASTIC, ds_rounding="nearest", granularity="block", block_q=64, block_kv=64)
        for config, found in ((CONFIG, exact), (quantized, errors)):
            twin = Llama(config)
            twin.load_state_dict(model.state_dict())
            next_token_loss(twin, *batch).backward()
            found.append({name: x.grad.double() for name, x in twin.named_parameters()})
    parts = {"whole": "", "layer 1": "^blocks.1", "layer 1, query and key": "^blocks.1.attention.(query|key|qk_norm)"}
    members = {group: [name for name in exact[0] if re.search(part, name)] for group, part in parts.items()}
    tokens = 2 * 24
    for group, names in members.items():
        row = rows["per block, nearest", group]
        g, q = (torch.stack([torch.cat([x[n].flatten() for n in names]) for x in some]) for some in (exact, errors))
        expected, expected_error = (moments_of(vectors, 3) for vectors in (g, q - g))
        assert row["gradient_square"] == pytest.approx(expected.square, rel=1e-4)
        assert row["noise_trace"] == pytest.approx(tokens * g.var(0).sum().item(), rel=1e-4)
        assert row["noise_scale"] == pytest.approx(row["noise_trace"] / expected.square, rel=1e-4)
        assert row["bias_square"] == pytest.approx(expected_error.square, rel=1e-3, abs=1e-4 * expected_error.trace)
        assert row["variance_trace"] == pytest.approx(tokens * expected_error.trace, rel=1e-3)
    error = {group: row["bias_square_error"] for (_, group), row in rows.items()}
    assert error["layer 1"] == pytest.approx(math.hypot(error["layer 1, query and key"], error["layer 1, other"]))


def test_tokens_at_bias_are_where_bias_reaches_noise():
    row = noise_row("layer 0", "per row, nearest", Moments(2.0, 0.1, 5.0), Moments(0.25, 0.125, 3.0), 100)
    assert (row["noise_scale"], row["variance_trace"], row["tokens_at_bias"]) == (250.0, 300.0, 2000.0)
    assert [row[name] for name in ("granularity", "block_q", "block_kv")] == ["row", 64, 64]
    unknown = noise_row("layer 0", "bf16", Moments(-1.0, 1.0, 5.0), Moments(-0.25, 0.25, 3.0), 100)
    assert (unknown["noise_scale"], unknown["tokens_at_bias"], unknown["granularity"]) == (None, None, None)


def test_the_command_measures_each_checkpoint_on_what_it_was_trained_on(text, checkpoint):
    """Every way of the noise is measured; a layer has its two parts and their sum."""
    state = torch.load(checkpoint, weights_only=True)
    torch.save(state | {"step": 1, "model": {name: 2 * x for name, x in state["model"].items()}}, text / "step1.pt")
    options = "--corpus text.txt --batches 16 --sequences 1 --device cpu --json noise.json --variants bf16"
    main(["noise", "step1.pt", "run.pt", *options.split()])
    record = read_record(text / "noise.json")
    groups = {f"layer {n}{part}" for n in (0, 1, 2) for part in ("", ", query and key", ", other")}
    groups |= {"whole", "embedding and norm"}
    found = [(row["step"], row["group"]) for row in record.rows]
    assert sorted(found) == sorted(product((1, 2), groups))
    settings = NoiseSettings(16, 1, 8, ("bf16",))
    assert record.provenance["settings"] == json.loads(json.dumps(asdict(settings)))
    assert record.provenance["corpus"]["name"] == "text.txt"
    assert not list(text.glob("**/*.partial"))
    model, _ = load_model(checkpoint)
    train_corpus, _ = read_corpus("text.txt").split(0.02)
    expected = rows_of(model, settings, train_corpus)
    names = ("qk_norm", "attention", "seed", "tokens_per_step", "layers", "width", "heads")
    for row in record.select(step=2):
        assert [row[name] for name in names] == [False, "exact", 0, 32, 3, 32, 4]
        assert row.items() >= expected["bf16", row["group"]].items()
