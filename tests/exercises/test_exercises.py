"""The exercises are sound, and the engine that grades them keeps its promises."""

import dataclasses
import doctest
import math

import pytest
import torch
from sage_course.gaps import Mistake
from sage_lab.capstones import trials

from exercises import ROOT, checking, exercise_names, grading, stubs
from exercises import task as tasks
from exercises.answers import Exercise, Judge, wrong_part
from exercises.isolation import Limits, Sandbox, SandboxError
from exercises.task import Call, Draw, agreement, dequantize
from exercises.variants import read_text
from exercises.worker import define


@pytest.mark.parametrize("name", exercise_names())
def test_exercise_is_sound(sandbox, name):
    """The master passes, the stub earns nothing and says so, each mistake meets the hint meant for it."""
    assert checking.check_exercise(name, sandbox, all_mistakes=False) == []


@pytest.mark.parametrize("variant", [1, 2])
@pytest.mark.parametrize("name", exercise_names())
def test_worked_values_in_the_docstrings(name, variant):
    module = define(f"master_{name}", read_text(name, "master.py", variant).encode(), "master.py")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name, globs=vars(module)):
        runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


def library():
    """Yield (exercise, function, arguments, what the library gives) of masters that are more than a line or two."""
    from sage_ref import quantization, sagebwd, sla2

    draw = Draw("library")
    q, k, v, do = (draw.normal(48, 32) for _ in range(4))
    settings = sagebwd.SageBwdSettings.printed(smooth_k=False, block_q=16, block_kv=16)
    forward = sagebwd.sagebwd_forward(q, k, v, settings)
    ordered = sagebwd.sagebwd_forward(q, k, v, sagebwd.SageBwdSettings(smooth_k=False, block_q=48, block_kv=16))
    rounded = quantization.fake_quantize(q) @ quantization.fake_quantize(k, (16, None)).mT / 32**0.5
    yield "05_online_softmax", "online_softmax", (rounded, v, 16), (ordered.output, ordered.log_sum_exp)
    halves = [x.half() for x in (do, q, k, v, forward.output)]
    gradients = sagebwd.sagebwd_backward(*(x.float() for x in halves), forward.log_sum_exp, settings)[:3]
    yield "07_backward_tile", "backward", (*halves, forward.log_sum_exp, 16, 16), tuple(gradients)
    heads = [x.unflatten(0, (1, -1)) for x in (q, k, v)]
    blocks = sla2.BlockSettings(16, 8)
    selected = sla2.top_blocks(sla2.heuristic_scores(*heads[:2], blocks), 2)
    yield "12_linear_branch", "linear_branch", (*heads, selected, 16, 8), sla2.linear_branch(*heads, ~selected, blocks)
    yield "13_soft_top_k", "soft_top_k", (q, 5, 0.1), sla2.soft_top_k(q, 5, 0.1)
    sparse = sla2.sparse_branch(*heads, selected, blocks)
    yield "15_alpha_from_masses", "sparse_attention", (*heads, selected, 16, 8), sparse[0]


def test_masters_give_what_the_library_gives():
    for name, function, arguments, expected in library():
        found = Exercise(name).functions()[function](*arguments)
        for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            assert x.shape == y.shape, (name, function)
            loose = name in ("05_online_softmax", "07_backward_tile")
            assert agreement("roundings" if loose else 1e-5)(x, y).all(), (name, function)


