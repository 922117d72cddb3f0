"""SageBwd as an attention of Hugging Face's transformers, by name, for inference and for training.

import sage_ref.integrations.transformers
sage_ref.integrations.transformers.register()
model.set_attn_implementation("sagebwd")  # or from_pretrained(..., attn_implementation="sagebwd")
"""

import inspect
import sys
from collections import Counter
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sage_ref.checks import check_module, shown
from sage_ref.integrations.calls import UNREADABLE, Call, Policy, by_sagebwd, not_installed, obstacle, refuse
from sage_ref.integrations.parts import Part, Parts, can_be_read, parts_between, share_parts, visible
from sage_ref.sagebwd.settings import Options

# Arguments of models that change no result of attention. A sliding window is in the mask, too.
HARMLESS = {
    "cache_position", "deterministic", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "sliding_window", "use_cache",
}  # fmt: skip
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
BY_SDPA = ("position_bias", "output_attentions")  # which transformers' "sdpa" takes; it ignores any other


def register(
    name: str = "sagebwd",
    *,
    smooth_k: bool = True,
    smooth_q: bool = False,
    granularity: str = "row",
    unbiased: bool = False,
    backend: str = "auto",
    otherwise: str = "error",
) -> None:
    """Make `name` an attention of transformers, for models that take attentions by name; again, to change options.

    Causal or not, grouped queries and `scaling` are as the model has them. Padding may be on either side, and several
    documents may be packed into one sequence, with positions that start again or with cu_seq_lens_q and cu_seq_lens_k.
    (transformers' own "sdpa" reads such positions with use_cache=False alone, and otherwise lets each document see
    those before it: compare with use_cache=False.) Each sequence or document is computed on its own tokens, together
    with others of the same length. In a causal layer with fewer queries than keys (a chunk of a prompt, assisted
    decoding, logits_to_keep) the last query sees all keys; that costs as much as if all tokens were new. generate()
    works with a dynamic or a static cache, whose empty places are padding, too. On a GPU the mask that transformers
    makes of a batch is read once for all layers; positions, lengths and a mask of your own are read in each layer,
    which waits for the GPU.

    torch.compile can't read a mask or positions, and transformers makes a mask there of every attention_mask, for a
    decoder without a cache, and for every decoder with PyTorch 2.11: compile without an attention_mask, with
    use_cache=True (Trainer: TrainingArguments(use_cache=True)) and with PyTorch 2.13, and give generate() with a static
    cache, which compiles on a GPU, disable_compile=True.

    SageBwd can't compute a sliding window shorter than the sequence, masks with gaps, dropout of probabilities (set
    `attention_dropout`, in some models `attention_probs_dropout_prob`, to 0), soft caps, sinks, position biases, keys
    that are selected by index, and paged caches. It never returns attention weights. Some models compute attention in
    classes of their own, which no name reaches: see `check`.

    Args:
        name: A string that is not empty.
        smooth_k, smooth_q, granularity, unbiased, backend: As in `sage_ref.sagebwd_attention`. On a GPU "auto" computes
            what the kernels can.
        otherwise: What happens to a call that SageBwd can't compute. "error": a ValueError that says why. "exact":
            transformers' "sdpa" computes that call, with one warning for each reason. An argument that "sdpa" would
            ignore (soft caps, sinks, selected keys, ...) is always an error.

    Raises:
        ImportError: transformers is not installed, or can't be imported.
        TypeError, ValueError: An argument does not fit; the message names it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask, sdpa_mask
    except (ImportError, RuntimeError) as error:
        raise not_installed("transformers", error) from error

    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a string that is not empty, got {shown(name)}")
    policy = Policy(Options(smooth_k, smooth_q, granularity, unbiased, backend), otherwise).checked()
    AttentionInterface.register(name, partial(attention, policy=policy))

    def mask(*, config: object, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **options):
        """Make the mask of "sdpa", also where none would mean the first keys; that of "eager" for its models."""
        sizes = {"q_length": q_length, "kv_length": kv_length}
        if not _may_lack_masks(type(config).__module__.replace(".configuration_", ".modeling_"), type(config)):
            made = eager_mask(**sizes, **options)
        else:
            skip = allow_is_causal_skip and q_length in (1, kv_length)
            made = sdpa_mask(**sizes, allow_is_causal_skip=skip, **options)
        share_parts(made)
        return made

    AttentionMaskInterface.register(name, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    policy: Policy,
    **model_specific,
) -> tuple[Tensor, None]:
    """Compute O [B, Nq, H, D], without weights, of query [B, H, Nq, D]; key, value [B, Hkv, Nk, D].

    is_causal None means the module's, which is True if it has none. model_specific are the remaining arguments that
    transformers passes to every attention: a ValueError names one that is not None and not known to be `HARMLESS`.
    """
    given = {name: x for name, x in model_specific.items() if x is not None and x is not False}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] > 1  # a single query, in generate(), is the last of its sequence
    causal = causal and _may_lack_masks(type(module).__module__, type(getattr(module, "config", None)))
    call = Call(query, key, value, attention_mask, dropout, causal and attention_mask is None, scaling, True)
    parts = packed(call, causal, given, policy.options)
    known = {*HARMLESS, *LENGTHS, *(["seq_idx"] if parts or attention_mask is not None else [])}
    if unknown := unsupported(given, known | {*BY_SDPA}):
        raise ValueError(unknown)
    reason = obstacle(call, policy.options) or unsupported(given, known)
    if reason is None:
        return by_sagebwd(call, policy.options, parts).transpose(1, 2).contiguous(), None
    if reason.startswith(UNREADABLE):
        reason += "; transformers makes none without an attention_mask, with use_cache=True and PyTorch 2.13"
    refuse(reason, policy.otherwise, depth=2)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if parts is not None and attention_mask is None:
        attention_mask = visible(parts, query.shape[2], key.shape[2]).to(query.device)
    rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **model_specific}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)


_known: dict[tuple[str, type], bool] = {}


def _may_lack_masks(modeling: str, config: type) -> bool:
    """Return whether a Python module's models with this config say by is_causal what they don't say by a mask.

    Those that transformers computes by "eager" alone never do: without a mask, every query sees every key.
    """
    if (modeling, config) not in _known:
        models = [x for x in vars(sys.modules.get(modeling, object)).values() if hasattr(x, "_supports_sdpa")]
        models = [x for x in models if getattr(x, "config_class", None) is config] or models
        _known[modeling, config] = any(x._supports_sdpa for x in models) or not models
    return _known[modeling, config]


_may_lack_masks._dynamo_marked_constant = True  # see `sage_ref.backend.warn_once`


def packed(call: Call, is_causal: bool, given: dict, options: Options) -> Parts | None:
    """Return the parts that a call has beside its mask: packed documents, and queries that are the last of its keys.

    Raises:
        ValueError: cu_seq_lens_q or cu_seq_lens_k don't fit the tensors or the mask.
    """
    n_q, n_k = call.query.shape[2], call.key.shape[2]
    if any(name in given for name in LENGTHS):
        edges = [edges_of(name, given.get(name), n) for name, n in zip(LENGTHS, (n_q, n_k), strict=True)]
        parts = (parts_between(*edges, is_causal),)
        of_mask = call.attn_mask is not None and obstacle(call, options) is None and call.parts()
        if len(call.query) > 1 or (of_mask and not torch.equal(visible(of_mask, n_q, n_k), visible(parts, n_q, n_k))):
            raise ValueError(f"{LENGTHS[0]}: expected it for a batch of one, and the documents of a mask, got others")
        return parts
    if not call.is_causal:
        return None
    if n_q < n_k:
        return ((Part((0, n_q), (0, n_k), True),),) * len(call.query)
    places = given.get("position_ids")
    if n_q > n_k or places is None or places.dim() != 2 or places.shape[1] != n_q or not can_be_read(places):
        return None
    edges = documents(places)
    if len(edges) not in (1, len(call.query)) or all(len(one) == 2 for one in edges):
        return None
    return tuple(parts_between(one, one, True) for one in edges) * (len(call.query) // len(edges))


def edges_of(name: str, edges: Tensor | None, tokens: int) -> tuple[int, ...]:
    """Return where packed documents begin, and the number of tokens."""
    if not isinstance(edges, Tensor) or not can_be_read(edges):
        raise ValueError(f"{name}: expected a tensor that can be read, got {type(edges).__name__}")
    found = tuple(edges.tolist())
    if [*found] != sorted(found) or found[:1] != (0,) or found[-1:] != (tokens,):
        raise ValueError(f"{name}: expected ascending numbers from 0 to {tokens}, got {shown([*found])}")
    return found


def documents(places: Tensor) -> list[tuple[int, ...]]:
    """Return for each row of positions [B, N] where a document begins, and N.

    It begins where the positions start again: at the row's smallest. Positions may skip. Where others repeat, too, or
    none goes on, a repeated smallest one begins nothing; elsewhere it is a document of one token.
    """
    found = []
    for row in places.cpu():
        step, is_first = row.diff(), row[1:] == row.min()
        goes_on = (step > 0).any() and not ((step == 0) & ~is_first).any()
        begins = is_first & ((step <= 0) if goes_on else (step < 0))
        found.append((0, *(begins.nonzero()[:, 0] + 1).tolist(), len(row)))
    return found


def unsupported(given: dict, known: set[str]) -> str | None:
    """Return the first argument of a model that is not known, in the words of an error, if there is one."""
    for name, x in given.items():
        if name not in known:
            got = shown(x) if isinstance(x, int | float) else type(x).__name__
            return f"{name}: expected None, since SageBwd has nothing of the kind, got {got}"
    return None


class Layers(NamedTuple):
    """How many attention layers of a model take SageBwd, and how many don't, for each reason."""

    taken: int
    others: dict[str, int]


