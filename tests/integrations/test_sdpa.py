"""`with sdpa():` in models that nobody wrote for it."""

import asyncio
import contextlib
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sage_ref import backend, sagebwd_attention, sdpa
from sage_ref.checks import Fitting
from sage_ref.integrations import calls, pytorch
from sage_ref.tracing import relative_l2

REFERENCE = {"backend": "reference"}
sdpa_of_pytorch = F.scaled_dot_product_attention


@pytest.fixture
def qkv():
    return [torch.randn(2, 4, 150, 16, requires_grad=True) for _ in range(3)]


def with_gradients(function, tensors, *arguments, **options):
    output = function(*tensors, *arguments, **options)
    return output, *torch.autograd.grad(output.square().sum(), tensors)


def all_equal(found, expected):
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(found, expected, strict=True))


class Model(nn.Module):
    """As people write them: projections, SDPA by whatever name they imported it, one more projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


# What is taken


OTHER_CHOICE = {"smooth_k": False, "smooth_q": True, "granularity": "block", "unbiased": True}


GROUPED = (None, 0.0, True), {"scale": 0.1, "enable_gqa": True}


@pytest.mark.parametrize(
    ("choice", "arguments", "options"), [({}, (), {"enable_gqa": True}), ({}, *GROUPED), (OTHER_CHOICE, *GROUPED)]
)
def test_calls_inside_are_those_of_sagebwd_and_calls_outside_are_not(qkv, choice, arguments, options):
    qkv = [qkv[0], *(x[:, :2].detach().requires_grad_() for x in qkv[1:])]
    exact = with_gradients(F.scaled_dot_product_attention, qkv, *arguments, **options)
    with sdpa(**choice, **REFERENCE) as routed:
        ours = with_gradients(F.scaled_dot_product_attention, qkv, *arguments, **options)
    assert routed.taken == 1
    assert all_equal(ours, with_gradients(sagebwd_attention, qkv, *arguments, **options, **choice, **REFERENCE))
    assert all_equal(exact, with_gradients(F.scaled_dot_product_attention, qkv, *arguments, **options))
    assert not torch.equal(ours[0], exact[0])


def test_calls_of_fewer_tokens_than_asked_for_stay_exact(qkv):
    short = [x[:, :, :100].detach().requires_grad_() for x in qkv]
    exact = [with_gradients(F.scaled_dot_product_attention, tensors) for tensors in (short, qkv)]
    for least, taken in ((0, 2), (None, 2), (101, 1), (151, 0)):  # None: on a CPU nothing is chosen
        with sdpa(minimum_tokens=least, **REFERENCE) as routed:
            found = [with_gradients(F.scaled_dot_product_attention, tensors) for tensors in (short, qkv)]
            F.scaled_dot_product_attention(qkv[0][:, :, :1], *qkv[1:])  # one query is few, however many keys there are
            if least:
                F.scaled_dot_product_attention(*short, torch.eye(100) < 1)  # nobody is told of a mask that is not read
        assert routed.taken == taken + (not least)
        assert all_equal(found[0], exact[0]) is bool(least)
        assert all_equal(found[1], exact[1]) is (taken == 0)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_of_pytorch_is_taken_in_both_modes(training):
    """Its MultiheadAttention calls SDPA where a mode doesn't look, and in eval mode a fused kernel."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).train(training)
    padding = torch.arange(40).expand(2, 40) >= torch.tensor([[40], [25]])
    with torch.no_grad():
        layer.self_attn.in_proj_weight.mul_(3)
        x = torch.randn(2, 40, 32)
        for options in ({}, {"src_key_padding_mask": padding}):
            exact = layer(x, **options)
            with sdpa(otherwise="error", **REFERENCE) as routed:
                ours = layer(x, **options)
            assert routed.taken == 1
            assert 1e-4 < relative_l2(ours[~padding], exact[~padding]) < 0.02


# What is not taken, and why