@pytest.mark.parametrize("number", ["11", "16", "17"])
def test_kernels_give_what_the_library_gives(number):
    """O and L, dQ, dK and dV of the tests' own inputs, from numbers that the INT8 tiles stand for."""
    from sage_ref.sagebwd import SageBwdSettings, sagebwd_backward, sagebwd_forward

    exercise = Exercise(next(name for name in exercise_names() if name.startswith(number)))
    for test in exercise.tests[-3:]:
        for call, given in zip(exercise.calls(test, "library"), exercise.expected(test, "library"), strict=True):
            if not call.function.startswith("int8_"):
                continue
            (q, s_q, k, s_k, v, *rest), found = call.arguments, given["outputs"]
            block_q, block_kv = len(q) // len(s_q), len(k) // len(s_k)
            q, k = dequantize(q, s_q, block_q), dequantize(k, s_k, block_kv)
            settings = SageBwdSettings(smooth_k=False, block_q=block_q, block_kv=block_kv)
            if number == "11":
                s_v, n_k, is_causal, *_ = rest
                v, settings = dequantize(v, s_v, block_kv), dataclasses.replace(settings, is_causal=is_causal)
                expected = sagebwd_forward(q[: len(found[0])], k[:n_k], v[:n_k], settings)[:2]
            else:
                v, do, l = v.double(), rest[0].double(), rest[-2 - len(found)].double()
                q, k = q[: len(do)], k[: len(v)]
                o = torch.softmax(q @ k.mT / q.shape[1] ** 0.5, -1) @ v
                gradients = sagebwd_backward(do, q, k, v, o, l, settings)
                expected = gradients[:1] if number == "16" else gradients[1:3]
            for x, y in zip(found, expected, strict=True):
                assert agreement("roundings")(x, y).all(), (test.name, call.function)


def test_the_page_is_up_to_date():
    assert checking.page() == (ROOT / "README.md").read_text(encoding="utf-8")


MASTER = '''"""Title."""


def outer(x):
    """Double x."""
    y = x + x

    def inner(z):
        ### SOLUTION: say "no"
        answer = z - z
        return answer

    ### SOLUTION
    for _ in range(1):
        doubled = y
    return doubled
'''


def test_stub_keeps_the_scaffold_and_says_what_to_do():
    stub, solution = stubs.stub_of(MASTER)
    assert '        raise NotImplementedError("inner: say \\"no\\"")\n\n' in stub
    assert stub.endswith('\n\n    raise NotImplementedError("outer: Double x.")\n')
    assert "y = x + x" in stub
    expected = ["answer = z - z", "return answer", "for _ in range(1):", "doubled = y", "return doubled"]
    assert [line.strip() for line in solution] == expected
    assert stubs.leaked(stub, solution) == []
    assert stubs.leaked(stub + "    doubled = y\n", solution) == ["        doubled = y"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MASTER, "x = 1\n", "at least once"),
        ("    ### SOLUTION\n", "    ### SOLUTION\n\n", "line 13: expected a solution inside of a function"),
        ("### SOLUTION\n", "### SOLUTIONS\n", "alone on its line"),
        ('    """Double x."""\n', "", "or a docstring of outer"),
        ("def outer(x):", "### SOLUTION: all\nx = 1\n\ndef outer(x):", "inside of a function"),
    ],
)
def test_malformed_master_is_an_error(old, new, message):
    assert old in MASTER
    with pytest.raises(stubs.StubError, match=message):
        stubs.stub_of(MASTER.replace(old, new, 1))


def test_points_need_every_seed_and_hidden_data_is_not_shown(graded):
    """An answer that knows the visible inputs by heart fails on hidden ones, which differ in shape too."""
    visible = Draw(0, "00_small", "the test").integers(3, 9)
    by_heart = f"def f(x): return (2 if len(x) == {visible} else 3) * x\n"
    seed = next(x for x in "abc" if Draw(x, "00_small", "the test").integers(3, 9) != visible)
    result = graded(by_heart, seeds=[0, seed])
    assert (result.score, result.tests[0].feedback) == (0, "THE HINT (on hidden inputs)")
    assert graded(by_heart, seeds=[0]).score == 1
    assert "expected" in graded("def f(x): return 3 * x").tests[0].feedback


