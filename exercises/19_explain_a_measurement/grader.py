"""Grader of 19_explain_a_measurement."""

import math

from exercises.grading import Draw, Grader, Student, expect

grader = Grader(
    "19_explain_a_measurement",
    {
        "speed_limit": float,
        "quantization_bytes": float,
        "share_of_time": float,
        "line": (float, float),
        "break_even": float,
        "causal_ms": float,
        "clocks_per_score": dict,
        "answers": dict,
    },
)
grader.hint("mean_of_speeds", "Speeds can't be averaged: a slow matmul takes longer. Add times.")
grader.hint("one_over", "A limit above 1 says faster. Which time is divided by which?")
grader.hint("extra_matmuls", "Matmuls that are done twice take time, but the 16-bit program doesn't do them.")
grader.hint("speed_limit", "The 16-bit program takes `needed` units of time. How many does the INT8 program take?")
grader.hint("k_twice", "K is read twice: before its mean is known, nothing can be rounded.")
grader.hint("writes", "Each INT8 number is written, too: one byte.")
grader.hint("read_as_int8", "What is read still has 16 bit, 2 bytes a number.")
grader.hint("kv_heads", "Q has `heads` heads of n_q tokens; K and V have kv_heads of n_k. Which tensor has which?")
grader.hint("scales", "A scale is 4 bytes, one per head and block, of Q, of K and of V; the last block may be partial.")
grader.hint("bytes", "Add up, for each of Q, K, V: bytes read, bytes written, and 4 bytes per scale.")
grader.hint("milliseconds", "Bytes over bytes per second are seconds; the time is in milliseconds. Is 10^12 in it?")
grader.hint("share", "The share is the time for the bytes, divided by the time measured.")
grader.hint("through_zero", "Time isn't proportional to N: what is left at N = 0? Use both measurements.")
grader.hint("order_of_line", "The result is (fixed, per_key), in this order, in ms and ms per key.")
grader.hint(
    "line", "per_key is the difference of times over the difference of lengths; fixed is what the line has at 0."
)
grader.hint("crossing", "Where do the lines cross? fixed + per_key N is the same for both there.")
grader.hint("ahead", "Less fixed time and no more per key: faster at every N > 0, so the answer is 0.")
grader.hint("never", "If a further key costs us more than them, we fall behind sooner or later: infinity.")
grader.hint("parallel", "If a further key costs both the same, the fixed parts decide: 0 or infinity.")
grader.hint("half", "Not half of the tiles: a tile on the diagonal is computed whole. Count the tiles.")
grader.hint("fixed_halved", "The fixed part doesn't depend on scores: a mask takes nothing off it.")
grader.hint("partial_tiles", "The last tile of queries and of keys may be partial, and counts as a tile.")
grader.hint("tiles", "For each tile of queries: how many tiles of keys start at or before its last query?")
grader.hint("clocks_form", 'A dictionary with the keys "tensor", "exp2", "alu" and "issue", each with a number.')
grader.hint("multiply_adds", "Rates count multiply-adds, as head_dim does: no factor of 2.")
grader.hint("sixteen_bit", "A matmul in 16 bit has a rate of its own.")
grader.hint("tensor", "A matmul takes head_dim multiply-adds per score; divide by the rate of its kind.")
grader.hint("other_units", "Instructions per score over instructions per clock, for each unit.")
grader.hint("answers_form", "A dictionary with a letter, a to d, for each question.")
grader.hint("why_short_a", "With a CUDA graph the host takes no part. What does it change in both passes at N = 1024?")
grader.hint("why_short_b", "How many tiles of queries are there in all, heads and batch included, at each N?")
grader.hint("why_short_d", "A program multiplies tiles. Are they smaller at N = 1024?")
grader.hint("why_not_twice_b", "Quantisation is work per token. Where is it in the line, in `fixed` or in `per_key`?")
grader.hint("why_not_twice_c", "Which of the seven matmuls are in the forward pass?")
grader.hint("why_not_twice_d", "cuDNN reads them as well, twice the bytes. Would that lower our advantage or raise it?")
grader.hint("why_causal_a", "If they were all computed, what would the mask save at N = 16384?")
grader.hint("why_causal_b", "Count them at N = 1024 with tiles of 128: how much faster would that alone let it become?")
grader.hint("why_causal_c", "Would that be worse at N = 1024 than at N = 16384? First see what `causal_ms` explains.")
grader.hint("why_d64_a", "How many numbers has a token, with 16 heads of 128 and with 32 heads of 64?")
grader.hint("why_d64_c", "Look at cuDNN's two rows: what does D = 64 cost a program in 16 bit?")
grader.hint("why_d64_d", "One launch computes all heads; and would launches cost more at N = 16384 than at 1024?")
grader.hint(
    "which_claim_a", "In which passes, at which length, against which program? Look for rows that contradict it."
)
grader.hint("which_claim_b", "That is where the lines of the forward pass cross. Training needs both passes.")
grader.hint(
    "which_claim_d", "Two different programs were timed. Is the tensor cores' rate all that differs between them?"
)

