"""A step reads its own batch in passes of any size, a stopped run goes on bit for bit, divergence is a result."""

import math
from dataclasses import asdict, replace

import pretrain_cases as cases
import pytest
import torch
from pretrain_cases import CONFIG, SETTINGS, STOCHASTIC, new_training, pretrained, saved, sixteen_letters
from sage_lab.models.llama import Llama
from sage_lab.training.capture import next_token_loss
from sage_lab.training.pretrain import load_model, result_row
from sage_lab.training.probe import ARMS, largest_score


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """A run in `folder` that nothing interrupted."""
    return pretrained(folder, STOCHASTIC)


def watched_passes(training):
    """Return a list that gets, for every pass, how many sequences it has and the state of the random numbers."""
    seen = []
    watch = lambda model, arguments: seen.append((len(arguments[0]), torch.get_rng_state()))  # noqa: E731
    training.model.register_forward_pre_hook(watch)
    return seen


# What a step does


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradients_of_a_step_are_those_of_its_batch_in_passes_of_any_size(size):
    training = new_training(seed=3, micro_batch_size=size)
    training.step, passes = 2, watched_passes(training)
    loss = training.accumulate_gradients()
    validation_loss = training.validation_loss()
    assert [count for count, _ in passes] == [size] * (4 // size + 8 // size)
    train_corpus, validation = sixteen_letters().split(0.02)
    torch.manual_seed(3)
    model = Llama(CONFIG)
    before = torch.get_rng_state()
    new_training()  # leaves torch's random numbers alone
    assert torch.equal(torch.get_rng_state(), before)
    expected = next_token_loss(model, *train_corpus.batch(4, CONFIG.context, seed=3, step=2))
    expected.backward()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for (name, found), x in zip(training.model.named_parameters(), model.parameters(), strict=True):
        assert (found.grad - x.grad).norm() < 1e-6 * x.grad.norm(), name
    expected = next_token_loss(model, *validation.batch(8, 24, seed=0, step=0)).item()
    assert validation_loss == training.validation_loss() == pytest.approx(expected, rel=1e-6)


def test_a_run_without_noise_reads_one_batch_again_and_again():
    def first_tokens(step, **changes):
        training = new_training(**changes)
        training.step = step
        return training.passes()[0][0].tolist()

    assert first_tokens(0, same_batch=True) == first_tokens(3, same_batch=True) == first_tokens(0)
    assert first_tokens(3) != first_tokens(0)


def test_draws_of_stochastic_rounding_follow_from_seed_and_step():
    def drawn(seed, step):
        training = new_training(seed=seed)
        training.step = step
        training.seed_draws()
        return torch.rand(()).item()

    assert drawn(0, 1) == drawn(0, 1)
    assert len({drawn(0, 1), drawn(0, 2), drawn(1, 1)}) == 3


def test_learning_rate_warms_up_then_follows_a_cosine_to_a_tenth():
    long = replace(SETTINGS, steps=30, warmup_steps=5, learning_rate=0.01)
    rates = [long.learning_rate_at(step) for step in range(31)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert (rates[5], rates[30]) == pytest.approx((0.01, 0.001))
    assert rates[17] + rates[18] == pytest.approx(0.01 + 0.001)
    assert replace(long, warmup_steps=0).learning_rate_at(0) == 0.01


def test_weights_move_by_adamw_with_decay_of_matrices_only_and_clipped_gradients():
    training, twin = new_training(max_grad_norm=0.5), new_training()
    before = {name: x.detach().clone() for name, x in training.model.named_parameters()}
    twin.accumulate_gradients()
    found = [x.grad for x in twin.model.parameters()]
    norm = torch.cat([x.flatten() for x in found]).norm()
    training.advance()
    assert norm > 0.5
    rate = training.settings.learning_rate_at(0)
    for (name, x), gradient in zip(training.model.named_parameters(), found, strict=True):
        clipped, kept = gradient * 0.5 / norm, 1 - rate * 0.1 if x.dim() > 1 else 1
        # The first step of Adam goes by the sign of the gradient.
        expected = before[name] * kept - rate * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(x.detach(), expected, atol=1e-5, rtol=0, msg=name)
        assert x.grad is None
    assert [group["betas"] for group in training.optimizer.param_groups] == [(0.9, 0.95)] * 2


def test_autocast_computes_in_bfloat16_and_keeps_weights_in_float32():
    training, seen = new_training(autocast=True), []
    training.model.blocks[1].attention.core.register_forward_hook(lambda core, qkv, output: seen.append(output.dtype))
    loss = training.advance()
    training.validation_loss()
    assert seen == [torch.bfloat16] * (2 + 4)
    averages = [x["exp_avg"] for x in training.optimizer.state.values()]
    assert {x.dtype for x in (*training.model.parameters(), *averages)} == {torch.float32}
    assert 0 < abs(loss - new_training().accumulate_gradients()) < 0.02


# A run


def test_training_learns_and_reports(uninterrupted):
    reports = uninterrupted.losses
    assert [row["step"] for row in reports] == [0, 4, 8, 12]
    assert reports[0]["validation_loss"] == pytest.approx(math.log(16), rel=0.05)
    assert reports[-1]["validation_loss"] < 0.7 * math.log(16)
    twin = new_training(STOCHASTIC)
    losses = [twin.advance() for _ in range(12)]
    means = [sum(losses[first : first + 4]) / 4 for first in (0, 4, 8)]
    assert [row["train_loss"] for row in reports] == [None, *map(pytest.approx, means)]
    assert len(uninterrupted.step_seconds) == 12
    assert 0 < min(uninterrupted.step_seconds) <= uninterrupted.seconds


def test_a_checkpoint_holds_the_model_and_what_made_it(uninterrupted, folder):
    assert [x.name for x in folder.iterdir()] == ["run.pt"]
    model, arguments = load_model(folder / "run.pt")
    assert arguments == asdict(STOCHASTIC) | asdict(SETTINGS) | {"corpus_sha256": sixteen_letters().sha256, "step": 12}
    cases.assert_same_bits(dict(model.state_dict()), dict(uninterrupted.model.state_dict()))


# Stopped and resumed


@pytest.mark.parametrize(
    ("name", "when", "after"),
    [
        ("accumulate_gradients", lambda training: training.step == 6, True),  # between gradients and weights
        ("report", lambda training, losses: training.step == 8, True),  # between a report and its checkpoint
        ("save", lambda training, path: training.step == 8 and path.stem == "run", False),  # instead of a checkpoint
        ("report", lambda training, losses: training.step == 0, True),  # before the first line
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, uninterrupted, folder, monkeypatch, name, when, after):
    cases.stopped_run(monkeypatch, name, when, tmp_path, STOCHASTIC, after=after)
    pretrained(tmp_path, STOCHASTIC)
    assert {x.name for x in tmp_path.iterdir()} == {x.name for x in folder.iterdir()}
    for file in folder.glob("*.pt"):
        cases.assert_same_bits(saved(tmp_path / file.name), saved(file))


# Divergence


# What is poisoned, the step where the run ends, and why. Guessing is ln 16 = 2.7726.
DIVERGENCES = {
    "gradient right after a report": ({"step": 4, "gradient": math.inf}, {}, 4, "the gradient of step 4 is not finite"),
    "first step": ({"step": 0, "loss": math.nan}, {}, 0, "the loss of step 0 is not finite"),
    "guessing": ({"step": 4, "loss": 2.9}, {}, 8, "the loss before step 8 is 2.900, that of guessing 2.773"),
    "part of the warm-up is not judged": (
        {"step": 0, "loss": 2.9}, {"warmup_steps": 5}, 12, "the loss before step 12 is 2.900, that of guessing 2.773"
    ),
    "nor are the first steps": (
        {"step": 0, "loss": 2.9}, {"warmup_steps": 0}, 8, "the loss before step 8 is 2.900, that of guessing 2.773"
    ),
    "as good as guessing": ({"step": 0, "loss": 2.77}, {}, 12, None),
}  # fmt: skip


@pytest.mark.parametrize("case", DIVERGENCES)
def test_divergence_ends_the_run_as_a_result_also_if_it_is_killed_as_it_diverges(tmp_path, monkeypatch, case):
    poison, changes, step, reason = DIVERGENCES[case]
    settings = replace(SETTINGS, **changes)
    cases.poisoned(monkeypatch, **poison)
    if reason:
        cases.stopped_run(monkeypatch, "save", lambda training, path: training.diverged, tmp_path, settings=settings)
    training = pretrained(tmp_path, settings=settings)
    row, state = result_row(training), saved(tmp_path / "run.pt")
    assert (row["diverged"], row["steps"]) == (reason, step)
    assert (row["final_val_loss"] is None) == (reason is not None)
    assert all(x.isfinite().all() for x in state["model"].values())
    monkeypatch.undo()  # nothing is poisoned any more, but it stays ended
    assert result_row(pretrained(tmp_path, settings=settings)) == row


# Probes, and the row of a record


@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto' uses the reference:UserWarning")
def test_a_probe_is_the_error_of_the_gradient_at_every_report_once_and_changes_nothing(tmp_path, monkeypatch):
    """Whatever the run itself trains with; an arm's settings reach both the reference and `sagebwd_attention`."""
    config = replace(CONFIG, backend="reference", **ARMS["unsmoothed"])
    run = config, replace(SETTINGS, steps=2, report_every=1, probe_sequences=2)
    when = lambda training, path: training.step == 2  # noqa: E731
    cases.stopped_run(monkeypatch, "save", when, tmp_path, *run)
    training = pretrained(tmp_path, *run)
    assert [row["step"] for row in training.probes] == [0, 1, 2]
    assert saved(tmp_path / "run.pt")["probes"] == training.probes
    plain = pretrained(tmp_path / "plain", config, replace(run[1], probe_sequences=0))
    cases.assert_same_bits(dict(plain.model.state_dict()), dict(training.model.state_dict()))

    def gradients(config):
        model = Llama(config)
        model.load_state_dict(training.model.state_dict())
        next_token_loss(model, *training.validation_batch(2)).backward()
        return torch.cat([x.grad.flatten() for x in model.parameters()])

    def error(found):
        return pytest.approx(((found - exact).norm() / exact.norm()).item(), rel=0.01, abs=1e-5)

    exact, last = gradients(CONFIG), training.probes[-1]
    for arm, changes in ARMS.items():
        assert last["errors"][arm] == error(gradients(replace(CONFIG, **changes)))
    assert len(set(last["errors"].values())) == len(ARMS)
    assert last["gradient_norm"] == pytest.approx(exact.norm().item(), rel=1e-3)
    assert last["attention"]["between"] == {name: [0.0, 0.0] for name in ("dQ", "dK", "dV")}


def test_the_largest_score_is_that_of_a_query_and_a_key_that_it_sees():
    query = torch.tensor([[[[3.0, 0, 0, 0], [0, -2, 0, 0]]]])
    key = torch.tensor([[[[1.0, 2, 0, 0], [100, 0, 0, 0]]]])  # query 0 does not see key 1
    assert largest_score(query, key) == 2.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"smooth_k": False, "granularity": "block"}, ("none", "block", 128, 128, "nearest", "none", "reference")),
        ({"smooth_q": True, "block_q": 8, "block_kv": 16}, ("qk", "row", 8, 16, "nearest", "none", "reference")),
        ({"attention": "exact"}, (None,) * 7),
    ],
)
def test_the_row_of_a_run_names_what_attention_it_had(changes, expected):
    training = new_training(replace(CONFIG, **{"attention": "sagebwd", "backend": "reference"} | changes))
    training.report([])
    names = ("smoothing", "granularity", "block_q", "block_kv", "ds_rounding", "remedy", "backend")
    assert tuple(result_row(training)[name] for name in names) == expected
