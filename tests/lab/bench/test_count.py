"""What a score costs, counted in machine code: which loops count, by what they are divided, and the rule."""

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("triton")
from sage_lab.bench import count
from sage_lab.bench.compile import Compiled
from sage_lab.bench.cost_model import GPUS, by_the_rule, demand
from sage_lab.bench.count import Problem, changes, key_loops, row_of

# Of a thread: S of 4 scores and their P V at D = 64, a copy that has a mask, and a pass that computes S alone.
MATMUL = "IMMA.16832.S8.S8 R0, R1, R2, R3"  # 16 x 8 x 32 multiply-adds of a warp
BOTH = [MATMUL] * 4 + ["MUFU.EX2 R5, R3"] * 5
MASKED = [*BOTH, "FSEL R0, R1, R2, P0"]
ALONE = [MATMUL] * 2 + ["MUFU.EX2 R5, R3"] * 5 + ["FADD R3, R3, R4"]
OTHER = [MATMUL] * 2  # a loop with matmuls and no softmax
PROBLEM = Problem(90, 64, False)
COMPILED = Compiled(168, 0, 0, 8, 0, (), ())


def code(*loops):
    lines = []
    for number, loop in enumerate(loops):
        lines += [f".L_x_{number}:", *(f"        /*0000*/   {x} ;" for x in [*loop, f"@P0 BRA `(.L_x_{number})"])]
    return "\n".join(lines)


def test_loops_with_an_exponential_a_score_count_and_a_masked_copy_does_not():
    found = key_loops(code(MASKED, BOTH, ALONE, OTHER), PROBLEM)
    assert sorted((len(loop), scores) for loop, scores in found) == [(9, 4.0), (10, 4.0)]
    assert key_loops(code(OTHER), PROBLEM) == []


def test_all_loops_together_are_the_cost_of_a_score():
    row = row_of("two passes", PROBLEM, [(code(ALONE), COMPILED), (code(BOTH), COMPILED)])
    assert (row["name"], row["head_dim"], row["causal"], row["registers"]) == ("two passes", 64, False, 168)
    assert row["exp2"] == pytest.approx(10 / 4)
    assert row["instructions"] == pytest.approx((9 + 10) / 4, abs=0.01)
    # Tensor cores: 3 x 64 multiply-adds of 4096 a clock; the busiest other unit is that of exp2, 16 a clock.
    assert row["clocks"] == pytest.approx(3 * 64 / 4096 + 10 / 4 / 16, abs=1e-4)
    with pytest.raises(ValueError, match="prepares: expected a loop over keys"):
        row_of("prepares", PROBLEM, [(code(OTHER), COMPILED)])


def test_the_rule_adds_the_busiest_other_unit():
    needed = {"int8": 128, "float16": 64, "special": 0, "integer": 0, "float32": 0, "instructions": 0, "bytes": 64}
    tensor, other = by_the_rule(needed, GPUS[90])
    assert (tensor, other) == (128 / 4096 + 64 / 2048, 64 / 128)
    assert by_the_rule(needed | {"instructions": 4}, GPUS[90])[1] == 1.0


def test_a_change_is_compared_with_the_file_before():
    rows = [{"name": name, **PROBLEM._asdict(), "clocks": x} for name, x in (("before", 0.2), ("after", 0.18))]
    other = {"name": "after", **PROBLEM._replace(causal=True)._asdict(), "clocks": 0.1}
    assert changes([*rows, other]) == ["D=64, no mask: after costs 0.900 of before"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def attention(:", "SyntaxError"),
        ("x = 1", "AttributeError: module 'mine' has no attribute 'attention'"),
        ("def attention(q, k, v, is_causal=False):\n    return q * float(q.sum())", "Tensor.item"),
        ("def attention(q, k, v, is_causal=False):\n    return q", "mine: expected a loop over keys with matmuls"),
    ],
)
def test_a_file_that_can_not_be_counted_is_one_line(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected") as error:
        count.count_of_file(path, PROBLEM)
    assert said in str(error.value)


INSTRUCTIONS = tomllib.loads((Path(__file__).parent / "instructions.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_matmuls_and_bytes_of_shared_memory_are_counted(instruction):
    found = demand([instruction])
    assert [found["int8"], found["float16"], found["bytes"]] == INSTRUCTIONS[instruction]
