"""Tests and mistakes of 18_sparse_loop."""

import torch

from exercises.task import Call, Mistake, Task

task = Task(triton=True, agree=0.001)


@task.test("block_lists", points=2, listed=True, agree="entries")
def lists(draw):
    """The numbers of a row's selected blocks come first, in ascending order; the count says how many there are."""
    selected = draw.uniform(draw.integers(3, 7), draw.integers(4, 9)) < 0.4
    selected[draw.integers(0, len(selected))] = False
    yield Call("block_lists", (selected,))


def case(draw, n_q, n_k, block_q, block_kv):
    """Draw Q, K, V and a block mask in which every row has some blocks, but not the first."""
    d = draw.choice((16, 32))
    q, k, v = (draw.normal(n, d).half() for n in (n_q, n_k, n_k))
    k[: n_k // 2] *= 0.5  # the maximum rises on the way
    v += draw.normal(1, d).half()
    selected = draw.uniform(-(-n_q // block_q), -(-n_k // block_kv)) < 0.5
    selected[:, 0] = False
    for row in selected:
        row[1 + draw.integers(0, len(row) - 1)] = True
    return q, k, v, selected


def lists_of(selected):
    """Return the lists, the last block first, with other blocks past their end, and how long they are."""
    rows = [torch.cat((row.nonzero()[:, 0].flip(0), (~row).nonzero()[:, 0])) for row in selected]
    return torch.stack(rows).int(), selected.sum(-1).int()


def tile_call(q, k, v, selected, block_q, block_kv):
    numbers, count = lists_of(selected)
    return Call("sparse_tile", (q[:block_q], k, v, numbers[0, : count[0]], block_kv))


def hidden(x, selected, block_kv):
    """Return x with NaN in the blocks that nobody has selected."""
    tokens = (~selected.any(0)).repeat_interleave(block_kv)[: len(x)]
    return torch.where(tokens[:, None], torch.nan, x)


@task.test("sparse_tile: attention over the listed blocks, and no others", points=4, agree=1e-05)
def tile(draw):
    """O_i = softmax(c q_i K^T) V over the listed keys, L_i the log of its denominator. Others are NaN: 0 NaN is NaN."""
    q, k, v, selected = case(draw, 16, 8 * draw.integers(5, 9), 16, 8)
    selected[0, 1:4] = torch.tensor([True, False, True])
    yield tile_call(q, k, v, selected, 16, 8)
    q, k, v, selected = case(draw, 16, 8 * draw.integers(4, 8), 16, 8)
    yield tile_call(q, hidden(k, selected, 8), hidden(v, selected, 8), selected, 16, 8)


@task.test("sparse_tile: a partial last block, an empty list", points=2, agree=1e-05)
def tile_ends(draw):
    """The last key block may be partial, wherever it is listed; without a block O_i = 0 and L_i = -infinity."""
    q, k, v, selected = case(draw, 16, 16 * draw.integers(2, 5) + draw.integers(1, 15), 16, 16)
    selected[:, -1] = True
    yield tile_call(q, k, v, selected, 16, 16)
    yield tile_call(q, k, v, torch.zeros_like(selected), 16, 16)


def kernel_call(q, k, v, selected, block_q, block_kv):
    outputs = torch.full(q.shape, -12345.0), torch.full(q.shape[:1], -12345.0)
    return Call("sparse_attention", (q, k, v, *lists_of(selected), block_q, block_kv, *outputs), outputs=2)


@task.test("the kernel, full blocks, reads nothing else", points=4)
def kernel(draw):
    """Check what one step does to m, l and O_i, and what is stored. Blocks that aren't listed are NaN: 0 NaN is NaN."""
    block_q, block_kv = draw.choice((16, 32)), draw.choice((16, 32))
    n_k = block_kv * draw.integers(4, 6) if block_kv == 16 else 128
    q, k, v, selected = case(draw, 3 * block_q, n_k, block_q, block_kv)
    selected[1] = ~selected[0]
    selected[1, 0], selected[1, -1] = False, True
    yield kernel_call(q, k, v, selected, block_q, block_kv)
    q, k, v, selected = case(draw, 32, 16 * draw.integers(4, 8), 16, 16)
    yield kernel_call(q, hidden(k, selected, 16), hidden(v, selected, 16), selected, 16, 16)


@task.test("the kernel, partial blocks and empty lists", points=4)
def kernel_ends(draw):
    """The last block of queries or keys may be partial: which rows exist? An empty list: O_i = 0, L_i = -infinity."""
    n_k = 16 * draw.integers(3, 6) + draw.integers(1, 15)
    for n_q in (32, 32 + draw.integers(1, 15)):
        q, k, v, selected = case(draw, n_q, n_k, 16, 16)
        selected[:, -1] = selected[:, 1] = True
        yield kernel_call(q, k, v, selected, 16, 16)
    q, k, v, selected = case(draw, 48, 16 * draw.integers(4, 6), 16, 16)
    selected[draw.integers(0, 3)] = False
    yield kernel_call(q, k, v, selected, 16, 16)


task.mistakes = (
    Mistake("return o_i / torch.where(l == 0, 1, l),", "return o_i / l,",
        "An empty list: O_i = 0 and L_i = -infinity. What is 0 / 0?"),
    Mistake("lists.int(), selected.sum(-1).int()", "lists, selected.sum(-1)",
        "Two int32 tensors: the lists [Tm, Tn], and how many blocks each query block selected [Tm]."),
    Mistake("torch.argsort((~selected).int(), dim=-1, stable=True)",
        "torch.argsort(selected.int(), dim=-1, stable=True).flip(-1)",
        "The numbers of a row's selected blocks come first, in ascending order."),
    Mistake("selected.sum(-1).int()", "selected.sum(-1).clamp(min=1).int()",
        "How many key blocks did each query block select? Some select none."),
    Mistake("for j in blocks.tolist():", "for j in range(-(-n_k // block_kv)):",
        "This is attention over every key: only the listed blocks take part."),
    Mistake("l = l * rescale + p_ij.sum(-1, keepdim=True)", "l = l + p_ij.sum(-1, keepdim=True)",
        "When a later block raises the maximum, what happens to the l and the O_i that are already there?",
        (("o_i = o_i * rescale + p_ij @ value", "o_i = o_i + p_ij @ value"),)),
    Mistake("""\
    for j in blocks.tolist():
""", """\
    s, listed = q_i @ key.float().mT / math.sqrt(q_i.shape[1]), torch.zeros(n_k, dtype=torch.bool)
    for j in blocks.tolist():
        listed[j * block_kv : (j + 1) * block_kv] = True
    return (s * listed).softmax(-1) @ value.float(), (s * listed).logsumexp(-1)
    for j in blocks.tolist():
""", "A block that isn't selected has P = 0, not S = 0: e^0 = 1 counts in the denominator."),
    Mistake("""\
        o_i = o_i * rescale + p_ij @ value[rows].float()
""", """\
        o_i = o_i + s_ij.softmax(-1) @ value[rows].float() / len(blocks)
""", "Each block has a softmax of its own here. The online softmax has one denominator for all.",
        (("return o_i / torch.where(l == 0, 1, l),", "return o_i,"),)),
    Mistake("""\
    for j in blocks.tolist():
""", """\
    s, listed = q_i @ key.float().mT / math.sqrt(q_i.shape[1]), torch.zeros(n_k, dtype=torch.bool)
    for j in blocks.tolist():
        listed[j * block_kv : (j + 1) * block_kv] = True
    s = s.masked_fill(~listed, -math.inf)
    return s.softmax(-1) @ value.float(), s.logsumexp(-1)
    for j in blocks.tolist():
"""),
    Mistake("""\
        rows = slice(j * block_kv, min((j + 1) * block_kv, n_k))
""", """\
        rows = slice(j * block_kv, min((j + 1) * block_kv, n_k))
        missing = (j + 1) * block_kv - rows.stop
""", "The last key block may be partial, wherever it stands in the list. What do keys that don't exist add to l?",
        (("p_ij.sum(-1, keepdim=True)", "p_ij.sum(-1, keepdim=True) + missing * torch.exp(-m_new)"),)),
    Mistake("j = tl.load(lists_ptr + i * width + step)", "j = step",
        "The first blocks took part, not the listed ones: a step of the loop is not the block's number."),
    Mistake("j = tl.load(lists_ptr + i * width + step)", "j = tl.load(lists_ptr + step)",
        "Every query block used the list of the first. Where does the list of query block i start?"),
    Mistake("range(0, tl.load(count_ptr + i))", "range(0, width)",
        "Numbers past the end of a list took part. How many are valid in row i?"),
    Mistake("o_i * rescale[:, None] + tl.dot", "o_i + tl.dot",
        "Full blocks only: check what one step does to m, l and O_i, and what is stored at the end."),
    Mistake("m + tl.log(divisor)", "m + tl.math.log2(divisor)",
        "O is right and L is not: L = m + log l, both natural."),
    Mistake("""\
    for step in range(0, tl.load(count_ptr + i)):
        j = tl.load(lists_ptr + i * width + step)
""", """\
    for j in range(0, tl.cdiv(n_k, BLOCK_KV)):
        listed = 0
        for step in range(0, tl.load(count_ptr + i)):
            listed += (tl.load(lists_ptr + i * width + step) == j).to(tl.int32)
""", "",
        (("tl.where(key[None, :] < n_k, tl.dot", "tl.where((key[None, :] < n_k) & (listed > 0), tl.dot"),
         ('m = tl.full([BLOCK_Q], -float("inf"), tl.float32)', "m = tl.full([BLOCK_Q], -1e30, tl.float32)"),)),
    Mistake("tl.where(key[None, :] < n_k, tl.dot",
        "tl.where((key[None, :] < n_k) | (step + 1 < tl.load(count_ptr + i)), tl.dot",
        "The last key block may be partial, wherever it stands in the list. What do keys that don't exist add to l?"),
    Mistake("o_i / divisor[:, None], mask=query[:, None] < n_q)", "o_i / divisor[:, None])",
        "O or L was written past its end. Which queries of the last block exist?"),
    Mistake("divisor = tl.where(l == 0, 1.0, l)", "divisor = l"),
    Mistake("(triton.cdiv(n_q, block_q),)", "(n_q // block_q,)",
        "Some rows of O or L were never written. Does every query block have its program?"),
)  # fmt: skip