def check(model: nn.Module, name: str = "sagebwd") -> Layers:
    """Count the layers of a transformers model that take the attention `name`, and those that don't, with the reason.

    transformers gives an attention to layers that ask for it by its name. Some models (Falcon, Bloom, MPT, ...)
    compute attention in classes of their own, and set_attn_implementation changes nothing there. Some of these (Falcon,
    GPT-Neo, ...) end in transformers' KeyError where from_pretrained gets the name.
    """
    check_module("model", model)
    layers = {module for module in model.modules() if "Attention" in type(module).__name__ or _asks_by_name(module)}
    reasons: Counter = Counter()
    for layer in layers:
        chosen = getattr(getattr(layer, "config", None), "_attn_implementation", None)
        if not _asks_by_name(layer):
            if not layers.intersection(layer.modules()) - {layer}:  # it isn't just around another one
                reasons[f"{type(layer).__name__}: computes attention by itself"] += 1
        elif chosen != name:
            reasons[f"{type(layer).__name__}: the attention of its config is {chosen!r}"] += 1
        else:
            reasons[None] += 1
    return Layers(reasons.pop(None, 0), dict(reasons))


def _asks_by_name(module: nn.Module) -> bool:
    """Return whether a module of transformers looks its attention up by name."""
    of_transformers = type(module).__module__.startswith("transformers.")
    return of_transformers and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward)
