"""Tests of 19_explain_a_measurement."""

from exercises.task import Call, Task

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
