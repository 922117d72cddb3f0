"""SageBwd as an attention of Hugging Face's transformers, by name, for inference and for training.

import sage_ref.integrations.transformers
sage_ref.integrations.transformers.register()
model.set_attn_implementation("sagebwd")  # or from_pretrained(..., attn_implementation="sagebwd")
"""

from functools import partial

from torch import Tensor, nn

from sage_ref.checks import shown
from sage_ref.integrations.calls import UNREADABLE, Call, Policy, by_sagebwd, not_installed, obstacle, refuse
from sage_ref.sagebwd.settings import Options

# Arguments of some models' attention that change its result. A sliding window is in the mask.
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
NOR_BY_SDPA = ("softcap", "s_aux")  # transformers' "sdpa" has neither, and silently ignores sinks, `s_aux`


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

    Causal or not, grouped queries and `scaling` are as the model has them. Padding may be on either side: each sequence
    is computed on its own tokens, together with others of the same length. generate() works with a dynamic or a static
    cache, whose empty places are padding, too. On a GPU a batch's mask is read once for all layers, and again when
    PyTorch has changed it; a change by a foreign kernel goes unnoticed. torch.compile can't read a mask, and
    transformers makes one there of every attention_mask, and for a decoder without a cache: compile without an
    attention_mask and with use_cache=True (Trainer: TrainingArguments(use_cache=True)), and give generate() with a
    static cache, which compiles on a GPU, disable_compile=True.

    SageBwd can't compute packed sequences, a sliding window shorter than the sequence, several new tokens behind cached
    ones, dropout of probabilities (set `attention_dropout`, in some models `attention_probs_dropout_prob`, to 0), soft
    caps, sinks, position biases and paged caches. It never returns attention weights.

    Args:
        name: A string that is not empty.
        smooth_k, smooth_q, granularity, unbiased, backend: As in `sage_ref.sagebwd_attention`.
        otherwise: What happens to a call that SageBwd can't compute. "error": a ValueError that says why. "exact":
            transformers' "sdpa" computes that call, with one warning for each reason. Soft caps and sinks, which "sdpa"
            lacks as well, are always an error.

    Raises:
        ImportError: transformers is not installed.
        TypeError, ValueError: An argument does not fit; the message names it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise not_installed("transformers", error) from error

    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a string that is not empty, got {shown(name)}")
    policy = Policy(Options(smooth_k, smooth_q, granularity, unbiased, backend), otherwise).checked()
    AttentionInterface.register(name, partial(attention, policy=policy))
    AttentionMaskInterface.register(name, sdpa_mask)


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
    transformers passes to every attention; see `UNSUPPORTED`.
    """
    n_q, n_k = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = n_q > 1 and attention_mask is None and causal  # a single query, in generate(), is the last of its sequence
    if causal and n_k > n_q:  # the rest of a static cache is empty: no query sees it, but the mean key would
        key, value = key[:, :, :n_q], value[:, :, :n_q]
    call = Call(query, key, value, attention_mask, dropout, causal, scaling, enable_gqa=query.shape[1] != key.shape[1])
    reason = obstacle(call) or unsupported(model_specific)
    if reason is None:
        return by_sagebwd(call, policy.options).transpose(1, 2), None
    if reason.startswith(UNREADABLE):
        reason += "; transformers makes none without an attention_mask and with use_cache=True"
    if unknown_to_both := handed_over(model_specific, NOR_BY_SDPA):
        raise ValueError(unknown_to_both)
    refuse(reason, policy.otherwise, depth=2)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **model_specific}
    return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)


def unsupported(model_specific: dict) -> str | None:
    """Return the first argument that SageBwd doesn't know, as an error says it, if there is one."""
    if model_specific.get("output_attentions"):
        return "output_attentions: expected False, since SageBwd never has the weights, got True"
    return handed_over(model_specific, UNSUPPORTED)


def handed_over(model_specific: dict, names: tuple[str, ...]) -> str | None:
    """Return the first of these arguments that a model passes, as an error says it, if there is one."""
    for name in names:
        if (x := model_specific.get(name)) is not None:
            got = shown(x) if isinstance(x, int | float) else type(x).__name__
            return f"{name}: expected None, since SageBwd has nothing of the kind, got {got}"
    return None