READS = r"""
raise NotImplementedError('f: do it') -> f not written yet: do it
raise NotImplementedError('do it') -> f raised an error: line 2: NotImplementedError: do it
return torch.empty(2, device='meta').cpu() -> f raised an error: line 2: NotImplementedError
return type('x' * 10**6, (), {})() -> f returned something that can't be used: xxx
raise ValueError('\n' * 9 + 'x' * 10**6) -> f raised an error: line 2: ValueError: xxx
return 10**400 -> f returned something that can't be used: an integer of more than 64 bits
return [torch.zeros(2**18)] * 9 -> f returned something that can't be used: more numbers than are allowed
return None -> f returned None, or something without a gradient: is there a `return`
return 2 * x, None -> f returned None, or something without
return 2 * x, x -> The docstring says which shapes and dtypes are expected. (expected float32
return 2 * x.double() -> The docstring says which shapes and dtypes
return (2 * x)[:1] -> The docstring says which shapes and dtypes
return x * float('nan') -> THE HINT (
return x.mul_(2) -> It overwrites an argument, which its caller still needs. Work on a copy.
(x / 0).to(torch.int8); return 2 * x -> NaN, infinity or too large a number became an integer
torch.as_tensor(x / 0, dtype=torch.int8); return 2 * x -> NaN, infinity or too large a number
(1e9 * x).nan_to_num().to(torch.int8); return 2 * x -> NaN, infinity or too large a number
"""


@pytest.mark.parametrize(("body", "feedback"), [line.split(" -> ") for line in READS.strip().splitlines()])
def test_what_a_student_reads_is_one_line(graded, body, feedback):
    result = graded(f"def f(x):\n    {body}\nimport torch\n")
    assert result.score == 0
    assert not result.broken
    assert result.tests[0].feedback.startswith(feedback), result.tests[0].feedback
    assert len(result.tests[0].feedback) < 600


CHAIN = """
def helper(x):
    return x + 1


def f(x):
    return 10 * helper(x)
"""
MISTAKES = (Mistake("x + 1", "x - 1", "Plus, not minus."), Mistake("10 *", "9 *", "Ten times."))


def chain(small):
    exercise = small(CHAIN, lambda draw: [Call("helper", (draw.normal(4),))], MISTAKES)
    further = small(CHAIN, lambda draw: [Call("f", (draw.normal(4),))]).tests[0]
    exercise.tests = exercise.tests[0], further._replace(name="f"), further._replace(name="f again")
    return exercise


CHAINS = """
x - 1 | 10 * helper(x) | fpp | Plus, not minus. | as a mistake above | as a mistake above
x - 1 | 9 * helper(x) | fff | Plus, not minus. | Ten times. (with a correct helper
x + 1 | 9 * helper(x) | pfp |  | Ten times. | as a mistake above
x - 7 | 10 * helper(x) | fpp | THE HINT | (with a correct helper in | (with a correct helper in
x - 7 | 3 * helper(x) | fff | THE HINT | THE HINT | THE HINT
"""


@pytest.mark.parametrize("line", CHAINS.strip().splitlines())
def test_a_mistake_costs_its_points_once(graded, line):
    """Known or not, in a helper or in what uses it; two at once have a hint each."""
    helper, f, statuses, *feedback = line.split(" | ")
    result = graded(f"def helper(x): return {helper}\ndef f(x): return {f}\n", chain(graded.small))
    assert "".join(test.status[0] for test in result.tests) == statuses
    for test, text in zip(result.tests, feedback, strict=False):
        assert text in test.feedback


