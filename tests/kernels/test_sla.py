"""SLA by SLA2's kernels: O_s with alpha = 1, O_l with alpha = 0, equal to SLA in plain PyTorch."""

import pytest
import torch
from torch import nn

from sage_ref.sla2 import SLA


def test_sla_by_the_kernels_equals_the_reference_forward_and_backward():
    torch.manual_seed(0)
    found = {}
    inputs = [torch.randn(1, 1, 128, 32) for _ in range(4)]
    for backend in ("reference", "triton"):
        sla = SLA(32, 1, sparsity=0.5, backend=backend)
        nn.init.eye_(sla.proj.weight)  # at its start, 0, the linear branch has no effect
        q, k, v, do = (x.half().requires_grad_() for x in inputs)
        output = sla(q, k, v)
        gradients = torch.autograd.grad(output, (q, k, v, sla.proj.weight), do.detach())
        found[backend] = [x.float() for x in (output, *gradients)]
    for name, x, y in zip(("O", "dQ", "dK", "dV", "dProj"), found["triton"], found["reference"], strict=True):
        assert ((x - y).norm() / y.norm()).item() < 4e-3, name


@pytest.mark.parametrize("options", [{"skipped": 0.1}, {"feature_map": "relu"}])
def test_what_the_kernels_cannot_do_is_refused(options):
    with pytest.raises(ValueError, match=r"^backend: expected 'reference', which alone takes skipped=.*, got 'auto'"):
        SLA(32, 1, sparsity=0.5, backend="auto", **options)
