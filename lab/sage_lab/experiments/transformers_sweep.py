"""`python -m sage_lab transformers-sweep`: "sagebwd" against exact attention in every architecture of transformers.

Each architecture that can be built from a small config computes one batch, with random weights, three times: with
"sdpa" (or "eager", where transformers has no other), with "sagebwd" where exact attention stands in for INT8, which
must give the same numbers, and with "sagebwd" itself, whose error is recorded.
"""

import argparse
import contextlib
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from sage_lab.command_line import Failed
from sage_lab.records import Row, markdown_table, write_record
from sage_ref.checks import shown
from sage_ref.tracing import relative_l2

TOKENS, IMAGE, MELS = 60, 32, 16  # the last two are among the sizes, too
# Sizes that make a config small, by the names that configs have for them.
SIZES = {
    2: ("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads index_n_heads "
        "decoder_attention_heads num_key_value_heads num_experts_per_tok"),
    4: "patch_size num_experts num_local_experts n_routed_experts",
    8: "index_topk",
    16: ("q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input rotary_dim "
         "num_mel_bins attn_rotary_emb"),
    32: ("head_dim v_head_dim index_head_dim global_head_dim moe_intermediate_size max_source_positions image_size "
         "mamba_n_heads"),
    64: "hidden_size d_model n_embd dim embed_dim",
    96: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim",
    128: "vocab_size max_position_embeddings vocab_size_per_layer_input sliding_window",
    1: "n_group topk_group",
    0: "num_kv_shared_layers first_k_dense_replace",
}  # fmt: skip
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
LARGEST = 100_000_000  # parameters of a model whose config has sizes by other names
SAME = 1e-3  # more is not the order of sums: the mask, the scale or the layout would be different
RIGHT = 0.2  # what INT8 may be off by where scores of random weights are large


def shrink(config) -> None:
    """Make the sizes of a config and of those inside it small, and set dropout to 0."""
    for name in list(config.to_dict()):
        with contextlib.suppress(Exception):  # a few attributes can't be read or set
            value = getattr(config, name)
            if hasattr(value, "to_dict"):
                shrink(value)
            elif name in SMALL and type(value) is int:
                setattr(config, name, SMALL[name])
            elif name.endswith("token_id") and type(value) is int:
                setattr(config, name, 1)
            elif "dropout" in name and type(value) is float:
                setattr(config, name, 0.0)
            elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and value:
                setattr(config, name, [value[0], value[-1]])
            elif name == "rope_parameters" and "layer_types" not in value:
                value["mrope_section"] = [4, 6, 6]  # which the models of pictures and text look for
            elif name == "attn_layer_indices":
                config.attn_layer_indices = [1]
    if hasattr(config, "qk_rope_head_dim"):
        config.head_dim = 16  # of the rotary positions


def batches(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield batches of the kinds that models take, with their main input first."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 120, (2, TOKENS), generator=generator)
    channels = getattr(model.config, "num_channels", 3)
    kinds = {
        "input_ids": {"input_ids": tokens},
        "pixel_values": {"pixel_values": torch.randn(2, channels, IMAGE, IMAGE, generator=generator)},
        "input_values": {"input_values": torch.randn(2, 4000, generator=generator)},
        "input_features": {"input_features": torch.randn(2, MELS, 64, generator=generator)},
    }
    kinds["both"] = kinds["input_ids"] | kinds["pixel_values"]
    first = kinds.pop(model.main_input_name, {})
    decoder = {"decoder_input_ids": tokens[:, :30]} if getattr(model.config, "is_encoder_decoder", False) else {}
    for kind in (first, *kinds.values()):
        yield kind | decoder
        if "use_cache" in inspect.signature(model.forward).parameters:
            yield kind | decoder | {"use_cache": False}


@torch.no_grad()
def computed(model: nn.Module, name: str, batch: dict[str, Tensor]) -> Tensor:
    """Return the last hidden states, or whatever else the model returns first."""
    model.set_attn_implementation(name)
    torch.manual_seed(1)
    output = model(**batch)
    return output[0] if isinstance(output[0], Tensor) else output[0][0]


def built(config) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """Return a model with random weights, a batch that it takes, and what it computes with exact attention."""
    from transformers import AutoModel

    torch.manual_seed(0)
    shrink(config)
    size = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # a few models can't be there
        size = sum(parameter.numel() for parameter in AutoModel.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"config: expected at most {LARGEST:,} parameters, got {size:,}")
    model = AutoModel.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():  # scores of about 1, so that attention prefers some keys
        if parameter.dim() > 1:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
    first = None
    for batch, name in itertools.product(batches(model), ("sdpa", "eager")):
        try:
            exact = computed(model, name, batch)
        except Exception as error:
            first = first or error
            continue
        if exact.isfinite().all() and torch.equal(exact, computed(model, name, batch)):
            return model, batch, exact
    raise first or ValueError("outputs: expected finite ones, equal in all runs, got others")


def exact_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal=False, scale=None, **_) -> Tensor:
    """Stand in for `sagebwd_attention`."""
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)


def verdict(config) -> Row:
    """Return the verdict on one architecture ("right", "raises", "own attention", "wrong" or "not built"), and why.

    "own attention" is that of a model whose outputs are the same bits: it has classes of its own, or no attention.
    """
    from sage_ref.integrations import calls
    from sage_ref.integrations.transformers import check

    row = {"verdict": "not built", "error": None, "reason": ""}
    try:
        model, batch, exact = built(config)
    except Exception as error:
        return row | {"reason": in_short(error)}
    try:
        with mock.patch.object(calls, "sagebwd_attention", exact_attention):
            same = relative_l2(computed(model, "sagebwd", batch), exact)
        error = relative_l2(computed(model, "sagebwd", batch), exact)
    except Exception as error:
        return row | {"verdict": "raises" if isinstance(error, ValueError) else "wrong", "reason": in_short(error)}
    layers = check(model)
    if error == 0:
        return row | {"verdict": "own attention", "reason": "; ".join(layers.others)}
    right = same < SAME and 0 < error < RIGHT
    return row | {"verdict": "right" if right else "wrong", "error": error, "reason": "" if right else f"same: {same}"}


def in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]


def architectures() -> dict[str, type]:
    """Return the config class of every architecture that transformers' AutoModel knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {name: CONFIG_MAPPING[name] for name in MODEL_MAPPING_NAMES}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of architectures in transformers")


def transformers_sweep_command(options: argparse.Namespace) -> None:
    from sage_ref.integrations.transformers import register

    try:
        register(backend="reference")
    except ImportError as error:
        raise Failed(str(error)) from error
    import transformers

    transformers.logging.set_verbosity_error()
    known = architectures()
    chosen = options.only or list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"only: expected architectures of transformers, got {shown(unknown)}")
    with warnings.catch_warnings(action="ignore"):
        rows = [{"architecture": name} | verdict(known[name]()) for name in tqdm(chosen)]
    print(markdown_table(["verdict", "architectures"], Counter(row["verdict"] for row in rows).most_common()))
    if options.json:
        write_record(options.json, rows, command=options.command, transformers=transformers.__version__)
