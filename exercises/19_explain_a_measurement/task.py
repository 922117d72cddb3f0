"""Tests and mistakes of 19_explain_a_measurement."""

from exercises.task import Call, Mistake, Task

task = Task()


@task.test("speed_limit", points=2)
def limit(draw):
    """The 16-bit program takes `needed` units of time. How many does the INT8 program take?"""
    needed, kept, speed = draw.integers(4, 9), draw.integers(1, 4), draw.uniform(low=1.5, high=4.5)
    yield Call("speed_limit", (needed, needed - kept, kept, speed))
    yield Call("speed_limit", (needed, needed - kept + 1, kept + draw.integers(0, 2), speed))


@task.test("quantization_bytes", points=3)
def moved(draw):
    """Add up, for each of Q, K, V: bytes read, bytes written, and 4 bytes per scale."""
    batch, kv_heads, head_dim = draw.integers(1, 5), draw.integers(2, 5), draw.choice((64, 96, 128))
    block, heads = draw.choice((64, 128)), kv_heads * draw.integers(2, 5)
    n_q, n_k = draw.integers(5, 20) * block + draw.integers(1, block), draw.integers(21, 40) * block + 1
    yield Call("quantization_bytes", (batch, heads, kv_heads, n_q, n_k, head_dim, block))


@task.test("share_of_time")
def share(draw):
    """The share is the time for the bytes, divided by the time measured."""
    moved, rate = draw.integers(10**8, 10**10), draw.uniform(low=0.5, high=8.0)
    yield Call("share_of_time", (moved, rate, draw.uniform(low=5.0, high=50.0)))


def line_of(draw):
    return draw.uniform(low=0.05, high=0.8), draw.uniform(low=1e-4, high=6e-4)


@task.test("line", points=2)
def two_points(draw):
    """per_key is the difference of times over the difference of lengths; fixed is what the line has at 0."""
    fixed, per_key = line_of(draw)
    first, second = ((n, fixed + per_key * n) for n in (1024 * draw.integers(1, 4), 1024 * draw.integers(5, 30)))
    yield Call("line", (*first, *second))
    yield Call("line", (*second, *first))


@task.test("break_even", points=2)
def crossing(draw):
    """Where do the lines cross? fixed + per_key N is the same for both there."""
    fixed, per_key = line_of(draw)
    more, steeper = fixed + draw.uniform(low=0.1, high=0.5), per_key + draw.uniform(low=1e-5, high=1e-4)
    for ours, theirs in (
        ((more, per_key), (fixed, steeper)),
        ((fixed, per_key), (more, steeper)),
        ((fixed, steeper), (more, per_key)),
        ((more, steeper), (fixed, per_key)),
        ((fixed, per_key), (more, per_key)),
        ((more, per_key), (fixed, per_key)),
    ):
        yield Call("break_even", (ours, theirs))


@task.test("causal_ms", points=3)
def causal(draw):
    """For each tile of queries: how many tiles of keys start at or before its last query?"""
    for ragged in (0, 1):
        line, (block_q, block_kv) = line_of(draw), draw.choice(((64, 128), (128, 64), (128, 128)))
        yield Call("causal_ms", (line, 128 * draw.integers(5, 20) + ragged * draw.integers(1, 60), block_q, block_kv))


@task.test("clocks_per_score", points=2)
def clocks(draw):
    """A matmul takes head_dim multiply-adds per score; divide by the rate of its kind. Other units: count over rate."""
    rates = {"sixteen_bit": 512 * draw.integers(1, 5), "exp2": 4 * draw.integers(2, 6)}
    rates |= {"int8": rates["sixteen_bit"] * draw.choice((2, 4)), "alu": 64, "issue": 128}
    counts = {"exp2": 1.0, "alu": draw.uniform(low=1.0, high=4.0), "issue": draw.uniform(low=6.0, high=12.0)}
    head_dim, int8, sixteen_bit = draw.choice((64, 96, 128)), draw.integers(1, 4), draw.integers(1, 4)
    yield Call("clocks_per_score", (head_dim, int8, sixteen_bit, counts, rates))


def answers(draw):
    """A dictionary with a letter, a to d, for each question."""
    yield Call("answers", ())


for question in ("why_short", "why_not_twice", "why_causal", "why_d64", "which_claim"):
    task.test(f"answers: {question}", parts=(question,), shows=False)(answers)


