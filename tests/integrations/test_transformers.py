"""SageBwd by name in transformers' models: a small encoder and a small Llama, each from a config.

Needs the extra transformers, which `make test` installs; skipped where it is missing. Notebook 15 tries a
pretrained encoder.
"""

import contextlib
import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sage_ref.integrations.transformers import check, register
from sage_ref.tracing import relative_l2

transformers = pytest.importorskip("transformers", "5.24", reason="needs the extra transformers")

CONFIG = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    register(backend="reference")


def llama_of(layers):
    config = transformers.LlamaConfig(**CONFIG, num_hidden_layers=layers, attn_implementation="sagebwd")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # scores of a trained model, and not of one where all tokens look alike
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6)
            layer.self_attn.k_proj.weight.mul_(6)
    return model


@pytest.fixture
def llama():
    return llama_of(layers=2)


@pytest.fixture
def tokens():
    return torch.randint(3, 64, (2, 150))


@contextlib.contextmanager
def attention_of(model, name):
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    yield
    model.set_attn_implementation(before)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# A small Llama: causal, four heads that share two of keys and values


@pytest.mark.parametrize("autocast", [False, True])
def test_a_llama_computes_and_learns_nearly_as_with_exact_attention(llama, tokens, autocast):
    """A padded batch; under autocast attention is in bfloat16."""
    seen = []
    llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    mask = torch.ones_like(tokens)
    mask[1, 90:] = 0
    results = {}
    for name in ("sdpa", "sagebwd"):
        with attention_of(llama, name), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = llama(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
            found = gradients(llama, result.loss)
            of_scores = [g.flatten() for n, g in found.items() if "q_proj" in n or "k_proj" in n]
            results[name] = result.logits.detach()[mask.bool()], torch.cat(of_scores)
    (exact, exact_grad), (ours, our_grad) = results.values()
    assert seen == [torch.bfloat16 if autocast else torch.float32] * 2
    assert 1e-3 < relative_l2(ours, exact) < 0.02
    assert 3e-3 < relative_l2(our_grad, exact_grad) < 0.06


def test_scaling_and_options_reach_sagebwd(llama, tokens):
    with torch.no_grad():
        before = llama(tokens).logits
        for option in ({"smooth_k": False}, {"unbiased": True}):
            register(backend="reference", **option)
            assert 1e-4 < relative_l2(llama(tokens).logits, before) < 0.02
        for layer in llama.model.layers:
            layer.self_attn.scaling *= 2
        assert relative_l2(llama(tokens).logits, before) > 0.05
    with pytest.raises(TypeError, match="^name: expected a string that is not empty, got None$"):
        register(None)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_for_prompts_of_several_lengths(llama, tokens, cache):
    """Padding before the prompts, and a cache whose empty places are padding after them."""
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    prompts, mask = tokens[:, :20].clone(), torch.ones(2, 20, dtype=torch.long)
    prompts[1, :9], mask[1, :9] = 0, 0
    with torch.no_grad():
        together = llama.eval().generate(prompts, attention_mask=mask, **options)
        alone = [llama.generate(prompts[i : i + 1, start:], **options) for i, start in ((0, 0), (1, 9))]
    assert torch.equal(together[0], alone[0][0])
    assert torch.equal(together[1, 9:], alone[1][0])


def test_a_sliding_window_is_an_error_where_it_is_shorter_than_the_sequence(tokens):
    config = transformers.MistralConfig(**CONFIG, num_hidden_layers=1, sliding_window=64)
    model = transformers.MistralForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(tokens[:, :64]).logits
        model.set_attn_implementation("sagebwd")
        assert 0 < relative_l2(model(tokens[:, :64]).logits, expected) < 0.02
        with pytest.raises(ValueError, match=r"^mask: expected None or padding, .*, got one of torch\.bool$"):
            model(tokens[:, :65])


# What is more than attention: each argument that isn't known to be harmless is an error


UNKNOWN = {  # arguments that transformers' "sdpa" would ignore
    "softcap": 30.0, "s_aux": torch.zeros(4), "indices": torch.zeros(1), "seq_idx": torch.zeros(1),
}  # fmt: skip


@pytest.mark.parametrize("otherwise", ["error", "exact"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_transformers_sdpa_would_ignore_is_an_error_always(llama, tokens, name, otherwise):
    register(backend="reference", otherwise=otherwise)
    with pytest.raises(ValueError, match=f"^{name}: expected None, .*, got (30.0|Tensor)$"):
        llama(tokens, **{name: UNKNOWN[name]})
    llama(tokens, **{name: None}, use_cache=False, output_attentions=False)


@pytest.mark.parametrize("name", ["position_bias", "output_attentions"])
def test_what_transformers_sdpa_knows_is_an_error_or_its_own(llama, tokens, name):
    with pytest.raises(ValueError, match=f"^{name}: expected None"):
        llama(tokens, **{name: True})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="transformers makes a mask for compiled models")
def test_compiled_without_a_graph_break_and_without_a_cache_the_error_says_what_transformers_needs(tokens):
    torch._dynamo.reset()
    llama = llama_of(layers=1)
    compiled = torch.compile(llama, fullgraph=True, backend="eager")
    found, expected = (gradients(llama, call(tokens, labels=tokens).loss) for call in (compiled, llama))
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-6) for name in found)
    with pytest.raises(ValueError, match=r"^mask: expected None under torch\.compile .* and PyTorch 2.13$"):
        torch.compile(llama, backend="eager")(tokens, use_cache=False)


