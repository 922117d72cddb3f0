"""SLA2 in a model that two processes train or share: DDP, FSDP2, diffusers' enable_parallelism; on two GPUs, too."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from process_cases import run_together
from sage_lab.training.processes import processes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sage_ref import SLA2
from sage_ref.integrations.diffusers import initialize_alpha, install_sla2, stage


class Layer(torch.nn.Module):
    """Projections and SLA2 on two heads of 32, x + what they give."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 192)
        self.attention = SLA2(32, 2, sparsity=0.5, backend="reference")

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return x + self.attention(q, k, v).transpose(1, 2).flatten(2)


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(), Layer()).to(device)


def batch(device):
    x = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 5])[:, None, None]
    return x.to(device)


def sharded(model):
    """Not the parameters of the second layer's attention by themselves: the root gathers them."""
    fully_shard(model[0].attention)
    return fully_shard(model)


WRAPS = {"ddp": DistributedDataParallel, "fsdp2": sharded}


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu().clone()


def trained(wrap, device, examples):
    """Alphas that are set in a wrapped model, and the gradients of its stage 1."""
    wrapped = wrap(stage_1(model(device)))
    x = batch(device)[examples]
    initialize_alpha(wrapped, x)
    alphas = [whole(p) for name, p in wrapped.named_parameters() if "alpha_logit" in name]
    wrapped(x).square().mean().backward()
    return alphas, [whole(p.grad) for p in wrapped.parameters()]


def stage_1(model):
    stage(model, 1)
    return model


def too_late(change, device):
    """What a model says whose stage changes, or whose frozen alpha is to train, after DDP was put around it."""
    inner = model(device)
    inner[1].attention.requires_grad_(False)
    wrapped = DistributedDataParallel(inner)
    change(wrapped)
    try:
        wrapped(batch(device)).sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


LATE = {
    "stage 1": partial(stage, number=1),
    "a frozen alpha": lambda wrapped: wrapped.module[1].attention.stage(2),
}


def wan(device):
    """A tiny Wan with SLA2: two heads of 32, 512 tokens of video."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    with torch.no_grad():
        for block in model.blocks:
            block.scale_shift_table.mul_(10)
    return model.to(device).eval()


def video(device):
    generator = torch.Generator().manual_seed(2)
    shapes = {"hidden_states": (1, 4, 2, 32, 32), "encoder_hidden_states": (1, 12, 16)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["timestep"] = torch.tensor([500])
    return {name: x.to(device) for name, x in tensors.items()} | {"return_dict": False}


def in_parallel(device, order, **degrees):
    """A Wan's output and first alpha, or the error, where diffusers divides its tokens before or after SLA2 comes."""
    from diffusers import ContextParallelConfig

    shared = wan(device)
    steps = {
        "parallel": lambda: shared.enable_parallelism(config=ContextParallelConfig(**degrees)),
        "sla2": lambda: install_sla2(shared, sparsity=0.5, backend="reference"),
    }
    try:
        for name in order:
            with patch.object(torch.accelerator, "device_count", lambda: 2):  # without a GPU diffusers divides by it
                steps[name]()
        initialize_alpha(shared, **video(device))
        with torch.no_grad():
            return shared(**video(device))[0].cpu(), shared.blocks[0].attn1.processor.attention.alpha_logit.cpu()
    except ValueError as error:
        return str(error)


ORDERS = {"SLA2 first": ("sla2", "parallel"), "SLA2 last": ("parallel", "sla2")}


def everything(folder, device, with_diffusers):
    """What this process finds, in a file."""
    with processes(device) as world:
        found = {name: trained(wrap, world.device, [world.rank]) for name, wrap in WRAPS.items()}
        found |= {name: too_late(change, world.device) for name, change in LATE.items()}
        if with_diffusers:
            found |= {name: in_parallel(world.device, order, ulysses_degree=2) for name, order in ORDERS.items()}
            found["ring"] = in_parallel(world.device, ORDERS["SLA2 first"], ring_degree=2)
        torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")


def has_diffusers():
    try:
        import diffusers  # noqa: F401
    except ImportError:
        return False
    return True


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])])
def found(request, tmp_path_factory):
    """The device, and what each process finds."""
    folder, device = tmp_path_factory.mktemp("processes"), request.param
    if device == "cpu":
        run_together(folder, everything, folder, device, has_diffusers())
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        found_here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*torchrun, __file__, folder, device], check=True, env=found_here)
    return device, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", WRAPS)
def test_every_process_gets_the_alpha_and_the_gradients_of_the_whole_batch(found, name):
    device, both = found
    alphas, gradients = trained(lambda model: model, device, [0, 1])
    for one in both:
        for ours, expected in zip(one[name][0] + one[name][1], alphas + gradients, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    assert all(x.equal(y) for x, y in zip(both[0][name][0], both[1][name][0], strict=True))


@pytest.mark.parametrize("name", LATE)
def test_what_ddp_would_not_average_is_refused(found, name):
    for one in found[1]:
        assert one[name].startswith("stage: expected it before DistributedDataParallel, which averages the gradients")


@pytest.mark.parametrize("name", ORDERS)
def test_diffusers_processes_attend_to_the_whole_sequence(found, name):
    pytest.importorskip("diffusers", reason="needs the extra diffusers")
    device, both = found
    alone = wan(device)
    install_sla2(alone, sparsity=0.5, backend="reference")
    initialize_alpha(alone, **video(device))
    with torch.no_grad():
        expected = alone(**video(device))[0].cpu()
    for one in both:
        assert not isinstance(one[name], str), one[name]
        output, alpha = one[name]
        torch.testing.assert_close(alpha, alone.blocks[0].attn1.processor.attention.alpha_logit.cpu())
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_diffusers_ring_is_refused(found):
    pytest.importorskip("diffusers", reason="needs the extra diffusers")
    for one in found[1]:
        assert one["ring"] == "ring_degree: expected 1, since SLA2 has no ring: use ulysses_degree, got 2"


if __name__ == "__main__":  # under torchrun
    everything(*sys.argv[1:], has_diffusers())
