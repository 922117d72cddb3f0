"""`graphed`: shapes, gradients that add up, and calls that must run as written, with a replay made up for the CPU."""

import pytest
import torch
from torch import nn

from sage_ref import graphed, graphs


class Replay:
    """A made-up `make_graphed_callables`: like a CUDA graph it has one place for inputs, outputs and gradients."""

    captures = 0

    def __init__(self, function, samples, allow_unused_input, pool):
        Replay.captures += 1
        assert not any(isinstance(x, nn.Parameter) for x in samples)  # autograd may know them from the default stream
        self.function, self.samples = function, samples
        self.leaves = [x for x in samples if x.requires_grad]
        self.output, self.gradients = None, [torch.zeros_like(x) for x in self.leaves]

    def __call__(self, *inputs):
        replay = self

        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                for sample, x in zip(replay.samples, tensors, strict=True):
                    if sample.data_ptr() != x.data_ptr():
                        sample.data.copy_(x)
                with torch.enable_grad():
                    computed = replay.function(*replay.samples)
                replay.computed = computed
                replay.output = computed.detach() if replay.output is None else replay.output.copy_(computed.detach())
                return replay.output.detach()

            @staticmethod
            def backward(ctx, grad):
                found = torch.autograd.grad(replay.computed, replay.leaves, grad)
                for kept, x in zip(replay.gradients, found, strict=True):
                    kept.copy_(x)
                gradients = iter(replay.gradients)
                return tuple(next(gradients).detach() if x else None for x in ctx.needs_input_grad)

        return Replayed.apply(*inputs)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", Replay)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", tuple)
    monkeypatch.setattr(graphs, "_are_on_gpu", lambda inputs: True)
    monkeypatch.setattr(Replay, "captures", 0)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rows, seed=0):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def trained(module):
    """Losses and weights of three steps, each of passes of 3, 3 and 2 examples."""
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.1), []
    for step in range(3):
        for number, rows in enumerate((3, 3, 2)):
            loss = module(batch(rows, 10 * step + number)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(x.detach() for x in module.parameters())]


@pytest.mark.parametrize("made", [lambda: graphed(model()), lambda: graphed(graphed(model()))])
def test_gradients_add_up_over_passes_of_any_shape(made):
    plain, replayed = trained(model()), trained(made())
    assert all(x.equal(y) for x, y in zip(plain, replayed, strict=True))
    assert Replay.captures == 2


def test_outputs_and_gradients_of_inputs_are_not_overwritten():
    plain, replayed = model(), graphed(model())
    inputs = [batch(3, seed).requires_grad_() for seed in range(2)]
    outputs = []
    for _ in range(2):
        for x in inputs:
            outputs.append(replayed(x))
            outputs[-1].sum().backward()
    assert all(output.equal(plain(x)) for output, x in zip(outputs, (*inputs, *inputs), strict=True))
    for x in inputs:
        (expected,) = torch.autograd.grad(plain(x).sum(), x)
        assert x.grad.equal(2 * expected)


def test_a_call_whose_predecessor_waits_for_its_backward_pass_runs_as_written():
    plain, replayed = model(), graphed(model())
    results = []
    for module in (plain, replayed):
        first, second = module(batch(3, 1)), module(batch(3, 2))
        (first * second).sum().backward()
        results.append([x.grad for x in module.parameters()])
    assert all(x.equal(y) for x, y in zip(*results, strict=True))
    output = replayed(batch(3, 3))
    del output  # nothing waits any more
    loss = replayed(batch(3, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="^graphed: expected one backward pass of each call, got a second one"):
        loss.backward()


def test_calls_that_cannot_be_replayed_run_as_written(monkeypatch):
    module, x = graphed(model()), batch(3)
    expected = module(x).detach()
    monkeypatch.setattr(Replay, "__call__", None)
    with torch.no_grad():
        assert module(x).equal(expected)
    assert module.eval()(x).equal(expected)
    assert module.train()(input=x).equal(expected)
    monkeypatch.setattr(graphs, "SHAPES_KEPT", 1)
    assert module(batch(5)).shape == (5, 2)
    assert Replay.captures == 1


def test_a_parameter_that_is_frozen_or_unfrozen_is_captured_anew():
    plain, replayed = model(), graphed(model())
    for module in (plain, replayed):
        module[0].requires_grad_(False)
        module(batch(3)).sum().backward()
        module[0].requires_grad_(True)
        for seed in range(2):
            module(batch(3, seed)).sum().backward()
    assert Replay.captures == 2
    assert all(x.grad.equal(y.grad) for x, y in zip(plain.parameters(), replayed.parameters(), strict=True))


@pytest.mark.parametrize(("given", "kind"), [(3, "int"), (nn.Linear, "type")])
def test_what_is_no_module_is_refused(given, kind):
    with pytest.raises(TypeError, match=f"^module: expected a torch.nn.Module, got {kind}$"):
        graphed(given)