@pytest.mark.parametrize(("name", "found"), [("22_capstone_attention", "mean"), ("23_capstone_sparse", "NaN")])
def test_float_attention_reaches_no_milestone_of_a_capstone_about_int8(name, found):
    """Whatever it says of its kernels: values decide. Nor does what reads a block that is not listed."""
    exercise, fair = Exercise(name), {"launched": True, "undefined": False, "changed": (), "copied": ()}
    fair |= {"outside": "", "given": "", "jump": "", "dots": ("f16 x f16 -> f32", "i8 x i8 -> i32")}

    def exact(call):
        (x,) = call.arguments
        oracle = trials.Oracle(x)
        output = oracle.output(v=x["v"].double()) if name.startswith("23") else oracle.output()  # 0 NaN is NaN
        return fair | {"result": output.to(x["q"].dtype)}

    judge = Judge(exercise)
    results = [judge.judge(test, 0, map(exact, exercise.calls(test, 0))) for test in exercise.tests]
    assert [result.status for result in results] == ["failed"] * len(exercise.tests)
    assert found in results[0].feedback


def test_error_of_the_master_is_not_the_students(graded):
    for exercise in (graded.small("def f(x): return 1 / 0\n"), graded.small(calls=lambda draw: 1 / 0)):
        result = graded("def f(x): return x", exercise)
        assert [test.status for test in result.tests] == ["broken"]
        assert result.score is None
        assert "ZeroDivisionError" in result.error
        assert "no score: the grader broke" in grading.table(result)


def test_a_server_that_can_not_start_is_nobodys_fault(graded):
    with Sandbox(Limits(file="many")) as broken, pytest.raises(SandboxError, match="TypeError"):
        graded("def f(x): return x", sandbox=broken)


KERNEL = """import torch, triton, triton.language as tl
@triton.jit
def kernel(x, y, N: tl.constexpr, M: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    tl.store(y + tl.arange(0, M), tl.max(value) * 2)
def f(x, y):
    {body}
"""


KERNEL_CALLS = """
kernel[(1,)](x, y, N=4, M=4) ->
y.fill_(2 * x.max()) -> No Triton kernel was launched
kernel[(1,)](x, y, N=4, M=8) -> Something was written outside of an output
kernel[(1,)](x, y, N=8, M=4) -> THE HINT
kernel[(1,)](x, y, N=4, M=2) -> THE HINT
kernel[(1,)](y, x, N=4, M=4) -> It overwrites an argument
kernel[(1,)](x, y, N='four', M=4) -> f raised an error: line 4:
"""  # N=8: what stands behind x is infinite


@pytest.mark.no_gpu  # a stray store on a GPU may harm the tests after it
@pytest.mark.parametrize(("body", "feedback"), [line.split(" ->") for line in KERNEL_CALLS.strip().splitlines()])
def test_kernels_are_launched_and_stay_inside(graded, body, feedback):
    calls = lambda draw: [Call("f", (torch.ones(4), torch.full((4,), -1.0)), outputs=1)]  # noqa: E731
    exercise = graded.small(KERNEL.format(body="kernel[(1,)](x, y, N=4, M=4)"), calls, triton=True)
    result = graded(KERNEL.format(body=body), exercise, seeds=[0])
    assert (result.score, result.broken) == (not feedback, False)
    assert feedback.strip() in result.tests[0].feedback


@pytest.mark.parametrize(("body", "score"), [("x * y", 1), ("x * y.detach()", 0), ("(x * y).detach()", 0), ("x", 0)])
def test_gradients(graded, body, score):
    calls = lambda draw: [Call("f", (draw.normal(3), draw.normal(3)), upstream=draw.normal(3))]  # noqa: E731
    exercise = graded.small("def f(x, y): return x * y\n", calls)
    assert graded(f"def f(x, y): return {body}\n", exercise).score == score


X = Draw("agreements").normal(64, 32)


AGREEMENTS = """
roundings 64 1.00005 -> True
roundings 2 1.02 -> True: flipped roundings
roundings 4 1.01 -> False: more rows than chance flips
roundings 4 0 -> False
roundings 64 1.0002 -> False: every row a little
roundings 40 1.0002 -> False: more than half of them
roundings 1 1.1 -> False: one row, but by a hundredth of the whole
roundings 1 nan -> False
0.001 64 1.0005 -> True
0.001 64 1.002 -> False
0.001 1 inf -> False
form 64 0 -> True
entries 1 1.001 -> False
"""


