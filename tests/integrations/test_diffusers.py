"""SageBwd as a backend of diffusers, SLA2 as a part of its models: Wan's transformer, tiny, from a config.

Skipped where diffusers is missing.
"""

import copy
import inspect
import pickle
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from sage_ref import sagebwd_attention
from sage_ref.integrations.diffusers import (
    SLA2Processor,
    initialize_alpha,
    install_sla2,
    register,
    sla2_modules,
    stage,
    with_sla2,
)
from sage_ref.tracing import relative_l2

diffusers = pytest.importorskip("diffusers", reason="needs the extra diffusers")
import accelerate  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402

BLOCKS = {"block_q": 64, "block_kv": 32, "backend": "reference"}


@pytest.fixture(autouse=True)
def _registered():
    register(backend="reference")
    before, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(before)  # a model's choice is that of all models


def wan(layers=2):
    """Two heads of 16 features; attn1 is among 192 tokens of the video, attn2 between them and 12 of the text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=layers, rope_max_seq_len=32,
    )  # fmt: skip
    with torch.no_grad():  # as in a trained model, attention weighs, and is not faint beside what passes it by
        for block in model.blocks:
            block.scale_shift_table.mul_(10)
            block.attn1.norm_q.weight.mul_(3)
    return model


@pytest.fixture
def video():
    return {
        "hidden_states": torch.randn(1, 4, 3, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def output_and_gradients(model, video):
    """The output, and the gradients of the weights that make queries and keys of the video's tokens."""
    output = model(**video).sample
    weights = [block.attn1.get_parameter(f"{name}.weight") for block in model.blocks for name in ("to_q", "to_k")]
    return output.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(output.square().sum(), weights)])


# SageBwd, as a backend


def output_and_gradients_of(attention, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = attention(*leaves)
    do = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    return output, *torch.autograd.grad(output, leaves, do)


@pytest.mark.parametrize(
    ("choice", "options", "dtype"),
    [
        ({}, {}, torch.float32),
        ({"unbiased": True}, {"is_causal": True, "scale": 0.2}, torch.bfloat16),
        ({"smooth_k": False}, {"enable_gqa": True}, torch.float32),
    ],
)
def test_the_dispatcher_gets_what_float32_sdpa_gives_and_its_gradients(choice, options, dtype):
    """[B, N, H, D], as diffusers has it. As far off as INT8 is, 2.2% here, and SageBwd's numbers to the last bit."""
    register(backend="reference", **choice)  # again, which changes the options
    tensors = (
        [torch.randn(2, 150, h, 32) for h in (4, 2, 2)] if "enable_gqa" in options else [*torch.randn(3, 2, 150, 4, 32)]
    )
    dispatch = partial(attention_dispatch.dispatch_attention_fn, **options)
    exact = output_and_gradients_of(partial(dispatch, backend="native"), tensors)
    tensors = [x.to(dtype) for x in tensors]
    ours = output_and_gradients_of(partial(dispatch, backend="sagebwd"), tensors)

    def public(*tensors):
        heads_first = (x.transpose(1, 2) for x in tensors)
        return sagebwd_attention(*heads_first, **options, **choice, backend="reference").transpose(1, 2)

    for found, expected, same in zip(ours, exact, output_and_gradients_of(public, tensors), strict=True):
        assert torch.equal(found, same)
        assert 1e-3 < relative_l2(found.float(), expected) < 0.025


CANNOT = [
    ({"dropout_p": 0.5}, r"dropout: expected 0, .*, got 0\.5"),
    ({"attention_kwargs": {"return_lse": True}}, "return_lse: expected False, .*, got True"),
    ({"parallel_config": object()}, "_parallel_config: expected None, .*, got one"),
]


@pytest.mark.parametrize(("options", "message"), CANNOT, ids=["dropout", "return_lse", "parallel"])
def test_what_sagebwd_can_not_do_is_an_error(options, message):
    tensors = [torch.randn(2, 150, 2, 32)] * 3
    with pytest.raises(ValueError, match=f"^{message}$"):
        attention_dispatch.dispatch_attention_fn(*tensors, backend="sagebwd", **options)


def test_a_mask_is_native_attention_with_one_warning_if_asked_for():
    register(backend="reference", otherwise="exact")
    tensors = [torch.randn(2, 150, 2, 32) for _ in range(3)]
    mask = torch.ones(150, 150, dtype=torch.bool).triu()
    expected = attention_dispatch.dispatch_attention_fn(*tensors, attn_mask=mask, backend="native")
    with pytest.warns(UserWarning, match=r"stays exact .*: mask: expected None") as caught:
        found = [attention_dispatch.dispatch_attention_fn(*tensors, attn_mask=mask, backend="sagebwd") for _ in "ab"]
    assert all(torch.equal(x, expected) for x in found)
    assert len(caught) == 1


def test_padding_is_honoured():
    """[B, Nk], as diffusers' models hand over the tokens of a text; the second one has 100."""
    tensors = [torch.randn(2, 150, 2, 32, requires_grad=True) for _ in range(3)]
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, 100:] = False
    dispatch = partial(attention_dispatch.dispatch_attention_fn, attn_mask=mask)
    exact, ours = (output_and_gradients_of(partial(dispatch, backend=name), tensors) for name in ("native", "sagebwd"))
    for found, expected in zip(ours, exact, strict=True):
        assert 1e-3 < relative_l2(found[1], expected[1]) < 0.03
    assert not any(gradient[1, 100:].any() for gradient in ours[2:])


