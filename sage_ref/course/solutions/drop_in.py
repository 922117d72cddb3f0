"""Notebook 15: which calls of SDPA to take, how to reach them, and an attention in the form that transformers calls."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sage_ref import sagebwd_attention
from sage_ref.course.fill_in import Gap, Mistake
from sage_ref.integrations.calls import Call


def routed(replacement, function, arguments, options):
    if function is F.scaled_dot_product_attention:
        return replacement(*arguments, **options)
    return function(*arguments, **options)


def takes(call):
    if call.attn_mask is not None or call.dropout_p > 0:
        return False
    return call.value.shape == call.key.shape


def attention(module, query, key, value, attention_mask, scaling=None):
    is_causal = module.is_causal and query.shape[2] > 1
    options = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
    output = sagebwd_attention(query, key, value, **options, backend="reference")
    return output.transpose(1, 2), None


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _stand_in(*tensors, is_causal=False, scale=1.0, **_):
    """Of a replacement: it tells what reached it."""
    return scale * sum(i * x for i, x in enumerate(tensors, 1)) + is_causal


def _calls() -> list[tuple]:
    q, k, v = (_draw(seed, 1, 2, 5, 4) for seed in (0, 1, 2))
    mask = torch.ones(5, 5, dtype=torch.bool)
    calls = [
        Call(q, k, v),
        Call(q, k, v, is_causal=True, scale=0.3),
        Call(q, k, v, attn_mask=mask),
        Call(q, k, v, dropout_p=0.1),
        Call(q, k, _draw(3, 1, 2, 5, 6)),
    ]
    return [(call,) for call in calls]


def _layers() -> list[tuple]:
    decoder, encoder = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
    q, k, v = _draw(0, 1, 4, 6, 8), _draw(1, 1, 2, 6, 8), _draw(2, 1, 2, 6, 8)
    return [(decoder, q, k, v, None, 0.3), (decoder, q[:, :, -1:], k, v, None), (encoder, q, k, v, None)]


GAPS = {
    "routed": Gap(
        routed,
        lambda: [
            (_stand_in, F.scaled_dot_product_attention, tuple(_draw(3, 3, 1, 2, 5, 4)),
             {"is_causal": True, "scale": 2.0}),
            (_stand_in, torch.sum, (_draw(4, 3, 5),), {"dim": 0}),
        ],
        (
            Mistake("return replacement(*arguments, **options)", "return replacement(*arguments)",
                    "is_causal and scale come by name: they are in options."),
            Mistake("return function(*arguments, **options)", "return function(*arguments)",
                    "Other functions have options, too."),
            Mistake("return replacement(*", "return function(*", "Then nothing changes: call the replacement."),
            Mistake("function is F.", "function is not F.", "The other way round: all but SDPA stays as it is."),
        ),
    ),
    "takes": Gap(
        takes,
        _calls,
        (
            Mistake("call.attn_mask is not None or ", "",
                    "A mask that SageBwd can't apply must not be dropped in silence."),
            Mistake(" or call.dropout_p > 0", "", "SageBwd drops no probabilities."),
            Mistake("call.dropout_p > 0", "call.dropout_p > 0 or call.is_causal",
                    "is_causal is no mask: SageBwd does it itself."),
            Mistake("call.value.shape == call.key.shape", "True", "A value may have another head size than its key."),
        ),
    ),
    "attention": Gap(
        attention,
        _layers,
        (
            Mistake("output.transpose(1, 2)", "output", "transformers wants O as [B, N, H, D]."),
            Mistake('"scale": scaling', '"scale": None', "scaling is the model's c; some models have their own."),
            Mistake(" and query.shape[2] > 1", "",
                    "In generate() a single query is the last token, and sees all keys; causal, it would see one."),
            Mistake("module.is_causal and ", "", "An encoder is not causal: the module says which it is."),
        ),
    ),
}  # fmt: skip
