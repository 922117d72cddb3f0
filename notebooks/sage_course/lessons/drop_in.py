"""Notebook 15: calls of SDPA reached, taken, cut to their tokens; an attention as transformers calls it."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from sage_course.gaps import Gap, Mistake
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


def attention(module, query, key, value, scaling=None):
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
        Call(q, k, v, is_causal=True),
        Call(q, k, v, scale=0.3),
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
    return [(decoder, q, k, v, 0.3), (decoder, q[:, :, -1:], k, v), (encoder, q, k, v)]


GAPS = {
    "routed": Gap(routed, lambda: [
            (_stand_in, F.scaled_dot_product_attention, tuple(draw(3, 3, 1, 2, 5, 4)),
             {"is_causal": True, "scale": 2.0}),
            (_stand_in, torch.sum, (draw(4, 3, 5),), {"dim": 0}),
        ], (
        Mistake("return replacement(*arguments, **options)", "return replacement(*arguments)",
                "is_causal and scale are passed by name, so they are in options: pass options on."),
        Mistake("return function(*arguments, **options)", "return function(*arguments)",
                "Other functions have options as well: pass them on."),
        Mistake("return replacement(*", "return function(*", "This calls SDPA as before. Call the replacement."),
        Mistake("if function is F.scaled_dot_product_attention:", "if True:",
                "Only SDPA goes to the replacement. All other functions run as they are."),
        Mistake("return replacement(*arguments, **options)", "return replacement(arguments, options)",
                "arguments is a tuple and options is a dictionary: * and ** unpack them."),
        Mistake("return function(*arguments, **options)", "return function",
                "This returns the function itself. Call it: the model needs its result."),
        Mistake("return replacement(*arguments, **options)", "return replacement",
                "This returns the replacement itself. Call it: the model needs its result."),
        Mistake("function is F.", "function is not F.",
                "The condition is reversed: SDPA goes to the replacement, all else stays as it is."),
    )),
    "takes": Gap(takes, _calls, (
        Mistake("call.attn_mask is not None or ", "",
                "It takes a call with a mask. A mask that SageBwd can't apply must not be dropped in silence."),
        Mistake("call.attn_mask is not None or", "call.attn_mask or",
                "A tensor is neither true nor false. Ask whether the mask is None."),
        Mistake(" or call.dropout_p > 0", "", "It takes a call with dropout. SageBwd drops no probabilities."),
        Mistake("call.dropout_p > 0", "call.dropout_p > 0 or call.is_causal",
                "It refuses a causal call. is_causal is not a mask: SageBwd does it itself."),
        Mistake("call.value.shape == call.key.shape", "True",
                "It takes values whose head size is not that of the keys. Compare the two shapes."),
        Mistake("call.value.shape == call.key.shape", "call.query.shape == call.key.shape == call.value.shape",
                "It refuses a call with more keys than queries, which SageBwd can compute."),
        Mistake("call.value.shape == call.key.shape", "call.value.shape == call.key.shape and call.scale is None",
                "It refuses a call with a scale of its own. SageBwd takes any number as the scale."),
        Mistake("call.dropout_p > 0", "call.dropout_p is not None",
                "dropout_p is a number, and 0 means that there is no dropout."),
        Mistake("return False", "return True",
                "The answers are reversed: True means that SageBwd computes the call.",
                (("call.value.shape == call", "call.value.shape != call"),)),
    )),
    "padded": Gap(padded, _batches, (
        Mistake('sagebwd_attention(q, k, v, backend="reference")',
                'sagebwd_attention(query[i : i + 1], k, v, backend="reference")[:, :, :n]',
                "Queries of padding share a scale with real ones. Cut them off before the call, not after it."),
        Mistake('(x[i : i + 1, :, :n] for x in (query, key, value))\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")',
                '(x[i : i + 1].clone() for x in (query, key, value))\n        k[:, :, n:] = 0\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")[:, :, :n]',
                "A key of zeros is not a missing key: its score is 0, and softmax gives it a weight."),
        Mistake('    output = torch.zeros_like(query)\n    for i, n in enumerate(lengths):\n'
                '        q, k, v = (x[i : i + 1, :, :n] for x in (query, key, value))\n'
                '        output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")\n',
                '    output = sagebwd_attention(query, key, value, backend="reference")\n'
                '    for i, n in enumerate(lengths):\n        output[i, :, n:] = 0\n',
                "That is too late: the real queries have already seen the keys of padding. Cut before the call."),
        Mistake('sagebwd_attention(q, k, v, backend="reference")', "F.scaled_dot_product_attention(q, k, v)",
                "That is exact attention. Call sagebwd_attention."),
        Mistake("torch.zeros_like(query)", "query.clone()",
                "The output should be zero where padding is: start from zeros."),
        Mistake("x[i : i + 1, :, :n] for", "x[i : i + 1, :, -n:] for",
                "The real tokens come first: take the first n, not the last n."),
        Mistake("x[i : i + 1, :, :n] for", "x[i, :, :n] for",
                "x[i] has three dimensions. x[i : i + 1] keeps the batch dimension."),
        Mistake(", :, :n] = sagebwd_attention(q,", "] = sagebwd_attention(query[i : i + 1],",
                "Queries of padding are computed, too. Cut all three tensors, and write to the first n tokens."),
        Mistake("output[i : i + 1, :, :n] = ", "output = ",
                "Each sequence replaces the whole output. Write to the place of its own tokens."),
        Mistake("output = torch.zeros_like(query)", "parts = []",
                "The results have different lengths. Start from zeros, and write each one to the place of its tokens.",
                (('output[i : i + 1, :, :n] = sagebwd_attention(q, k, v, backend="reference")',
                  'parts.append(sagebwd_attention(q, k, v, backend="reference"))'),
                 ("return output", "return torch.cat(parts)"))),
        Mistake("x[i : i + 1, :, :n] for", "x[:, :, :n] for", "Take one sequence at a time, number i."),
        Mistake("x[i : i + 1, :, :n] for", "x[i : i + 1, :n] for", "Axis 1 counts heads. Tokens are axis 2.",
                (("output[i : i + 1, :, :n]", "output[i : i + 1, :n]"),)),
    )),
    "attention": Gap(attention, _layers, (
        Mistake("output.transpose(1, 2)", "output", "transformers expects O as [B, N, H, D]: swap tokens and heads."),
        Mistake("output.transpose(1, 2)", "output.reshape(query.shape[0], query.shape[2], query.shape[1], -1)",
                "A reshape keeps the order of the numbers. Tokens and heads must change places: use transpose."),
        Mistake('"scale": scaling', '"scale": None',
                "Pass scaling on: it is the model's c, and some models have one of their own."),
        Mistake('"scale": scaling', '"scale": scaling or 1.0',
                "None means 1/sqrt(D) in both libraries: pass it on as it is."),
        Mistake(" and query.shape[2] > 1", "",
                "In generate() the single query is the last token and sees all keys. With is_causal it "
                "would see only the first."),
        Mistake("module.is_causal and ", "", "An encoder is not causal. module.is_causal says what the layer is."),
        Mistake("module.is_causal and query.shape[2] > 1", "False",
                "A layer of a decoder is causal where there is more than one query. module.is_causal says what it is."),
        Mistake("    is_causal = module",
                "    key, value = (x.repeat(1, query.shape[1] // key.shape[1], 1, 1) for x in (key, value))\n"
                "    is_causal = module",
                "repeat gives the heads 0, 1, 0, 1. Queries that share a head are neighbours: enable_gqa=True alone."),
        Mistake('"scale": scaling', '"scale": None',
                "scale=None multiplies by 1/sqrt(D) once more. Pass scaling as scale, and leave the query as it is.",
                (("    is_causal = module", "    query = query * (scaling or 1)\n    is_causal = module"),)),
        Mistake('"enable_gqa": True', '"enable_gqa": False', "Queries have more heads than keys: enable_gqa=True."),
        Mistake("output.transpose(1, 2), None", "output.transpose(1, 2)", "It should return two things, O and None."),
    )),
}  # fmt: skip