@pytest.mark.parametrize(
    ("name", "message"), [("native", "one that diffusers doesn't have, got 'native'"), ("Sage", "a string in lower")]
)
def test_a_name_that_does_not_fit_is_an_error(name, message):
    with pytest.raises(ValueError, match=f"^name: expected {message}"):
        register(name)


# SLA2, as a part of a model


def test_sla2_takes_the_self_attention_and_with_all_blocks_it_is_exact(video):
    model = wan()
    exact, exact_grad = output_and_gradients(model, video)
    assert len(install_sla2(model, sparsity=0.0, quantize=False, **BLOCKS)) == 2
    assert [name for name, x in model.attn_processors.items() if type(x) is SLA2Processor] == [
        "blocks.0.attn1.processor", "blocks.1.attn1.processor"
    ]  # fmt: skip
    # else many models of diffusers would leave them out
    assert "rotary_emb" in inspect.signature(model.blocks[0].attn1.processor.__call__).parameters
    for module in sla2_modules(model):
        module.alpha_logit.data.fill_(30.0)
    ours, our_grad = output_and_gradients(model, video)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_grad, exact_grad, rtol=1e-3, atol=1e-4)


def test_router_and_alpha_become_parameters_that_train_by_stages():
    model = wan()
    before = set(dict(model.named_parameters()))
    install_sla2(model, sparsity=0.5, **BLOCKS)
    for number, parts in ((1, ("alpha_logit", "router.proj_q.weight", "router.proj_k.weight")), (2, ("alpha_logit",))):
        stage(model, number)
        training = {name for name, x in model.named_parameters() if name not in before and x.requires_grad}
        assert training == {f"blocks.{i}.attn1.processor.attention.{part}" for i in (0, 1) for part in parts}


@pytest.mark.parametrize("shared", [False, True], ids=["two modules", "one in both layers"])
def test_alpha_starts_from_the_mean_mass_of_the_selected_blocks(video, shared):
    model = wan()
    install_sla2(model, sparsity=0.5, **BLOCKS)
    if shared:
        model.blocks[1].attn1.processor = model.blocks[0].attn1.processor
    masses = {module: [] for module in sla2_modules(model)}
    for module, found in masses.items():
        module.register_forward_pre_hook(lambda module, qkv, found=found: found.append(module.selected_mass(*qkv[:2])))
    initialize_alpha(model, **video)
    for module, found in masses.items():
        assert len(found) == 1 + shared
        torch.testing.assert_close(module.alpha_logit.sigmoid()[:, 0], torch.stack(found).mean((0, -1)))
        assert len(module._forward_pre_hooks) == 1


def with_trained_sla2():
    """Routers and alphas that no new ones are like; one layer's options are not the other's."""
    model = wan()
    for number, sparsity, backward in ((0, 0.5, "matched"), (1, 0.7, "printed")):
        install_sla2(model, [f"blocks.{number}.attn1.processor"], sparsity=sparsity, backward=backward, **BLOCKS)
    for module in sla2_modules(model):
        module.router.proj_q.weight.data.normal_()
        module.alpha_logit.data.normal_()
    return model


def loaded(folder, **options):
    return with_sla2(diffusers.WanTransformer3DModel, backend="reference").from_pretrained(folder, **options)


