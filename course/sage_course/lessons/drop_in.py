"""Notebook 15: calls of SDPA reached, taken, cut to their tokens; an attention as transformers calls it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sage_course.check import Gap, Mistake
from sage_course.lessons import draw
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


def attention(module, query, key, value, attention_mask, scaling=None):
    is_causal = module.is_causal and query.shape[2] > 1
    options = {"is_causal": is_causal, "scale": scaling, "enable_gqa": True}
    output = sagebwd_attention(query, key, value, **options, backend="reference")
    return output.transpose(1, 2), None


def _stand_in(*tensors, is_causal=False, scale=1.0, **_):
    """Stand in for a replacement: the result tells what reached it."""
    return scale * sum(i * x for i, x in enumerate(tensors, 1)) + is_causal


def _calls() -> list[tuple]:
    q, k, v = (draw(seed, 1, 2, 5, 4) for seed in (0, 1, 2))
    mask = torch.ones(5, 5, dtype=torch.bool)
    calls = [
        Call(q, k, v),
        Call(q, k, v, is_causal=True, scale=0.3),
        Call(q, k, v, attn_mask=mask),
        Call(q, k, v, dropout_p=0.1),
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
    return [(decoder, q, k, v, None, 0.3), (decoder, q[:, :, -1:], k, v, None), (encoder, q, k, v, None)]


GAPS = {
    "routed": Gap(routed, lambda: [
            (_stand_in, F.scaled_dot_product_attention, tuple(draw(3, 3, 1, 2, 5, 4)),
             {"is_causal": True, "scale": 2.0}),
            (_stand_in, torch.sum, (draw(4, 3, 5),), {"dim": 0}),
        ], (
        Mistake("return replacement(*arguments, **options)", "return replacement(*arguments)",
                "is_causal and scale come by name: they are in options."),
        Mistake("return function(*arguments, **options)", "return function(*arguments)",
                "Other functions have options, too."),
        Mistake("return replacement(*", "return function(*", "Then nothing changes: call the replacement."),
        Mistake("if function is F.scaled_dot_product_attention:", "if True:",
                "Only SDPA goes to the replacement. The others run as they are."),
        Mistake("return replacement(*arguments, **options)", "return replacement(arguments, options)",
                "arguments is a tuple, options a dictionary: * and ** take them apart."),
        Mistake("return replacement(*arguments, **options)", "return replacement",
                "Call the replacement: its result is what the model gets."),
        Mistake("function is F.", "function is not F.", "The other way round: all but SDPA stays as it is."),
    )),
    "takes": Gap(takes, _calls, (
        Mistake("call.attn_mask is not None or ", "",
                "A mask that SageBwd can't apply must not be dropped in silence."),
        Mistake("call.attn_mask is not None or", "call.attn_mask or",
                "A tensor is neither true nor false: ask whether it is None."),
        Mistake(" or call.dropout_p > 0", "", "SageBwd drops no probabilities."),
        Mistake("call.dropout_p > 0", "call.dropout_p > 0 or call.is_causal",
                "is_causal is no mask: SageBwd does it itself."),
        Mistake("call.value.shape == call.key.shape", "True", "A value may have another head size than its key."),
        Mistake("call.value.shape == call.key.shape", "call.query.shape == call.key.shape == call.value.shape",
                "There may be more keys than queries: SageBwd takes that."),
        Mistake("return call.value.shape == call.key.shape", "return call.scale is None",
                "scale is a number that SageBwd takes. What can differ between value and key?"),
    )),
    "padded": Gap(padded, _batches, (
        Mistake('sagebwd_attention(q, k, v, backend="reference")',
                'sagebwd_attention(query[i : i + 1], k, v, backend="reference")[:, :, :n]',
                "Queries of padding share a scale with real ones: cut them off before, not after."),
        Mistake('(x[i : i + 1, :, :n] for x in (query, key, value))\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")',
                '(x[i : i + 1].clone() for x in (query, key, value))\n        k[:, :, n:] = 0\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")[:, :, :n]',
                "A key of zeros is not a missing key: its score is 0, and that has a weight."),
        Mistake('    output = torch.zeros_like(query)\n    for i, n in enumerate(lengths):\n'
                '        q, k, v = (x[i : i + 1, :, :n] for x in (query, key, value))\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")\n',
                '    output = sagebwd_attention(query, key, value, backend="reference")\n'
                '    for i, n in enumerate(lengths):\n        output[i, :, n:] = 0\n',
                "Too late: the real queries have already seen the keys of padding. Cut before."),
        Mistake('sagebwd_attention(q, k, v, backend="reference")', "F.scaled_dot_product_attention(q, k, v)",
                "That is exact attention. Call sagebwd_attention."),
        Mistake("torch.zeros_like(query)", "query.clone()", "Where padding is the output is zero."),
        Mistake("x[i : i + 1, :, :n] for", "x[i : i + 1, :, -n:] for", "The real tokens come first: the first n."),
        Mistake("x[i : i + 1, :, :n] for", "x[i, :, :n] for",
                "x[i] has three dimensions. x[i : i + 1] keeps the batch, of one."),
        Mistake("x[i : i + 1, :, :n] for", "x[:, :, :n] for", "One sequence at a time: the one that i says."),
    )),
    "attention": Gap(attention, _layers, (
        Mistake("output.transpose(1, 2)", "output", "transformers wants O as [B, N, H, D]."),
        Mistake("output.transpose(1, 2)", "output.reshape(query.shape[0], query.shape[2], query.shape[1], -1)",
                "A reshape keeps the order of the numbers. Tokens and heads must change places: transpose."),
        Mistake('"scale": scaling', '"scale": None', "scaling is the model's c; some models have their own."),
        Mistake('"scale": scaling', '"scale": scaling or 1.0', "None means 1/sqrt(D), here and there: hand it on."),
        Mistake(" and query.shape[2] > 1", "",
                "In generate() a single query is the last token, and sees all keys; causal, it would see one."),
        Mistake("module.is_causal and ", "", "An encoder is not causal: the module says which it is."),
        Mistake('"enable_gqa": True', '"enable_gqa": False', "Queries have more heads than keys: enable_gqa=True."),
        Mistake("output.transpose(1, 2), None", "output.transpose(1, 2)", "It returns two: O and None."),
    )),
}  # fmt: skip