MASK = torch.ones(150, 150, dtype=torch.bool).triu()
OTHERS = {  # how a call differs, and why SageBwd can't compute it; test_parts.py has the masks
    "dropout": ({"dropout_p": 0.25}, r"dropout: expected 0, .*, got 0\.25"),
    "a tensor as scale": ({"scale": torch.tensor(0.25)}, "scale: expected a float or None, got Tensor"),
    "three dimensions": ({"cut": lambda *qkv: [x[0] for x in qkv]}, "query: expected 4 dimensions .*"),
    "head sizes": ({"cut": lambda q, k, v: (q, k, v[..., :8])}, "value: expected the head size .* 16, got 8"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_asks_for_more_stays_exact_and_says_why_once_whatever_came(qkv, name):
    options, message = OTHERS[name]
    options = dict(options)
    cut = options.pop("cut", lambda *tensors: tensors)

    def attention(tokens):
        torch.manual_seed(1)
        return F.scaled_dot_product_attention(*cut(*(x[:, :, :tokens] for x in qkv)), **options)

    expected = [attention(tokens) for tokens in (40, 30)]
    with sdpa(**REFERENCE) as routed, pytest.warns(UserWarning, match=f"stays exact .*: {message}") as caught:
        found = [attention(tokens) for tokens in (40, 30)]
    assert all_equal(found, expected)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert routed.taken == 0
    with sdpa(otherwise="error"), pytest.raises(ValueError, match=f"^{message}$"):
        attention(40)


def test_weights_of_attention_are_never_there():
    attention, x = nn.MultiheadAttention(32, 2, batch_first=True), torch.randn(2, 40, 32)
    expected = attention(x, x, x)
    with sdpa(**REFERENCE), pytest.warns(UserWarning, match="need_weights: expected False") as caught:
        assert all_equal(attention(x, x, x), expected)
    assert len(caught) == 1


# Nested, several tasks


def test_nested_the_innermost_takes_what_it_can_and_hands_on_the_rest(qkv):
    with sdpa(smooth_k=False, otherwise="error", **REFERENCE) as outer:
        with sdpa(**REFERENCE) as inner:
            found = F.scaled_dot_product_attention(*qkv)
            with pytest.warns(UserWarning, match="mask"), pytest.raises(ValueError, match="mask"):
                F.scaled_dot_product_attention(*qkv, attn_mask=MASK)
        assert torch.equal(found, sagebwd_attention(*qkv, **REFERENCE))
        assert (inner.taken, outer.taken) == (1, 0)
        found = F.scaled_dot_product_attention(*qkv)
        assert torch.equal(found, sagebwd_attention(*qkv, smooth_k=False, **REFERENCE))
    assert (inner.taken, outer.taken) == (1, 1)


def test_it_holds_in_the_asyncio_task_that_entered_it_and_in_those_started_inside(qkv):
    """Tasks take turns in one thread, and leave their contexts in any order."""
    sagebwd = partial(sagebwd_attention, **REFERENCE)
    exact, ours, other = F.scaled_dot_product_attention(*qkv), sagebwd(*qkv), sagebwd(*qkv, smooth_k=False)

    async def is_now(expected):
        return torch.equal(F.scaled_dot_product_attention(*qkv), expected)

    async def first(mine, theirs):
        with sdpa(**REFERENCE):
            mine.set()
            await theirs.wait()
            return [await is_now(ours), await asyncio.create_task(is_now(ours))]

    async def second(theirs, mine):
        await theirs.wait()
        found = [await is_now(exact)]
        with sdpa(smooth_k=False, **REFERENCE):
            mine.set()
            await asyncio.sleep(0.1)  # meanwhile the first one leaves
            return [*found, await is_now(other)]

    async def both():
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(first(*events), second(*events))

    assert all(itertools.chain(*asyncio.run(both())))
    assert not torch.overrides._get_current_function_mode_stack()


# A GPU: no call falls to the reference, which builds N x N scores


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The CPU stands in for a GPU, whose kernels take none of these calls."""
    monkeypatch.setattr(backend, "is_accelerator", lambda device: True)
    monkeypatch.setattr(calls, "is_accelerator", lambda device: True)
    monkeypatch.setattr(pytorch, "FITTING", Fitting())  # what was found on the CPU


REFUSED = "expected a call for the kernels, but .*; take float16 or bfloat16, a head size from 32 to 128, or backend="


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.float16, 256)])
def test_on_a_gpu_what_the_kernels_cannot_compute_is_exact_or_an_error(dtype, head_dim):
    qkv = [torch.randn(1, 2, 40, head_dim).to(dtype) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*qkv)
    with sdpa() as routed, pytest.warns(UserWarning, match=f"stays exact .* backend: {REFUSED}"):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), expected)
    assert routed.taken == 0
    with sdpa(**REFERENCE) as routed:
        F.scaled_dot_product_attention(*qkv)
    assert routed.taken == 1
    with sdpa(otherwise="error"), pytest.raises(ValueError, match=f"^backend: {REFUSED}"):
        F.scaled_dot_product_attention(*qkv)
    with pytest.raises(ValueError, match=f"^backend: {REFUSED}"):
        sagebwd_attention(*qkv)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*attention stays exact")
def test_a_head_size_that_the_kernels_lack_takes_the_memory_that_sdpa_takes():
    peaks = []
    for context in (contextlib.nullcontext(), sdpa()):
        qkv = [torch.randn(1, 2, 16384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        with context:
            F.scaled_dot_product_attention(*qkv, is_causal=True).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del qkv
    assert peaks[1] <= 1.01 * peaks[0]
    x = torch.randn(1, 2, 16384, 64, device="cuda")
    with pytest.raises(ValueError, match=f"^backend: {REFUSED}"):
        sagebwd_attention(x, x, x)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_captured_no_mask_is_read_and_its_replays_are_no_surprise(recwarn):
    q, k, v = torch.randn(3, 2, 2, 128, 64, device="cuda", dtype=torch.float16)
    mask = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
    graph = torch.cuda.CUDAGraph()
    with sdpa(minimum_tokens=0):
        F.scaled_dot_product_attention(q, k, v)  # compiles
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=False)
        with torch.cuda.graph(graph):
            output = F.scaled_dot_product_attention(q, k, v)
            with pytest.warns(UserWarning, match="in a CUDA graph, where no mask can be read"):
                F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa():
        graph.replay()
    assert not [x for x in recwarn if "got none" in str(x.message)]
    assert torch.equal(output, sagebwd_attention(q, k, v))


# Strides, and what others do with F.scaled_dot_product_attention


def in_order(order):
    """Q, K, V [2, 3, 50, 16] whose dimensions are in memory in this order, between those of the others."""
    shape = [(2, 3, 50, 16)[dim] for dim in order]
    return torch.randn(*shape[:2], 3, *shape[2:]).movedim(2, 0).permute(0, *(1 + order.index(dim) for dim in range(4)))


PADDED = torch.ones(2, 1, 50, 50, dtype=torch.bool).tril()
PADDED[1, ..., 40:] = False
WAYS = {"at once": {}, "by parts": {"attn_mask": PADDED}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 3, 2)])
def test_the_output_has_the_strides_that_sdpa_gives(order, way):
    one_head = [x[:, :1].expand(2, 3, 50, 16) for x in in_order(order)]
    for qkv in (in_order(order), one_head):
        expected = F.scaled_dot_product_attention(*qkv, **WAYS[way])
        with sdpa(**REFERENCE):
            assert F.scaled_dot_product_attention(*qkv, **WAYS[way]).stride() == expected.stride()


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("how", ["replaced before", "replaced inside", "exported"])
def test_a_function_in_place_of_sdpa_and_an_exported_module_are_seen(monkeypatch, how):
    qkv, model = tuple(torch.randn(3, 2, 4, 150, 16)), Attention()
    expected = sagebwd_attention(*qkv, **REFERENCE)
    if how == "exported":
        model = torch.export.export(model, qkv).module()
    replaced = partial(monkeypatch.setattr, F, "scaled_dot_product_attention", lambda *x: sdpa_of_pytorch(*x))
    _ = how == "replaced before" and replaced()
    with sdpa(otherwise="error", **REFERENCE) as routed:
        _ = how == "replaced inside" and replaced()
        assert torch.equal(model(*qkv), expected)
    assert routed.taken == 1


def test_where_no_call_is_seen_that_is_said_once(qkv, monkeypatch):
    monkeypatch.setattr(pytorch, "_has_compiled", lambda: False)  # by a test before this one
    monkeypatch.setattr(sdpa, "captured", False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v: (q @ k.mT).softmax(-1) @ v)

    def run():
        with sdpa(**REFERENCE):
            Attention()(*qkv)

    message = "sdpa: expected calls of .*, got none: TorchScript.*replaced by a different function"
    with pytest.warns(UserWarning, match=message) as caught:
        _ = [run() for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with sdpa(**REFERENCE), sdpa(**REFERENCE):
        sdpa_of_pytorch(*qkv)  # the outer context has seen it, too


def test_a_dtensor_is_a_named_error(qkv, tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensors = [DTensor.from_local(x.detach(), init_device_mesh("cpu", (1,)), [Replicate()]) for x in qkv]
        with pytest.raises(TypeError, match="^query: expected one device's tensor .*, got a DTensor$"):
            sagebwd_attention(*tensors)
    finally:
        destroy_process_group()


def test_the_reference_is_exported_for_any_number_of_tokens():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return sagebwd_attention(q, k, v, is_causal=True, **REFERENCE)

    many = torch.export.Dim("tokens", min=2, max=4096)
    example = tuple(torch.randn(3, 1, 2, 200, 16))
    exported = torch.export.export(Model(), example, dynamic_shapes=({2: many},) * 3).module()
    for tokens in (2, 128, 300):
        qkv = torch.randn(3, 1, 2, tokens, 16)
        assert torch.equal(exported(*qkv), Model()(*qkv))


# torch.compile, checkpoints, autocast

COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@COMPILED
def test_compiled_from_outside_and_inside_without_a_graph_break():
    torch._dynamo.reset()
    model, x = Model(), torch.randn(2, 40, 64)
    with sdpa(**REFERENCE):
        ours = model(x)
    exact = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with sdpa(**REFERENCE):
        assert torch.equal(compiled(x), ours)
    assert torch.equal(compiled(x), exact)
    with sdpa(**REFERENCE):
        assert torch.equal(compiled(x), ours)

    def inside(x):
        with sdpa(**REFERENCE):
            return model(x)

    assert torch.equal(torch.compile(inside, fullgraph=True, backend="eager")(x), ours)

    @torch.compile(backend="eager")
    def broken(x):
        with sdpa(**REFERENCE):
            torch._dynamo.graph_break()
            return x.cos(), x.sin()

    assert torch.equal(broken(x)[1], x.sin())  # and not the cosine again


@COMPILED
def test_multi_head_attention_stays_exact_under_compile_and_that_is_said():
    torch._dynamo.reset()
    layer, x = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), torch.randn(2, 40, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with sdpa(**REFERENCE), pytest.warns(UserWarning, match=r"model: expected no torch\.nn\.MultiheadAttention"):
        found = compiled(x)
    torch.testing.assert_close(found, layer(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_checkpoint_computes_the_same_again_with_the_context_that_the_docstring_names(device):
    """On a GPU it does so in a thread of the autograd engine."""
    qkv = [torch.randn(2, 4, 150, 16, device=device, requires_grad=True) for _ in range(3)]

    def run(**options):
        with sdpa(**REFERENCE):
            return checkpoint(lambda *x: F.scaled_dot_product_attention(*x).sin(), *qkv, use_reentrant=False, **options)

    with sdpa(**REFERENCE):
        expected = with_gradients(lambda *x: F.scaled_dot_product_attention(*x).sin(), qkv)
    contexts = {"context_fn": lambda: (sdpa(**REFERENCE), sdpa(**REFERENCE))}
    assert all_equal(with_gradients(lambda *_: run(**contexts), qkv), expected)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        with_gradients(lambda *_: run(), qkv)


def test_a_selective_checkpoint_may_keep_what_any_matmul_returns(qkv):
    """What is kept must not be written into, nor computed again in the backward pass."""
    kept = {torch.ops.aten.bmm.default, torch.ops.aten.mm.default}

    def policy(_, operation, *arguments, **options):
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    attention = partial(sagebwd_attention, is_causal=True, **REFERENCE)
    contexts = partial(create_selective_checkpoint_contexts, policy)
    found = with_gradients(partial(checkpoint, attention, use_reentrant=False, context_fn=contexts), qkv)
    assert all_equal(found, with_gradients(attention, qkv))
