"""What the tests of pre-training share: a text with something to learn, and a model that trains in a second."""

import math
from dataclasses import replace

import pytest
import torch
from sage_lab.models.llama import LlamaConfig
from sage_lab.training.corpus import Corpus
from sage_lab.training.loop import train
from sage_lab.training.pretrain import Pretraining, PretrainSettings

CONFIG = LlamaConfig(vocab_size=16, context=24, layers=2, width=32, heads=4, qk_norm=True)
STOCHASTIC = replace(CONFIG, attention="sagebwd", backend="reference", ds_rounding="stochastic")
SHAPE = {"batch_size": 4, "micro_batch_size": 2, "validation_sequences": 8}
SETTINGS = PretrainSettings(steps=12, learning_rate=2e-2, warmup_steps=3, report_every=4, **SHAPE)


def sixteen_letters():
    """Every letter follows from the one before it, except one time in eight."""
    noise = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) < 1 / 8
    letters = (5 * torch.arange(10_000) + noise.cumsum(0)) % 16
    return Corpus("sixteen letters", letters.to(torch.uint8), 16)


def new_training(config=CONFIG, **changes):
    return Pretraining(sixteen_letters(), config, replace(SETTINGS, **changes))


def pretrained(folder, config=CONFIG, settings=SETTINGS, **options):
    """A run in `folder`: run.pt."""
    training = Pretraining(sixteen_letters(), config, settings, **options)
    folder.mkdir(exist_ok=True)
    train(training, folder / "run.pt")
    return training


def saved(checkpoint):
    """What a checkpoint holds, except how long it took."""
    state = torch.load(checkpoint, weights_only=True)
    return {name: value for name, value in state.items() if name != "step_seconds"}


def assert_same_bits(found, expected, place="checkpoint"):
    """Two states, nested as they like: same names, same values, same bits of every tensor."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for name in expected:
            assert_same_bits(found[name], expected[name], f"{place}, {name}")
    elif isinstance(expected, list | tuple):  # AdamW's betas come back from a checkpoint as a list
        assert len(found) == len(expected), place
        for number, parts in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(*parts, f"{place}, {number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert torch.equal(found, expected), place
    else:
        assert found == expected, place


class Stopped(KeyboardInterrupt):
    pass


def stopped(monkeypatch, owner, name, when, *, after=False):
    """The call of owner.name for which `when(its arguments)` holds stops the run: before it did anything, or after."""
    original = getattr(owner, name)

    def watched(*arguments):
        is_last = when(*arguments)
        if is_last and not after:
            raise Stopped
        found = original(*arguments)
        if is_last:
            raise Stopped
        return found

    monkeypatch.setattr(owner, name, watched)


def stopped_run(monkeypatch, name, when, folder, *arguments, after=False, **options):
    """A run in `folder` that ends at that call of Pretraining's method `name`."""
    with monkeypatch.context() as patch:
        stopped(patch, Pretraining, name, when, after=after)
        with pytest.raises(Stopped):
            pretrained(folder, *arguments, **options)


def poisoned(monkeypatch, *, step, until=math.inf, loss=None, gradient=None):
    """From `step` to before `until` the loss of every pass is `loss`, or the gradient of one weight is `gradient`."""
    accumulate, loss_of = Pretraining.accumulate_gradients, Pretraining.loss

    def poisoned_loss(training, inputs, targets):
        found = loss_of(training, inputs, targets)
        is_poisoned = loss is not None and step <= training.step < until and torch.is_grad_enabled()
        return found * 0 + loss if is_poisoned else found

    def poisoned_gradients(training):
        total = accumulate(training)
        if gradient is not None and step <= training.step < until:
            training.model.norm.weight.grad[0] = gradient
        return total

    monkeypatch.setattr(Pretraining, "loss", poisoned_loss)
    monkeypatch.setattr(Pretraining, "accumulate_gradients", poisoned_gradients)