def aligned(model):
    """Parameters in memory of their own. Where a file is mapped they start anywhere, and CPU sums in another order."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


SAVED = {  # dtype, then arguments of save_pretrained and of from_pretrained; the folder has a float32 file, too
    "one file": (torch.float32, {}, {}),
    "many files": (torch.bfloat16, {"max_shard_size": "20KB", "variant": "bf16"}, {"variant": "bf16"}),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_has_the_same_bits_and_dtype_when_it_is_loaded(video, tmp_path, name):
    dtype, saving, loading = SAVED[name]
    model = with_trained_sla2()
    model.save_pretrained(tmp_path)
    model = model.to(dtype)
    model.save_pretrained(tmp_path, **saving)
    other = loaded(tmp_path, **loading).to(dtype)
    assert type(other) is type(model)
    video = {name: x.to(dtype) if x.is_floating_point() else x for name, x in video.items()}
    assert torch.equal(aligned(other)(**video).sample, model(**video).sample)
    assert [(x.sparsity, x.settings.backward) for x in sla2_modules(other)] == [(0.5, "matched"), (0.7, "printed")]
    for (name, ours), (saved_name, saved) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert (name, ours.dtype, ours.requires_grad) == (saved_name, saved.dtype, saved.requires_grad)
        assert torch.equal(ours, saved)


def test_a_new_router_is_never_started_unnoticed(video, tmp_path):
    wan().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="^config: expected one with sla2, .*, got one without$"):
        loaded(tmp_path / "plain")
    with pytest.raises(TypeError, match="^model_class: expected a class of diffusers' models, got 3$"):
        with_sla2(3)
    with_trained_sla2().save_pretrained(tmp_path / "sla2")
    model = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / "sla2")  # alone it knows nothing of SLA2
    assert not list(sla2_modules(model))
    with pytest.warns(UserWarning, match="the model was saved with SLA2.* with_sla2 loads its own") as caught:
        install_sla2(model, sparsity=0.5, **BLOCKS)
    assert caught[0].filename == __file__


def offloaded(model, device):
    accelerate.cpu_offload(model, execution_device=torch.device(device))
    return model


def copied(model, device):
    return copy.deepcopy(model)


def pickled(model, device):
    return pickle.loads(pickle.dumps(model))


def frozen_and_called(model, device):
    model.requires_grad_(False)
    return partial(torch.func.functional_call, model, dict(model.state_dict()), args=())


def averaged(model, device):
    """EMAModel of a model that has not been changed yet, saved and loaded again by diffusers."""
    with_parameters = {"model_cls": with_sla2(type(model), backend="reference"), "model_config": model.config}
    average = EMAModel(model.parameters(), **with_parameters)
    with tempfile.TemporaryDirectory() as folder:
        average.save_pretrained(folder)
        found = EMAModel.from_pretrained(folder, with_parameters["model_cls"])
        found.to(device)
        assert all(torch.equal(*x) for x in zip(found.shadow_params, average.shadow_params, strict=True))
        return aligned(loaded(folder)).to(device)


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.filterwarnings("ignore:It is deprecated to pass a pretrained model name:FutureWarning")  # EMAModel does
@pytest.mark.parametrize("way", [offloaded, copied, pickled, frozen_and_called, averaged])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_model_has_the_same_bits_however_it_is_run(video, way, device):
    model, inputs = with_trained_sla2(), {name: x.to(device) for name, x in video.items()}
    with torch.no_grad():
        expected = copy.deepcopy(model).to(device)(**inputs).sample
        model = model if way is offloaded else model.to(device)
        run = way(model, device)
        arguments = {"kwargs": inputs} if way is frozen_and_called else inputs
        assert all(torch.equal(run(**arguments).sample.to(device), expected) for _ in "ab")


def test_alpha_of_offloaded_weights_is_refused(video):
    with pytest.raises(ValueError, match="^model: expected weights in their places, got offloaded ones: initialise"):
        initialize_alpha(offloaded(with_trained_sla2(), "cpu"), **video)


def test_adapters_on_all_linear_layers_reach_the_router_and_alpha_trains_beside_them(video):
    peft = pytest.importorskip("peft", reason="needs peft")
    model = with_trained_sla2()
    model.add_adapter(peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    stage(model, 1)
    model(**video).sample.square().sum().backward()
    learning = {name for name, x in model.named_parameters() if x.grad is not None and x.grad.any()}
    for name, _ in model.named_parameters():
        assert (name in learning) == ("lora" in name or "processor.attention" in name), name
    adapted = model(**video).sample
    model.disable_adapters()
    for name, parameter in model.named_parameters():  # but those of the routers
        parameter.data *= "router" not in name or "lora" not in name
    model.enable_adapters()
    assert relative_l2(model(**video).sample, adapted) > 1e-4


def unet():
    """Self-attention and cross-attention of two heads of 16, among 64 places of an image."""
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    return diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32,), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        norm_num_groups=8, **blocks,
    )  # fmt: skip


def test_a_processor_that_is_set_later_does_not_replace_sla2():
    """fuse_qkv_projections does so, loading an IP-Adapter, and attention slicing, whose processor calls no SDPA."""
    model, inputs = unet(), (torch.randn(1, 4, 16, 16), 500, torch.randn(1, 5, 16))
    exact = model(*inputs).sample
    modules = install_sla2(model, sparsity=0.7, block_q=32, block_kv=16, backend="reference")
    expected = model(*inputs).sample
    assert relative_l2(expected, exact) > 1e-4
    anew = {name: type(processor)() for name, processor in model.attn_processors.items()}
    changes = model.fuse_qkv_projections, model.unfuse_qkv_projections, partial(model.set_attn_processor, anew)
    for change in changes:
        change()
        assert list(sla2_modules(model)) == modules
        torch.testing.assert_close(model(*inputs).sample, expected, rtol=1e-4, atol=1e-5)
    model.set_attention_slice("auto")
    with pytest.raises(ValueError, match="^processor: expected one that calls .* without attention slicing, got S"):
        model(*inputs)


def test_both_together_and_only_where_asked(video):
    """SLA2 among the video's tokens; SageBwd, chosen before or after, between them and the text."""
    model = wan()
    (module,) = install_sla2(model, ["blocks.1.attn1.processor"], sparsity=0.5, **BLOCKS)
    assert install_sla2(model, ["blocks.1.attn1.processor"], sparsity=0.9, **BLOCKS) == [module]
    assert module.sparsity == 0.5
    of_sla2 = model(**video).sample
    model.set_attention_backend("sagebwd")
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    assert relative_l2(model(**video).sample, of_sla2) > 1e-5
    assert calls == [1]