ANSWERS = {"why_short": "c", "why_not_twice": "a", "why_causal": "d", "why_d64": "b", "which_claim": "c"}
RELATIVE = 1e-6  # these are formulas: rounding in float64 is all that may differ


def near(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= RELATIVE * abs(expected)


def not_as(found: float, wrong: float, expected: float, hint: str) -> None:
    """Fail with this hint if found is a known wrong answer."""
    expect(near(wrong, expected) or not near(found, wrong), hint)


def number(draw: Draw, low: float, high: float) -> float:
    return float(draw.uniform(1, low=low, high=high))


@grader.test("speed_limit", points=2)
def limit(student, draw):
    needed, kept, speed = draw.integers(4, 9), draw.integers(1, 4), number(draw, 1.5, 4.5)
    for int8, sixteen_bit in ((needed - kept, kept), (needed - kept + 1, kept + draw.integers(0, 2))):
        found, time = student.speed_limit(needed, int8, sixteen_bit, speed), int8 / speed + sixteen_bit
        expected, total = needed / time, int8 + sixteen_bit
        not_as(found, (int8 * speed + sixteen_bit) / total, expected, "mean_of_speeds")
        not_as(found, (int8 * speed + sixteen_bit) / needed, expected, "mean_of_speeds")
        not_as(found, 1 / expected, expected, "one_over")
        not_as(found, total / time, expected, "extra_matmuls")
        expect(near(found, expected), "speed_limit")


@grader.test("quantization_bytes", points=3)
def moved(student, draw):
    batch, kv_heads, head_dim = draw.integers(1, 5), draw.integers(2, 5), draw.choice((64, 96, 128))
    block = draw.choice((64, 128))
    heads = kv_heads * draw.integers(2, 5)
    n_q, n_k = draw.integers(5, 20) * block + draw.integers(1, block), draw.integers(21, 40) * block + 1
    found = student.quantization_bytes(batch, heads, kv_heads, n_q, n_k, head_dim, block)

    def count(reads_of_k=2, written=1, read=2, h=heads, h_kv=kv_heads, n=n_q, m=n_k):
        numbers_q, numbers_k = batch * h * n * head_dim, batch * h_kv * m * head_dim
        scales = batch * (h * math.ceil(n / block) + 2 * h_kv * math.ceil(m / block))
        return numbers_q * (read + written) + numbers_k * ((reads_of_k + 1) * read + 2 * written) + 4 * scales

    expected = count()
    for hint, wrong in (
        ("k_twice", count(reads_of_k=1)),
        ("writes", count(written=0)),
        ("read_as_int8", count(read=1)),
        ("read_as_int8", count(written=2)),
        ("kv_heads", count(h_kv=heads)),
        ("kv_heads", count(h=kv_heads)),
        ("kv_heads", count(n=n_k)),
        ("kv_heads", count(m=n_q)),
    ):
        expect(not abs(found - wrong) <= 1e-3 * wrong, hint)  # whatever the scales, a few bytes in ten thousand
    expect(abs(found - expected) <= 1e-3 * expected, "bytes")
    expect(found == expected, "scales")


@grader.test("share_of_time")
def share(student, draw):
    bytes_moved, rate, ms = draw.integers(10**8, 10**10), number(draw, 0.5, 8.0), number(draw, 5.0, 50.0)
    found, expected = student.share_of_time(bytes_moved, rate, ms), bytes_moved / (rate * 1e9) / ms
    for power in (-15, -12, -9, -6, -3, 3, 6, 9, 12):
        not_as(found, expected * 10.0**power, expected, "milliseconds")
    expect(near(found, expected), "share")


def draw_line(draw: Draw) -> tuple[float, float]:
    return number(draw, 0.05, 0.8), number(draw, 1e-4, 6e-4)


@grader.test("line", points=2)
def two_points(student, draw):
    fixed, per_key = draw_line(draw)
    n_1, n_2 = 1024 * draw.integers(1, 4), 1024 * draw.integers(5, 30)
    ms_1, ms_2 = fixed + per_key * n_1, fixed + per_key * n_2
    for first, second in (((n_1, ms_1), (n_2, ms_2)), ((n_2, ms_2), (n_1, ms_1))):
        found_fixed, found_per_key = student.line(*first, *second)
        for wrong in (ms_1 / n_1, ms_2 / n_2, (ms_1 / n_1 + ms_2 / n_2) / 2):
            not_as(found_per_key, wrong, per_key, "through_zero")
        expect(not (near(found_fixed, per_key) and near(found_per_key, fixed)), "order_of_line")
        not_as(found_per_key, 1000 * per_key, per_key, "order_of_line")
        expect(near(found_per_key, per_key) and near(found_fixed, fixed), "line")


@grader.test("break_even", points=2)
def crossing(student, draw):
    fixed, per_key = draw_line(draw)
    more_fixed, more_per_key = fixed + number(draw, 0.1, 0.5), per_key + number(draw, 1e-5, 1e-4)
    expected = (more_fixed - fixed) / (more_per_key - per_key)
    expect(near(student.break_even((more_fixed, per_key), (fixed, more_per_key)), expected), "crossing")
    expect(student.break_even((fixed, per_key), (more_fixed, more_per_key)) == 0, "ahead")
    for ours, theirs in (
        ((fixed, more_per_key), (more_fixed, per_key)),
        ((more_fixed, more_per_key), (fixed, per_key)),
    ):
        expect(student.break_even(ours, theirs) == math.inf, "never")
    expect(student.break_even((fixed, per_key), (more_fixed, per_key)) == 0, "parallel")
    expect(student.break_even((more_fixed, per_key), (fixed, per_key)) == math.inf, "parallel")


@grader.test("causal_ms", points=3)
def causal(student, draw):
    def count(n, block_q, block_kv):
        """Visited and all tiles, one by one."""
        first_queries, first_keys = range(0, n, block_q), range(0, n, block_kv)
        visited = sum(key <= min(query + block_q, n) - 1 for query in first_queries for key in first_keys)
        return visited, len(first_queries) * len(first_keys)

    for ragged in (0, 1):
        fixed, per_key = draw_line(draw)
        block_q, block_kv = draw.choice(((64, 128), (128, 64), (128, 128)))
        n = 128 * draw.integers(5, 20) + ragged * draw.integers(1, 60)
        found = student.causal_ms((fixed, per_key), n, block_q, block_kv)
        visited, tiles = count(n, block_q, block_kv)
        expected = fixed + per_key * n * visited / tiles
        for wrong in (0.5, (n + 1) / (2 * n)):
            not_as(found, fixed + wrong * per_key * n, expected, "half")
            not_as(found, wrong * (fixed + per_key * n), expected, "fixed_halved")
        not_as(found, (fixed + per_key * n) * visited / tiles, expected, "fixed_halved")
        expect(near(found, expected), "partial_tiles" if ragged else "tiles")


@grader.test("clocks_per_score", points=2)
def clocks(student, draw):
    rates = {"sixteen_bit": 512 * draw.integers(1, 5), "exp2": 4 * draw.integers(2, 6)}
    rates |= {"int8": rates["sixteen_bit"] * draw.choice((2, 4)), "alu": 64, "issue": 128}
    counts = {"exp2": 1.0, "alu": number(draw, 1.0, 4.0), "issue": number(draw, 6.0, 12.0)}
    head_dim, int8, sixteen_bit = draw.choice((64, 96, 128)), draw.integers(1, 4), draw.integers(1, 4)
    found = student.clocks_per_score(head_dim, int8, sixteen_bit, counts, rates)
    units = ("tensor", "exp2", "alu", "issue")
    expect(found.keys() == set(units), "clocks_form")
    expect(all(isinstance(x, float | int) and not isinstance(x, bool) for x in found.values()), "clocks_form")
    tensor = head_dim * (int8 / rates["int8"] + sixteen_bit / rates["sixteen_bit"])
    not_as(found["tensor"], 2 * tensor, tensor, "multiply_adds")
    for kind in ("int8", "sixteen_bit"):
        not_as(found["tensor"], head_dim * (int8 + sixteen_bit) / rates[kind], tensor, "sixteen_bit")
    expect(near(found["tensor"], tensor), "tensor")
    for unit in units[1:]:
        expect(near(found[unit], counts[unit] / rates[unit]), "other_units")


def ask(question: str) -> None:
    @grader.test(f"answers: {question}")
    def check(student: Student, draw: Draw) -> None:
        found = student.answers().get(question)
        expect(isinstance(found, str) and found in tuple("abcd"), "answers_form")
        expect(found == ANSWERS[question], f"{question}_{found}")


for question in ANSWERS:
    ask(question)
