"""A killed run goes on bit for bit, a capture holds what attention read and the gradient it got, files are whole."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from sage_ref.__main__ import main
from sage_ref.attention import attention_forward
from sage_ref.models.llama import Llama, LlamaConfig
from sage_ref.recorded import RECORDED, read_record
from sage_ref.sagebwd import SageBwdSettings
from sage_ref.tables import table2_rows
from sage_ref.tracing import INTERMEDIATES
from sage_ref.training.capture import (
    TENSORS,
    Capture,
    Training,
    TrainingSettings,
    attention_tensors,
    next_token_loss,
    read_capture,
    train,
    write_capture,
)
from sage_ref.training.corpus import Corpus

CONFIG = LlamaConfig(vocab_size=16, context=24, layers=2, width=32, heads=4, kv_heads=2, qk_norm=True)
SETTINGS = TrainingSettings(steps=30, batch_size=2, learning_rate=1e-2, warmup_steps=5, report_every=10)


def sixteen_letters():
    """A corpus with something to learn: every letter follows from the one before it, except one time in eight."""
    noise = torch.rand(4000, generator=torch.Generator().manual_seed(0)) < 1 / 8
    letters = (5 * torch.arange(4000) + noise.cumsum(0)) % 16
    return Corpus("sixteen letters", letters.to(torch.uint8), 16)


def trained(checkpoint, settings=SETTINGS, corpus=None):
    training = Training(corpus or sixteen_letters(), CONFIG, settings)
    train(training, checkpoint)
    return training


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "run.pt")


def assert_same_bits(training, expected):
    """Weights, optimizer and losses."""
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(training.model.state_dict()[name], tensor), name
    state, expected_state = (x.optimizer.state_dict()["state"] for x in (training, expected))
    assert state.keys() == expected_state.keys()
    for index, moments in expected_state.items():
        for name, tensor in moments.items():
            assert torch.equal(state[index][name], tensor), (index, name)
    assert training.losses == expected.losses


def test_training_learns(uninterrupted):
    first, last = uninterrupted.losses[0], uninterrupted.losses[-1]
    assert first["validation_loss"] == pytest.approx(math.log(16), rel=0.05)
    assert last["validation_loss"] < 0.5 * math.log(16)
    assert [row["step"] for row in uninterrupted.losses] == [0, 10, 20, 30]


def test_every_step_reads_its_own_batch(monkeypatch):
    drawn, batch = [], Corpus.batch

    def recorded(corpus, *shape, seed, step):
        drawn.append((seed, step))
        return batch(corpus, *shape, seed=seed, step=step)

    monkeypatch.setattr(Corpus, "batch", recorded)
    training = Training(sixteen_letters(), CONFIG, replace(SETTINGS, seed=5))
    for _ in range(3):
        training.advance()
    assert drawn == [(5, 0), (5, 1), (5, 2)]


def test_learning_rate_warms_up_then_follows_a_cosine_to_a_tenth():
    rates = [SETTINGS.learning_rate_at(step) for step in range(31)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert (rates[5], rates[30]) == pytest.approx((0.01, 0.001))
    assert rates[17] + rates[18] == pytest.approx(0.01 + 0.001)


def test_training_leaves_torchs_random_numbers_alone():
    torch.manual_seed(123)
    before = torch.get_rng_state()
    Training(sixteen_letters(), CONFIG, SETTINGS).advance()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_stopped_between_two_checkpoints_goes_on_bit_for_bit(tmp_path, uninterrupted, monkeypatch, capsys):
    advance = Training.advance

    def stop_at_17(training):
        if training.step == 17:
            raise KeyboardInterrupt
        return advance(training)

    monkeypatch.setattr(Training, "advance", stop_at_17)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run.pt")
    monkeypatch.undo()
    capsys.readouterr()
    resumed = trained(tmp_path / "run.pt")
    assert "goes on from step 10" in capsys.readouterr().out
    assert_same_bits(resumed, uninterrupted)


KILLED_RUN = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(int(sys.argv[3]))  # as in the process that goes on
sys.path.insert(0, sys.argv[2])
from test_capture import Corpus, SETTINGS, sixteen_letters, trained

class SlowCorpus(Corpus):
    def split(self):
        train, validation = super().split()
        return SlowCorpus(train.name, train.tokens, train.vocab_size), validation

    def batch(self, *shape, **place):
        time.sleep(0.1)
        return super().batch(*shape, **place)

letters = sixteen_letters()
trained(Path(sys.argv[1]), corpus=SlowCorpus(letters.name, letters.tokens, letters.vocab_size))
"""