LETTERS = (
    ("why_short", "c", "a",
        "With a CUDA graph the host takes no part. What does it change in both passes at N = 1024?"),
    ("why_short", "c", "b", "How many tiles of queries are there in all, heads and batch included, at each N?"),
    ("why_short", "c", "d", "A program multiplies tiles. Are they smaller at N = 1024?"),
    ("why_not_twice", "a", "b", "Quantisation is work per token. Where is it in the line, in `fixed` or in `per_key`?"),
    ("why_not_twice", "a", "c", "Which of the seven matmuls are in the forward pass?"),
    ("why_not_twice", "a", "d",
        "cuDNN reads them as well, twice the bytes. Would that lower our advantage or raise it?"),
    ("why_causal", "d", "a", "If they were all computed, what would the mask save at N = 16384?"),
    ("why_causal", "d", "b",
        "Count them at N = 1024 with tiles of 128: how much faster would that alone let it become?"),
    ("why_causal", "d", "c", "Would that be worse at N = 1024 than at N = 16384? First see what `causal_ms` explains."),
    ("why_d64", "b", "a", "How many numbers has a token, with 16 heads of 128 and with 32 heads of 64?"),
    ("why_d64", "b", "c", "Look at cuDNN's two rows: what does D = 64 cost a program in 16 bit?"),
    ("why_d64", "b", "d", "One launch computes all heads; and would launches cost more at N = 16384 than at 1024?"),
    ("which_claim", "c", "a",
        "In which passes, at which length, against which program? Look for rows that contradict it."),
    ("which_claim", "c", "b", "That is where the lines of the forward pass cross. Training needs both passes."),
    ("which_claim", "c", "d",
        "Two different programs were timed. Is the tensor cores' rate all that differs between them?"),
)  # fmt: skip
task.mistakes = (
    Mistake("needed / (int8 / int8_speed + sixteen_bit)", "(int8 * int8_speed + sixteen_bit) / (int8 + sixteen_bit)",
        "Speeds can't be averaged: a slow matmul takes longer. Add times."),
    Mistake("needed / (int8 / int8_speed + sixteen_bit)", "(int8 / int8_speed + sixteen_bit) / needed",
        "A limit above 1 says faster. Which time is divided by which?"),
    Mistake("return needed / (int8", "return (int8 + sixteen_bit) / (int8",
        "Matmuls that are done twice take time, but the 16-bit program doesn't do them."),
    Mistake("needed / (int8 / int8_speed + sixteen_bit)", "needed / ((int8 + sixteen_bit) / int8_speed)"),
    Mistake("k * (2 + 2 + 1)", "k * (2 + 1)", "K is read twice: before its mean is known, nothing can be rounded."),
    Mistake("return q * (2 + 1) + k * (2 + 2 + 1) + k * (2 + 1)", "return q * 2 + k * 4 + k * 2",
        "Each INT8 number is written, too: one byte."),
    Mistake("batch * kv_heads * n_k * head_dim", "batch * heads * n_k * head_dim",
        "Q has `heads` heads of n_q tokens; K and V have kv_heads of n_k. Which tensor has which?"),
    Mistake("heads * math.ceil(n_q / block) + 2 * kv_heads * math.ceil(n_k / block)",
        "heads * (n_q // block) + 2 * kv_heads * (n_k // block)",
        "A scale is 4 bytes, one per head and block, of Q, of K and of V; the last block may be partial."),
    Mistake(" + 4 * scales", "",
        "A scale is 4 bytes, one per head and block, of Q, of K and of V; the last block may be partial."),
    Mistake("* 1e3 / ms", "/ ms",
        "Bytes over bytes per second are seconds; the time is in milliseconds. Is 10^12 in it?"),
    Mistake("return ms_1 - per_key * n_1, per_key", "return 0.0, ms_2 / n_2",
        "Time isn't proportional to N: what is left at N = 0? Use both measurements."),
    Mistake("return ms_1 - per_key * n_1, per_key", "return per_key, ms_1 - per_key * n_1",
        "The result is (fixed, per_key), in this order, in ms and ms per key."),
    Mistake("if our_slope >= their_slope:", "if our_slope == their_slope:",
        "If a further key costs us more than them, we fall behind sooner or later: infinity."),
    Mistake("return max(0.0, (our_fixed - their_fixed) / (their_slope - our_slope))",
        "return (our_fixed - their_fixed) / (their_slope - our_slope)",
        "Less fixed time and no more per key: faster at every N > 0, so the answer is 0."),
    Mistake("return 0.0 if our_slope == their_slope and our_fixed < their_fixed else math.inf", "return math.inf",
        "If a further key costs both the same, the fixed parts decide: 0 or infinity."),
    Mistake("return fixed + per_key * n * visited / (math.ceil(n / block_q) * math.ceil(n / block_kv))",
        "return fixed + per_key * n / 2",
        "Not half of the tiles: a tile on the diagonal is computed whole. Count the tiles."),
    Mistake("return fixed + per_key * n * visited /", "return (fixed + per_key * n) * visited /",
        "The fixed part doesn't depend on scores: a mask takes nothing off it."),
    Mistake("(math.ceil(n / block_q) * math.ceil(n / block_kv))", "((n // block_q) * (n // block_kv))",
        "The last tile of queries and of keys may be partial, and counts as a tile."),
    Mistake("tensor = head_dim *", "tensor = 2 * head_dim *",
        "Rates count multiply-adds, as head_dim does: no factor of 2."),
    Mistake('sixteen_bit / rates["sixteen_bit"]', 'sixteen_bit / rates["int8"]',
        "A matmul in 16 bit has a rate of its own."),
    Mistake("counts[unit] / rates[unit]", "rates[unit] / counts[unit]",
        "Instructions per score over instructions per clock, for each unit."),
    *(Mistake(f'"{name}": "{right}"', f'"{name}": "{wrong}"', hint) for name, right, wrong, hint in LETTERS),
)  # fmt: skip