@pytest.mark.parametrize("line", AGREEMENTS.strip().splitlines())
def test_agreements(line):
    agree, rows, factor, _, agrees, *_ = line.replace(":", " ").split()
    agree, rows = agree if agree in tasks.AGREEMENTS else float(agree), int(rows)
    spoiled = torch.cat((X[:rows] * float(factor), X[rows:]))
    assert str(bool(agreement(agree)(spoiled, X).all())) == agrees
    odd = torch.where(X > 1, torch.nan, torch.where(X < -1, -torch.inf, X))
    assert agreement(agree)(odd, odd).all()


def test_integers_of_which_few_are_off_by_one_agree():
    off = X.mul(10).to(torch.int8)
    one, two = (torch.where(X.max() == X, off + number, off) for number in (1, 2))
    assert [bool(agreement("int8")(x, off)) for x in (off, one, two, off + 1)] == [True, True, False, False]


PARTS = {"launched": False, "spoiled": False, "undefined": False, "outputs": (), "gradients": None, "changed": ()}
ONE, TWO = torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 2])


def test_only_parts_and_listed_entries_count():
    test = tasks.Test("t", None, "hint", listed=True)
    expected = PARTS | {"result": (ONE, TWO)}
    assert wrong_part(test, PARTS | {"result": (torch.tensor([[1, 9], [3, 4]]), TWO)}, expected) is None
    assert wrong_part(test, PARTS | {"result": (torch.tensor([[1, 9], [9, 4]]), TWO)}, expected)
    first, second = test._replace(listed=False, parts=(0,)), test._replace(listed=False, parts=(1,))
    found = PARTS | {"result": (ONE + 1, TWO)}
    assert wrong_part(first, found, expected).kind == "value"
    assert wrong_part(second, found, expected) is None
    for result in (ONE, None, (ONE,), {"0": ONE}, 7):
        assert wrong_part(second, PARTS | {"result": result}, expected).kind == "form"


EXPECTED = TWO, ONE.double() / 3, torch.zeros(0), 0, 7, 0.5, math.nan, True, "c", (ONE, 2.0), {"a": 1, "b": (TWO,)}, ()
NOTHING = None, (), {}, "", "None", "ValueError: no", {"raised": None}, (None,), (None, None), {"a": None, "b": None}


@pytest.mark.parametrize("agree", ["entries", "int8", "roundings", "form", 1e-3])
def test_nothing_an_error_or_what_is_missing_is_never_right(agree):
    """Whatever is expected, as a result, as a kernel's output or as a gradient, in each way to compare."""
    exercise = Exercise("01_block_quantizer")
    with pytest.raises(SandboxError, match="expected 1 outcomes, got 0"):
        Judge(exercise).judge(exercise.tests[0], 0, [])
    test = tasks.Test("t", None, "hint", agree=agree)
    for value in EXPECTED:
        for expected in ({"result": value}, {"outputs": (value,)}, {"result": ONE, "gradients": (value,)}):
            for nothing in NOTHING:
                part = list(expected)[-1]
                for found in (nothing, (nothing,)):
                    if repr(found) != repr(expected[part]):
                        assert wrong_part(test, PARTS | expected | {part: found}, PARTS | expected), (value, nothing)
            assert wrong_part(test, PARTS | expected, "ValueError: no")  # of a mistake that raises it


def test_what_always_raises_earns_nothing(sandbox):
    """An error that a mistake raises as well may be named, but makes no later test right."""
    exercise = Exercise("21_grouped_backward")
    source = exercise.master.replace("(grad_output @ v.mT - delta)", "grad_output @ v.mT")
    result = grading.grade(exercise, source.encode(), [0], sandbox)
    assert {test.name for test in result.tests if test.score} == {"bytes kept"}
