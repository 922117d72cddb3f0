"""Mistakes of 22_capstone_attention. Its milestones are in `sage_lab.capstones.trials`, and so are the hints."""

from sage_lab.capstones import trials as hints

from exercises.task import Mistake, capstone

task = capstone("ATTENTION")

# By the milestone that rejects them, in its order.
HEAD, TILES, HEADS, ENDS, STRIDES, CAUSAL, INT8, SHARED = (test.name for test in task.tests)
WIDE_TILES = "BLOCK_Q, BLOCK_KV = 64, 32", "BLOCK_Q, BLOCK_KV = 64, 128"
ROUNDED = "tl.where(x >= 0, x + 0.5, x - 0.5).to(tl.int8)"
QUANTIZE = "    quantize_kernel[grid](x, mean, x_hat, scale, *x.stride(), heads, tokens, D=head_dim, BLOCK=block)"
INTEGER_PV = "tl.dot(p_hat, v, out_dtype=tl.int32).to(tl.float32)"
VISIBLE = "visible & (key[None, :] <= query[:, None] + n_k - n_q)"
OFFSET = "x_ptr += (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h"
INTEGERS = "tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)"

task.mistakes = tuple(
    Mistake(old, new, hint, tuple(more), milestone)
    for milestone, hint, old, new, *more in (
        (HEAD, hints.NO_C, "LOG2_E / math.sqrt(head_dim)", "LOG2_E"),
        (HEAD, hints.C_TWICE, "LOG2_E / math.sqrt(head_dim)", "LOG2_E / head_dim"),
        (HEAD, hints.BASE_2, "LOG2_E / math.sqrt(head_dim)", "1 / math.sqrt(head_dim)"),
        (HEAD, hints.BASE_E, "rescale = tl.exp2", "rescale = tl.exp", ("p = tl.exp2", "p = tl.exp")),
        (HEAD, hints.NOT_DIVIDED, "o = o / tl.where(l == 0, 1.0, l)[:, None]", "o = o"),
        (HEAD, hints.TRANSPOSE, "tl.trans(k)", "k"),
        (HEAD, hints.LAST_TILE, "range(0, tl.cdiv(end, BLOCK_KV))", "range(0, tl.cdiv(end, BLOCK_KV) - 1)"),
        (HEAD, hints.SMOOTH_AXIS, "x - tl.load(mean_ptr + head * D + d)[None, :]", "x - tl.sum(x, 1)[:, None] / D"),
        (HEAD, hints.CHANGED, "    mean = k", "    k -= k.mean(2, keepdim=True)\n    mean = k"),
        (HEAD, hints.OVERFLOW, "tl.max(tl.abs(x)) / 127", "tl.max(tl.abs(x)) / 128"),
        (HEAD, hints.P_RANGE, "tl.max(p, 1) / 127", "tl.max(p, 1) / 255"),
        (HEAD, hints.FACTOR, "product * (s_p * s_v)[:, None]", "product * s_v"),
        (TILES, hints.L_RESCALE, "l = l * rescale +", "l = l +"),
        (TILES, hints.O_RESCALE, "o = o * rescale[:, None] +", "o = o +"),
        (TILES, hints.RESCALE, "l = l * rescale +", "l = l +", ("o = o * rescale[:, None] +", "o = o +")),
        (TILES, hints.ZERO, 'm = tl.full([BLOCK_Q], -float("inf"), tl.float32)', "m = tl.zeros([BLOCK_Q], tl.float32)",
         ("quantized(k, BLOCK_KV, mean)", "quantized(k, BLOCK_KV)")),
        (TILES, hints.FIRST_SCALE, "tl.load(s_k_ptr + kv_head * tl.cdiv(n_k, BLOCK_KV) + j)", "tl.load(s_k_ptr)"),
        (TILES, hints.FIRST_SCALE, "tl.load(s_v_ptr + kv_head * tl.cdiv(n_k, BLOCK_KV) + j)", "tl.load(s_v_ptr)"),
        (TILES, hints.LAST_TILE, "range(0, tl.cdiv(end, BLOCK_KV))", "range(0, 1)", WIDE_TILES),
        (TILES, hints.RESCALE, "l = l * rescale +", "l = l +", ("o = o * rescale[:, None] +", "o = o +"), WIDE_TILES),
        (TILES, hints.LAST_TILE, "    end = n_k", "    end = n_q"),
        (TILES, hints.HALF, "(s_p * s_v)[:, None]", "(s_p * s_v)[:, None]\n        o = o.to(tl.float16)"),
        (HEADS, hints.ELSEWHERE, OFFSET, OFFSET.replace("//", "%", 1)),
        (HEADS, hints.HEADS, "kv_head = head // group", "kv_head = head % 2 * (tl.num_programs(1) // 2) + head // 2"),
        (HEADS, hints.ONE_HEAD, "kv_head = head // group", "kv_head = 0"),
        (HEADS, hints.ONE_HEAD, "kv_head = head // group", "kv_head = head % heads"),
        (ENDS, hints.RAGGED, "visible = key[None, :] < n_k", "visible = key[None, :] >= 0"),
        (ENDS, hints.LAST_TILE, "range(0, tl.cdiv(end, BLOCK_KV))", "range(0, end // BLOCK_KV)"),
        (ENDS, hints.OUTSIDE, "tl.load(k_ptr + place, mask=exists, other=0)", "tl.load(k_ptr + place)"),
        (ENDS, hints.OUTSIDE, "element_ty), mask=inside)", "element_ty))"),
        (ENDS, hints.NAN, "(s_q.shape[2], batch * heads)](", "(max(1, n_q // BLOCK_Q), batch * heads)](",
         ("s_q_ptr + head * tl.num_programs(0)", "s_q_ptr + head * tl.cdiv(n_q, BLOCK_Q)")),
        (STRIDES, "", "token[:, None] * stride_n + d[None, :] * stride_d", "token[:, None] * D + d[None, :]"),
        (STRIDES, "", "o, *o.stride()", "o, *q.stride()"),
        (STRIDES, hints.FORM, "torch.empty(q.shape, dtype=q.dtype", "torch.empty(q.shape, dtype=torch.float16"),
        (CAUSAL, hints.OFF_BY_ONE, VISIBLE, VISIBLE.replace("<=", "<")),
        (CAUSAL, hints.OFF_BY_ONE, VISIBLE, VISIBLE.replace("n_k - n_q", "n_k - n_q + 1")),
        (CAUSAL, hints.TOP_LEFT, VISIBLE, "visible & (key[None, :] <= query[:, None])"),
        (CAUSAL, hints.NOT_CAUSAL, "IS_CAUSAL=is_causal", "IS_CAUSAL=False"),
        (ENDS, hints.UNDEFINED, "mask=exists, other=0.0).to", "mask=exists).to"),
        (STRIDES, hints.COPIED, "    mean = k", "    q, k, v = (x.contiguous() for x in (q, k, v))\n    mean = k"),
        (CAUSAL, hints.DIAGONAL, "(i + 1) * BLOCK_Q + n_k - n_q))", "(i + 1) * BLOCK_Q))"),
        (CAUSAL, hints.UNSEEN, "tl.where(visible, s, -float(\"inf\"))", "tl.where(visible, s, -1e9)"),
        (CAUSAL, hints.DIAGONAL, "tl.minimum(n_k, (i + 1) * BLOCK_Q", "tl.minimum(n_k, i * BLOCK_Q"),
        (CAUSAL, hints.UNSEEN, 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
        (CAUSAL, hints.UNSEEN, "o / tl.where(l == 0, 1.0, l)[:, None]", "o / l[:, None]"),
        (CAUSAL, hints.UNDEFINED, "tl.where(s_p == 0, 1.0, s_p)[:, None]", "s_p[:, None]"),
        (INT8, hints.NO_INT8, INTEGERS, "tl.dot(q.to(tl.float16), tl.trans(k).to(tl.float16))",
         (INTEGER_PV, "tl.dot(p_hat.to(tl.float16), v.to(tl.float16))")),
        (INT8, hints.WIDE, INTEGER_PV, "tl.dot(p, v.to(tl.float32))", ("(s_p * s_v)[:, None]", "s_v")),
        (INT8, hints.WIDE, INTEGER_PV, "tl.dot(p.to(tl.float16), v.to(tl.float16), out_dtype=tl.float16)",
         ("(s_p * s_v)[:, None]", "s_v")),
        (INT8, hints.CUT_OFF, ROUNDED, "x.to(tl.int8)"),
        (INT8, hints.CUT_OFF, ROUNDED, "tl.floor(x).to(tl.int8)"),
        (INT8, hints.CUT_OFF, ROUNDED, "(x + 0.5).to(tl.int8)"),
        (INT8, hints.CUT_OFF, "tl.max(tl.abs(x)) / 127", "tl.max(tl.abs(x)) / 63"),
        (INT8, hints.GIVEN, QUANTIZE, QUANTIZE.replace(", x_hat", ", torch.empty_like(x_hat)") + """
    s = (x.float() - (0 if mean is None else mean[:, :, None])).abs().amax() / 127
    scale[:] = s
    x_hat = torch.round((x.float() - (0 if mean is None else mean[:, :, None])) / (s + (s == 0))).to(torch.int8)"""),
        (INT8, hints.ZEROS, "tl.where(scale == 0, 1.0, scale)", "scale"),
        (INT8, hints.FACTOR, "(s_p * s_v)[:, None]", "(s_p * s_v)[:, None] * (127 / 128)"),
        (INT8, hints.TAIL, "1.0, s_p)[:, None] + 0.5)", "1.0, s_p)[:, None])"),
        (INT8, hints.NEARLY, "LOG2_E / math.sqrt(head_dim)", "127 / 128 * LOG2_E / math.sqrt(head_dim)"),
        (INT8, hints.TOKENS, "tl.load(s_v_ptr + kv_head * tl.cdiv(n_k, BLOCK_KV) + j)",
         "tl.load(s_v_ptr + kv_head * n_k + key, mask=key < n_k, other=0.0)",
         ("quantized(v, BLOCK_KV)", "quantized(v, 1)"),
         ("product * (s_p * s_v)[:, None]", "product * s_p[:, None] * s_v")),
        (SHARED, hints.COPIED, "    mean = k",
         "    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))\n    mean = k"),
        (SHARED, hints.GROUPS, "kv_head = head // group",
         "kv_head = head // heads * (heads // group) + head % (heads // group)"),
    )
)  # fmt: skip
