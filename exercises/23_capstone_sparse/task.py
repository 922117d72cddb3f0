"""Mistakes of 23_capstone_sparse. Its milestones are in `sage_lab.capstones.trials`, and so are the hints."""

from sage_lab.capstones import trials as hints

from exercises.task import Mistake, capstone

task = capstone("SPARSE")

# By the milestone that rejects them, in its order.
HEAD, LISTED, TABLES, SHORT, ENDS, STRIDES, CAUSAL, INT8 = (test.name for test in task.tests)
ROW = "row_ptr = table_ptr + b * table_strides[0] + h * table_strides[1] + i * table_strides[2]"
DENSE = "row_ptr = table_ptr + (tl.program_id(1) * tl.num_programs(0) + i) * width"
ENTRY = "tl.load(row_ptr + step * table_strides[3])"
ROUNDED = "tl.where(x >= 0, x + 0.5, x - 0.5).to(tl.int8)"
LOADED = "k, s_k = psi(load_tile(k_ptr, k_strides, b, h // group, key, n_k, D))"
FIRST_BLOCK = "k_ptr, k_strides, b, h // group, 0 * key, n_k, D"
COPIES = "    q, k, v = (x.contiguous() for x in (q, k, v))\n    sparse_kernel["
VISIBLE = "visible & (key[None, :] <= query[:, None] + n_k - n_q)"
INTEGERS = "tl.dot(q, tl.trans(k), out_dtype=tl.int32).to(tl.float32)"

task.mistakes = tuple(
    Mistake(old, new, hint, tuple(more), milestone)
    for milestone, hint, old, new, *more in (
        (HEAD, hints.L_RESCALE, "l = l * rescale +", "l = l +"),
        (HEAD, hints.O_RESCALE, "o = o * rescale[:, None] +", "o = o +"),
        (HEAD, hints.HALF, "            m = m_new", "            m, o = m_new, o.to(tl.float16)"),
        (LISTED, hints.BEGINS, "key = j * BLOCK_KV", "key = j * BLOCK_Q"),
        (HEAD, hints.JUMP, "if j >= 0:", "if j < 0:\n            break\n        else:"),
        (LISTED, hints.STEPS, ENTRY, "step"),
        (LISTED, hints.ENTRIES, "range(0, width)", "range(0, tl.cdiv(n_k, BLOCK_KV))"),
        (LISTED, hints.ALL_KEYS, "for step in range(0, width):\n        j = " + ENTRY,
         "for j in range(0, tl.cdiv(n_k, BLOCK_KV)):"),
        (LISTED, hints.ONE_ROW, ROW, ROW.replace(" + i * table_strides[2]", "")),
        (LISTED, hints.LAST_TILE, "range(0, width)", "range(0, width - 1)"),
        (LISTED, hints.UNLISTED, LOADED, LOADED.replace("D))", "D) + 0 * load_tile(" + FIRST_BLOCK + "))")),
        (LISTED, hints.UNLISTED, "    sparse_kernel[", "    k = k - k.mean(2, keepdim=True)\n    sparse_kernel["),
        (TABLES, hints.ONE_TABLE, ROW, ROW.replace(" + h * table_strides[1]", "")),
        (TABLES, hints.ONE_TABLE, ROW, ROW.replace(" + b * table_strides[0]", "")),
        (TABLES, hints.TABLE, ROW, DENSE),
        (TABLES, hints.TABLE, ENTRY, "tl.load(row_ptr + step)"),
        (TABLES, hints.ONE_HEAD, "v_strides, b, h // group,", "v_strides, b, 0 * h,",
         ("k_strides, b, h // group,", "k_strides, b, 0 * h,")),
        (SHORT, hints.SHORT, "if j >= 0:", "if True:"),
        (SHORT, hints.SHORT, "o / tl.where(l == 0, 1.0, l)[:, None]", "o / l[:, None]"),
        (SHORT, hints.SHORT, "j = " + ENTRY, "j = tl.maximum(0, " + ENTRY + ")"),
        (ENDS, hints.RAGGED, "visible = key[None, :] < n_k", "visible = key[None, :] >= 0"),
        (ENDS, hints.OUTSIDE, "mask=token[:, None] < tokens, other=0.0)", "mask=token[:, None] >= 0, other=0.0)"),
        (ENDS, hints.UNDEFINED, "tokens, other=0.0)", "tokens)"),
        (ENDS, hints.OUTSIDE, ", mask=query[:, None] < n_q)", ")"),
        (ENDS, hints.NAN, "(triton.cdiv(n_q, block_q), batch", "(max(1, n_q // block_q), batch"),
        (ENDS, hints.RAGGED, "visible = key[None, :] < n_k",
         "visible = step * BLOCK_KV + tl.arange(0, BLOCK_KV)[None, :] < n_k"),
        (STRIDES, "", "tl.arange(0, D)[None, :] * stride_d", "tl.arange(0, D)[None, :]"),
        (STRIDES, hints.COPIED, "    sparse_kernel[", COPIES),
        (STRIDES, hints.COPIED, "    sparse_kernel[", COPIES.replace("contiguous", "half")),
        (STRIDES, "", "o, o.stride()", "o, q.stride()"),
        (STRIDES, hints.FORM, "torch.empty(q.shape, dtype=q.dtype", "torch.empty(q.shape, dtype=torch.float32"),
        (CAUSAL, hints.OFF_BY_ONE, VISIBLE, VISIBLE.replace("<=", "<")),
        (CAUSAL, hints.TOP_LEFT, VISIBLE, "visible & (key[None, :] <= query[:, None])"),
        (CAUSAL, hints.NOT_CAUSAL, "IS_CAUSAL=is_causal", "IS_CAUSAL=False"),
        (CAUSAL, hints.ZERO, 'tl.full([BLOCK_Q], -float("inf"), tl.float32)', "tl.zeros([BLOCK_Q], tl.float32)"),
        (CAUSAL, hints.ZERO, "m = m_new", "m = safe"),
        (CAUSAL, hints.STEPS_END, "range(0, width)",
         "range(0, tl.minimum(width, tl.cdiv((i + 1) * BLOCK_Q + n_k - n_q, BLOCK_KV)) if IS_CAUSAL else width)"),
        (CAUSAL, hints.UNSEEN, 's = tl.where(visible, s, -float("inf"))', "s = tl.where(visible, s, -1e30)"),
        (CAUSAL, hints.NAN, 'tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
        (INT8, hints.NO_INT8, INTEGERS, "tl.dot(q.to(tl.float16), tl.trans(k).to(tl.float16))"),
        (INT8, hints.WIDE, "tl.dot(p.to(tl.float16), v)", "tl.dot(p, v.to(tl.float32))"),
        (INT8, hints.WIDE, "tl.dot(p.to(tl.float16), v)", "tl.dot(p.to(tl.float16), v, out_dtype=tl.float16)"),
        (INT8, hints.CUT_OFF, ROUNDED, "x.to(tl.int8)"),
        (INT8, hints.CUT_OFF, ROUNDED, "(x + 0.5).to(tl.int8)"),
        (INT8, hints.CUT_OFF, "tl.max(tl.abs(x)) / 127", "tl.max(tl.abs(x)) / 63"),
        (INT8, hints.OVERFLOW, "tl.max(tl.abs(x)) / 127", "tl.max(tl.abs(x)) / 128"),
        (INT8, hints.NEARLY, "(s_q * s_k * c)", "(s_q * s_k * c * 127 / 128)"),
        (INT8, hints.ZEROS, "tl.where(scale == 0, 1.0, scale)", "scale"),
    )
)  # fmt: skip