# Packed documents, and queries that are the last ones of their keys


EDGES = [0, 60, 85, 110, 150]
PLACES = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(EDGES)])[None]
LENGTHS = {"cu_seq_lens_q": torch.tensor(EDGES), "cu_seq_lens_k": torch.tensor(EDGES), "max_length_q": 60}
BLOCK_DIAGONAL = torch.block_diag(*(torch.ones(n, n) for n in np.diff(EDGES))).bool()
LAST = {  # how a call says what a query sees, and what that is
    "positions": ({"position_ids": PLACES}, BLOCK_DIAGONAL.tril()),
    "positions of a batch": ({"position_ids": PLACES.expand(2, -1)}, BLOCK_DIAGONAL.tril()),
    "positions that skip": ({"position_ids": 2 * torch.arange(150)[None]}, torch.ones(150, 150).bool().tril()),
    "positions that repeat": ({"position_ids": torch.arange(150)[None] // 2}, torch.ones(150, 150).bool().tril()),
    "one position": ({"position_ids": torch.zeros(1, 150).long()}, torch.ones(150, 150).bool().tril()),
    "positions from 3 that skip": ({"position_ids": 3 + 2 * PLACES}, BLOCK_DIAGONAL.tril()),
    "documents of one token": (
        {"position_ids": torch.tensor([[0, 0, 0, *range(147)]])},
        torch.block_diag(*(torch.ones(n, n) for n in (1, 1, 1, 147))).bool().tril(),
    ),
    "lengths": (LENGTHS | {"position_ids": PLACES}, BLOCK_DIAGONAL.tril()),
    "lengths, not causal": (LENGTHS | {"is_causal": False}, BLOCK_DIAGONAL),
    "lengths and their mask": (LENGTHS | {"attention_mask": BLOCK_DIAGONAL.tril()[None, None]}, BLOCK_DIAGONAL.tril()),
    "lengths of other keys": (
        {"cu_seq_lens_q": torch.tensor([0, 20, 30]), "cu_seq_lens_k": torch.tensor([0, 100, 150])},
        torch.block_diag(torch.ones(20, 100).tril(80), torch.ones(10, 50).tril(40)).bool(),
    ),
    "last queries": ({}, torch.ones(30, 150).bool().tril(120)),
}


@pytest.mark.filterwarnings("ignore:.*attention stays exact .* dropout")
@pytest.mark.parametrize("how", LAST)
@pytest.mark.parametrize("otherwise", ["int8", "exact"])
def test_packed_documents_and_last_queries_are_masked_attention(how, otherwise):
    """Forward and backward, against float64 with a mask. What SageBwd can't compute (dropout) stays as masked."""
    options, mask = LAST[how]
    n_q, batch = len(mask), 2 if how == "positions of a batch" else 1
    tensors = [torch.randn(batch, heads, n, 16, requires_grad=True) for heads, n in ((4, n_q), (2, 150), (2, 150))]
    options = {"attention_mask": None} | options
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    ours = transformers.AttentionInterface()["sagebwd"]
    if otherwise == "exact":
        register(backend="reference", otherwise="exact")
        ours = partial(transformers.AttentionInterface()["sagebwd"], dropout=1e-12)
    output, _ = ours(module, *tensors, **options)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, mask, enable_gqa=True).transpose(1, 2)
    weights = torch.randn_like(exact)
    found = [output, *torch.autograd.grad((output * weights).sum(), tensors)]
    for x, y in zip(found, [exact, *torch.autograd.grad((exact * weights).sum(), wide)], strict=True):
        assert relative_l2(x.double(), y) < (0.03 if otherwise == "int8" else 1e-5)
    assert output.is_contiguous()


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({"cu_seq_lens_k": None}, "cu_seq_lens_k: expected a tensor that can be read, got NoneType"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, r"cu_seq_lens_q: expected ascending .* to 150, got \[0, 9\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 150])}, "cu_seq_lens_k: expected as many keys as queries or more .*"),
        ({"attention_mask": BLOCK_DIAGONAL[None, None]}, "cu_seq_lens_q: expected .* the documents of a mask, .*"),
    ],
)
def test_lengths_that_do_not_fit_are_an_error(llama, tokens, edges, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        llama(tokens[:1], **LENGTHS | edges)


def test_a_prompt_in_chunks_gives_what_one_prompt_gives(llama, tokens):
    """Also with a static cache, whose 256 places are empty at first: no query sees them, but the mean key would."""
    caches = transformers.DynamicCache(), transformers.StaticCache(config=llama.config, max_cache_len=256)
    with torch.no_grad():
        dynamic, static = (
            torch.cat([llama(x, cache=cache).logits for x in tokens.split([20, 1, 2, 77, 50], 1)], 1)
            for cache in caches
        )
        assert torch.equal(dynamic, static)
        assert relative_l2(dynamic, llama(tokens).logits) < 0.03


# Architectures that stand for the others: of 605 that transformers 5.23 knows, 369 were built and tried on 2026-11-25


SIZES = {
    2: ("num_hidden_layers num_layers n_layer encoder_layers decoder_layers num_decoder_layers num_attention_heads "
        "num_heads n_head encoder_attention_heads decoder_attention_heads num_key_value_heads num_experts_per_tok"),
    4: "num_experts num_local_experts",
    16: "num_mel_bins rotary_dim",
    32: "head_dim max_source_positions",
    64: "hidden_size d_model n_embd",
    96: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim",
    128: "vocab_size max_position_embeddings",
}  # fmt: skip
RIGHT = "right"
VERDICTS = {
    "llama": RIGHT, "bert": RIGHT, "whisper": RIGHT, "jetmoe": RIGHT, "afmoe": RIGHT, "nllb-moe": RIGHT,
    "bloom": "BloomAttention: computes attention by itself",
    "gemma2": "softcap: expected None", "gpt_oss": "s_aux: expected None", "t5": "position_bias: expected None",
    "inkling2_text": "sinks: expected None",
}  # fmt: skip


def small_model(name):
    """A model with random weights, whose scores are about 1, so that attention prefers some keys."""
    config = transformers.AutoConfig.for_model(name)
    for size, fields in SIZES.items():
        for field in fields.split():
            if type(getattr(config, field, None)) is int:
                setattr(config, field, size)
    for field, value in config.to_dict().items():
        if field.endswith("token_id") and type(value) is int:
            setattr(config, field, 1)
        if "dropout" in field and type(value) is float:
            setattr(config, field, 0.0)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0], config.layer_types[-1]]
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=weight[0].numel() ** -0.5)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VERDICTS)
def test_an_architecture_is_as_exact_as_int8_or_says_why_not(name):
    model = small_model(name)
    inputs = torch.randint(3, 120, (2, 60)) if model.main_input_name == "input_ids" else torch.randn(2, 16, 64)
    batch = {model.main_input_name: inputs}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, 120, (2, 30))
    with torch.no_grad():
        exact = model(**batch)[0]
        model.set_attn_implementation("sagebwd")
        if "expected None" in VERDICTS[name]:
            with pytest.raises(ValueError, match=f"^{VERDICTS[name]}"):
                model(**batch)
            return
        error = relative_l2(model(**batch)[0], exact)
    if VERDICTS[name] == RIGHT:
        assert 0 < error < 0.2
    else:
        assert error == 0
        assert list(check(model).others) == [VERDICTS[name]]


def test_check_says_which_layers_take_it(llama):
    assert check(llama) == (2, {})
    llama.set_attn_implementation("sdpa")
    assert check(llama) == (0, {"LlamaAttention: the attention of its config is 'sdpa'": 2})
    with pytest.raises(TypeError, match="^model: "):
        check(3)
