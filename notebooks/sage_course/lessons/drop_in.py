"""Notebook 15: calls of SDPA reached, taken, cut to their tokens; an attention as transformers calls it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sage_course.gaps import Gap
from sage_course.lessons import draw, with_mistakes
from sage_ref import sagebwd_attention
from sage_ref.integrations.calls import Call


def routed(replacement, function, arguments, options):
    if function is F.scaled_dot_product_attention:
        return replacement(*arguments, **options)
    return function(*arguments, **options)


def takes(call):
    if call.attn_mask is not None or call.dropout_p > 0:
        return False
    return call.value.shape == call.key.shape


def padded(query, key, value, lengths):
    output = torch.zeros_like(query)
    for i, n in enumerate(lengths):
        q, k, v = (x[i : i + 1, :, :n] for x in (query, key, value))
        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")
    return output


def attention(module, query, key, value, scaling=None):
    is_causal = module.is_causal and query.shape[2] > 1
    options = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
    output = sagebwd_attention(query, key, value, **options, backend="reference")
    return output.transpose(1, 2), None


def _stand_in(*tensors, is_causal=False, scale=1.0, **_):
    """Stand in for a replacement: the result tells what reached it."""
    return scale * sum(i * x for i, x in enumerate(tensors, 1)) + is_causal


def _functions() -> list[tuple]:
    """Return calls of SDPA, with options and without, and of functions that resemble it."""
    sdpa, q_k_v = F.scaled_dot_product_attention, tuple(draw(3, 3, 1, 2, 5, 4))
    return [
        (_stand_in, sdpa, q_k_v, {"is_causal": True, "scale": 2.0}),
        (_stand_in, sdpa, q_k_v, {}),
        (_stand_in, torch.sum, (draw(4, 3, 5),), {"dim": 0}),
        (_stand_in, torch.lerp, q_k_v, {}),
        (_stand_in, scaled_attention, q_k_v, {"scale": 2.0}),
    ]


def scaled_attention(query, key, value, scale):
    return scale * query @ key.mT @ value


def _calls() -> list[tuple]:
    q, k, v = (draw(seed, 1, 2, 5, 4) for seed in (0, 1, 2))
    mask = torch.ones(5, 5, dtype=torch.bool)
    calls = [
        Call(q, k, v),
        Call(q, k, v, is_causal=True),
        Call(q, k, v, scale=0.3),
        Call(q, k, v, attn_mask=mask),
        Call(q, k, v, attn_mask=mask.float()),
        Call(q, k, v, attn_mask=mask[:1]),
        Call(q, k, v, dropout_p=0.1),
        Call(q, k, v, dropout_p=1.0),
        Call(q, k, draw(3, 1, 2, 5, 6)),
        Call(q, draw(4, 1, 2, 9, 4), draw(5, 1, 2, 9, 4)),
    ]
    return [(call,) for call in calls]


def _batches() -> list[tuple]:
    """Return three sequences of up to six tokens, with larger numbers in their padding."""
    lengths = [6, 3, 1]
    tensors = [draw(seed, 3, 2, 6, 8) for seed in (0, 1, 2)]
    for x in tensors:
        for i, n in enumerate(lengths):
            x[i, :, n:] *= 5
    return [(*tensors, lengths)]


def _layers() -> list[tuple]:
    decoder, encoder = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
    q, k, v = draw(0, 1, 4, 6, 8), draw(1, 1, 2, 6, 8), draw(2, 1, 2, 6, 8)
    return [(decoder, q, k, v, 0.3), (decoder, q[:, :, -1:], k, v), (encoder, q, k, v)]


GAPS = with_mistakes(
    __file__,
    {
        "routed": Gap(
            routed,
            _functions,
        ),
        "takes": Gap(takes, _calls),
        "padded": Gap(padded, _batches),
        "attention": Gap(attention, _layers),
    },
)