NO_PROCESSORS = torch.nn.Linear(2, 2)
MISTAKES = [
    (partial(stage, NO_PROCESSORS, 1), r"model: expected one with SLA2 .*, got one without$"),
    (partial(install_sla2, NO_PROCESSORS, ["attn1"]), r"names: expected keys of attn_processors, .*, got 'attn1'$"),
    (
        partial(install_sla2, NO_PROCESSORS),
        "model: expected attention processors of diffusers, got a model without any$",
    ),
    (partial(install_sla2, SimpleNamespace()), "model: expected a torch.nn.Module, got SimpleNamespace$"),
    (partial(install_sla2, torch.nn.Sequential(wan())), "model: expected one of diffusers itself, got .*Sequential$"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_a_model_that_does_not_fit_is_an_error(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()


class Processor:
    """One that attends as it is told."""

    def __init__(self, attend):
        self.attend = attend

    def __call__(self, layer, hidden_states, *_):
        x = hidden_states.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        return self.attend(x).transpose(1, 2).flatten(-2)


def with_an_image(x):
    """Attend also to an image, as IP-Adapters do."""
    return attend(x, x, x) + attend(x, x[:, :, :4], x[:, :, :4])


def with_options(**options):
    return lambda x: attend(x, x, x, **options)


UNKNOWN = {  # how a processor attends
    "by itself": (
        lambda x: x,
        r"processor: expected one that calls F\.scaled_dot_product_attention, .*, got Processor$",
    ),
    "twice": (with_an_image, "processor: expected one self-attention, got a second attention, of 4 keys$"),
    "mask": (with_options(attn_mask=torch.ones(1, 1, dtype=torch.bool)), "mask: expected none, "),
    "dropout": (with_options(dropout_p=0.1), "dropout: expected none, "),
    "causal": (with_options(is_causal=True), "is_causal: expected none, "),
    "scale": (with_options(scale=1.0), "scale: expected none, "),
    "to a text": (
        lambda x: attend(x, x[:, :, :4], x[:, :, :4]),
        "names: expected the self-attentions of this model, got None, and a layer with 192 queries and 4 keys$",
    ),
}


@pytest.mark.parametrize("how", UNKNOWN)
def test_a_processor_that_sla2_can_not_serve_is_an_error(video, how):
    attend, message = UNKNOWN[how]
    model = wan(layers=1)
    model.blocks[0].attn1.set_processor(Processor(attend))
    install_sla2(model, **BLOCKS)
    with pytest.raises(ValueError, match=f"^{message}"):
        model(**video)


# torch.compile


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_without_a_graph_break(video):
    """SLA2 among the video's tokens, SageBwd between them and the text."""
    torch._dynamo.reset()
    model = wan(layers=1)
    install_sla2(model, sparsity=0.5, **BLOCKS)
    model.set_attention_backend("sagebwd")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for found, expected in zip(*(output_and_gradients(m, video) for m in (compiled, model)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
