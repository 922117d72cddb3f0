"""SLA2's training in the kernels, through the function that both backends share: stage 1 and the matched backward."""

import pytest
import torch
from kernel_cases import DEVICE, MARKS, ON_GPU

from sage_ref.sla2 import EQUATIONS_16_17, SLA2, BlockSettings, block_count
from sage_ref.sla2.api import dispatch

pytestmark = MARKS
DTYPES = (torch.float16, torch.bfloat16) if ON_GPU else (torch.float16,)  # the interpreter multiplies bfloat16 wrongly
SHAPES = [(1, 1, 2, 2, 32), (130, 190, 2, 1, 64), (128, 70, 1, 1, 48)] + [(1000, 1500, 4, 2, 128)] * ON_GPU
# The linear branch's sums are in bfloat16 on a GPU.
ERROR = 1.5e-2 if ON_GPU else 2e-3


def drawn(n_q, n_k, heads, kv_heads, head_dim, dtype, size=None):
    """Return Q, K, V, dO, alpha; scores are up to `size`."""
    generator = torch.Generator().manual_seed(n_q)
    lengths = ((heads, n_q), (kv_heads, n_k), (kv_heads, n_k), (heads, n_q))
    q, k, v, do = (torch.randn(1, h, n, head_dim, generator=generator) for h, n in lengths)
    if size is not None:
        factor = (size * head_dim**0.5 / (q @ k.repeat_interleave(heads // kv_heads, 1).mT).abs().max()) ** 0.5
        q, k = q * factor, k * factor
    alpha = torch.rand(1, heads, block_count(n_q, 128), generator=generator)
    return *(x.to(DEVICE, dtype) for x in (q, k, v, do)), alpha.to(DEVICE)


def gradients(tensors, chooser, settings, backend):
    """Return O and the gradients of Q, K, V, alpha and, if they are floating, of the blocks' weights."""
    *qkv, do, alpha = tensors
    leaves = [x.detach().requires_grad_() for x in (*qkv, alpha, *[chooser] * chooser.is_floating_point())]
    output = dispatch(*leaves[:3], leaves[4] if len(leaves) > 4 else chooser, settings, leaves[3], backend)
    return output, *torch.autograd.grad(output, leaves, do)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_q", "n_k", "heads", "kv_heads", "head_dim"), SHAPES)
def test_stage_1_computes_weighted_blocks_and_what_their_router_learns_from(n_q, n_k, heads, kv_heads, head_dim, dtype):
    """Weights from 0 to 1 and of very different sizes, beside the reference in float64."""
    *qkv, do, alpha = drawn(n_q, n_k, heads, kv_heads, head_dim, dtype)
    shape = 1, heads, block_count(n_q, 128), block_count(n_k, 64)
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) ** 8
    weights[..., 0] = 1.0
    weights[:, :, 1:, -1] = 0.0
    found = gradients((*qkv, do, alpha), weights, BlockSettings(), "triton")
    expected = gradients([x.double() for x in (*qkv, do, alpha)], weights.double(), BlockSettings(), "reference")
    for name, x, y in zip(("O", "dQ", "dK", "dV", "dalpha", "dW"), found, expected, strict=True):
        if name == "dW":  # a block of weight 0 was not computed
            assert not x[weights == 0].any()
            x, y = x[weights > 0], y[weights > 0]
        floor = 1e-3 * do.norm() if name != "dW" else 1e-3 * do.norm() * y.numel() ** 0.5
        assert (x.double() - y).norm() <= ERROR * y.norm() + ERROR * floor, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_router_learns_by_equations_16_and_17_as_on_the_reference(dtype):
    """Weights from 1e-9 to 1; the gradients of both projections and of alpha."""
    q, k, v, do, _ = drawn(130, 700, 2, 1, 64, dtype)
    found = {}
    for backend in ("triton", "reference"):
        core = SLA2(64, 2, sparsity=0.7, relaxation=EQUATIONS_16_17, backend=backend).to(DEVICE).stage(1)
        output = core(q, k, v)
        found[backend] = output, *torch.autograd.grad(output, list(core.parameters()), do)
    for x, y in zip(*found.values(), strict=True):
        assert (x.double() - y.double()).norm() <= 2 * ERROR * y.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [5.0, 500.0])
def test_alpha_starts_at_the_references_mass(dtype, size):
    q, k, *_ = drawn(300, 700, 2, 1, 64, dtype, size=size)
    alphas = {}
    for backend in ("triton", "reference"):
        core = SLA2(64, 2, sparsity=0.7, query_blocks=3, backend=backend).to(DEVICE)
        core.initialize_alpha(q, k)
        alphas[backend] = core.alpha(1, 3)
    assert (1 - alphas["reference"]).max() > 0.02
    assert (alphas["triton"] - alphas["reference"]).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_q", "n_k", "heads", "kv_heads", "head_dim"), SHAPES[1:])
def test_rows_of_the_matched_p_sum_to_one_where_those_of_the_printed_one_do_not(
    n_q, n_k, heads, kv_heads, head_dim, dtype
):
    """With alpha = 1 and dO the first rows of the identity, the sum of dV over the keys is those rows' sums of P."""
    q, k, v, do, alpha = drawn(n_q, n_k, heads, kv_heads, head_dim, dtype, size=200.0)
    do, alpha = torch.zeros_like(do), torch.ones_like(alpha)
    rows = min(n_q, head_dim)
    do[:, ::2, :rows, :rows] = torch.eye(rows)
    mask = torch.ones(1, heads, block_count(n_q, 128), block_count(n_k, 64), dtype=torch.bool, device=DEVICE)
    mask[..., 1::2] = False
    worst = {}
    for backward, options in (("printed", {"backward": "printed"}), ("matched", {})):  # matched by default
        settings = BlockSettings(quantize=True, **options)
        _, _, _, dv, _ = gradients((q, k, v, do, alpha), mask, settings, "triton")
        sums = dv.double().sum(2)[..., :rows] / (len(range(0, heads, 2)) / kv_heads)
        worst[backward] = (sums - 1).abs().max().item()
    assert worst["matched"] < (1e-2 if dtype == torch.bfloat16 else 2e-3)  # the rounding of P and dV to 16 bit
    assert worst["printed"] > 0.2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_q", "n_k", "heads", "kv_heads", "head_dim"), SHAPES[1:])
def test_matched_gradients_are_the_references(n_q, n_k, heads, kv_heads, head_dim, dtype):
    tensors = drawn(n_q, n_k, heads, kv_heads, head_dim, dtype, size=20.0)
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(1, heads, block_count(n_q, 128), block_count(n_k, 64), generator=generator).to(DEVICE) < 0.7
    settings = BlockSettings(quantize=True, backward="matched")
    found = gradients(tensors, mask, settings, "triton")
    expected = gradients([x.float() for x in tensors], mask, settings, "reference")
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= 2 * ERROR * y.double().norm() + 1e-3 * ERROR * tensors[3].double().norm()