def test_a_killed_process_leaves_a_whole_checkpoint_and_goes_on_bit_for_bit(tmp_path, uninterrupted, request):
    checkpoint = tmp_path / "run.pt"
    arguments = map(str, (checkpoint, request.path.parent, torch.get_num_threads()))
    command = [sys.executable, "-c", KILLED_RUN, *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not checkpoint.exists():
            assert process.poll() is None, "the run ended before its first checkpoint"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert torch.load(checkpoint, weights_only=True)["step"] < SETTINGS.steps
    assert_same_bits(trained(checkpoint), uninterrupted)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    settings = replace(SETTINGS, steps=1)
    trained(tmp_path / "run.pt", settings)
    with pytest.raises(ValueError, match="checkpoint: expected a run with seed=1, .*run.pt has seed=0"):
        trained(tmp_path / "run.pt", replace(settings, seed=1))
    other = Corpus("other", sixteen_letters().tokens.flip(0), 16)
    with pytest.raises(ValueError, match="checkpoint: expected a run with corpus_sha256="):
        trained(tmp_path / "run.pt", settings, other)


def test_a_checkpoint_is_replaced_in_one_step(tmp_path, monkeypatch):
    checkpoint = tmp_path / "run.pt"
    trained(checkpoint, replace(SETTINGS, steps=1))
    before = checkpoint.read_bytes()

    def half_written(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(KeyboardInterrupt):
        Training(sixteen_letters(), CONFIG, SETTINGS).save(checkpoint)
    assert checkpoint.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_gradients_that_are_not_finite_stop_the_run():
    training = Training(sixteen_letters(), CONFIG, SETTINGS)
    with torch.no_grad():
        training.model.norm.weight[0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        training.advance()


@pytest.mark.parametrize("name", ["steps", "batch_size", "report_every"])
def test_impossible_settings_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        replace(SETTINGS, **{name: 0})


@pytest.fixture
def double_model():
    torch.manual_seed(0)
    model = Llama(CONFIG).double()
    batch = sixteen_letters().batch(2, CONFIG.context, seed=0, step=0)
    return model, *batch


def test_captured_q_k_v_are_what_attention_multiplies(double_model):
    model, inputs, targets = double_model
    outputs = {}
    for layer, block in enumerate(model.blocks):
        block.attention.core.register_forward_hook(lambda core, qkv, o, layer=layer: outputs.update({layer: o}))
    loss, layers = attention_tensors(model, inputs, targets, (0, 1))
    assert loss == next_token_loss(model, inputs, targets).item()
    assert list(layers) == [0, 1]
    for layer, tensors in layers.items():
        assert tuple(tensors) == TENSORS
        q, k, v, do = tensors.values()
        assert q.shape == k.shape == v.shape == do.shape == (2, 4, 24, 8)
        torch.testing.assert_close(attention_forward(q, k, v, is_causal=True).output, outputs[layer])
        # QK-norm with gains of one came before, and a rotation changes no length.
        torch.testing.assert_close(q.square().mean(-1), torch.ones(2, 4, 24).double(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("layer", [0, 1])
def test_captured_grad_output_is_the_gradient_of_the_loss(double_model, layer):
    model, inputs, targets = double_model
    _, layers = attention_tensors(model, inputs, targets, (layer,))
    direction = torch.randn(layers[layer]["grad_output"].shape, dtype=torch.float64)
    losses = []
    for step in (1e-4, -1e-4):
        core = model.blocks[layer].attention.core
        hook = core.register_forward_hook(lambda core, qkv, o, step=step: o + step * direction)
        losses.append(next_token_loss(model, inputs, targets).item())
        hook.remove()
    slope = (losses[0] - losses[1]) / 2e-4
    assert slope == pytest.approx((layers[layer]["grad_output"] * direction).sum().item(), rel=1e-5)


def test_capturing_leaves_the_model_as_it_was(double_model):
    model, inputs, targets = double_model
    attention_tensors(model, inputs, targets, (1,))
    assert all(p.grad is None for p in model.parameters())
    assert not model.blocks[1].attention.core._forward_hooks


def test_a_capture_is_read_as_written(tmp_path, double_model):
    _, layers = attention_tensors(*double_model, (0, 1))
    capture = Capture({"corpus": {"name": "sixteen letters"}, "loss": 2.5}, layers)
    write_capture(tmp_path / "deep" / "capture.safetensors", capture)
    again = read_capture(tmp_path / "deep" / "capture.safetensors")
    assert again.provenance == capture.provenance
    for layer, tensors in layers.items():
        for name, tensor in tensors.items():
            assert torch.equal(again.layers[layer][name], tensor.bfloat16())
    assert {row["tensor"] for row in table2_rows(again.layers, SageBwdSettings(is_causal=True))} == set(INTERMEDIATES)


def test_what_is_no_capture_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a capture at .*none.safetensors, found none"):
        read_capture(tmp_path / "none.safetensors")
    save_file({"layer0.query": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="path: expected a capture with provenance in its metadata"):
        read_capture(tmp_path / "other.safetensors")


def test_the_command_trains_captures_and_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    options = "--corpus text.txt --steps 1 --layers 4 1 --qk-norm --out c.safetensors --json c.json"
    main(["capture", *options.split()])
    printed = capsys.readouterr()
    provenance, layers = read_capture(tmp_path / "c.safetensors")
    assert list(layers) == [1, 4]
    assert {x.shape for tensors in layers.values() for x in tensors.values()} == {(1, 4, 512, 64)}
    assert provenance["corpus"]["sha256"] in printed.out
    assert provenance["model"]["qk_norm"] is True
    assert "1/1" in printed.err
    assert read_record(tmp_path / "c.json").rows == provenance["losses"]
    with pytest.raises(SystemExit):
        main(["capture", "--layers", "5"])


def test_the_committed_capture_is_what_the_course_says():
    path = RECORDED / "capture_cpu.safetensors"
    provenance, layers = read_capture(path)
    assert path.stat().st_size <= 4 * 2**20
    assert list(layers) == [0, 2, 4]
    for tensors in layers.values():
        assert tuple(sorted(tensors)) == tuple(sorted(TENSORS))
        for tensor in tensors.values():
            assert (tensor.shape, tensor.dtype) == ((1, 4, 512, 64), torch.bfloat16)
            assert tensor.isfinite().all()
            assert tensor.float().std() > 0
    for name in ("python", "torch", "cpu", "commit", "date", "command", "threads", "loss_normalisation"):
        assert provenance[name], name
    assert len(provenance["corpus"]["sha256"]) == 64
    assert provenance["corpus"]["name"] == f"standard library of Python {provenance['python']}"
    config = LlamaConfig(**provenance["model"])
    assert (config.layers, config.heads, config.head_dim, config.qk_norm) == (5, 4, 64, False)
    losses = provenance["losses"]
    assert losses[-1]["step"] == provenance["training"]["steps"]
    assert losses[0]["validation_loss"] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1]["validation_loss"] < 2.0
    assert "/" not in json.dumps(provenance["corpus"])
