"""What a grader.py is written with: a Grader and its tests, expect and close, and the submission as `student`.

Each test runs on the visible seed and on hidden ones, and earns its points if it holds on all. A test that doesn't
hold shows one static hint, and on the visible inputs what was expected and found: feedback can't contain hidden
inputs or answers. An error in the grader's own code is not the student's: the test is "broken" and the exercise has
no score.
"""

import ast
import dataclasses
import hashlib
import importlib.util
import json
import math
import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exercises import ROOT, exercise_names
from exercises.isolation import Buffer, ChildError, Guarded, Sandbox
from exercises.wire import WireError
from sage_ref.quantization import quantize
from sage_ref.tracing import relative_l2

__all__ = ["Buffer", "Grader", "Guarded", "StudentError", "close", "expect"]
VISIBLE_SEED = 0
HIDDEN_SEEDS = 2
SPEED_SECONDS = 1.0
FILE_LIMIT = 2**20  # bytes of a submission
TYPICAL_ROW, WHOLE = 1e-4, 6e-3  # relative errors that rounding_distance counts as 1
FEEDBACK_LIMIT = 500  # characters of one test's feedback
CRASHED = "grading this exercise crashed twice; tell your instructor, who has the reason in the log"
NOT_JUDGED = "can't be judged before the tests above pass"
StudentError = ChildError
# What arithmetic on tensors of the wrong shape or type raises.
MALFORMED = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


class Failed(Exception):
    """An expectation doesn't hold; str() is its hint's key. data: what was found and expected, for visible inputs."""

    def __init__(self, hint: str, data: str = ""):
        super().__init__(hint)
        self.data = data


def expect(holds: bool | Tensor, hint: str, *, found: Any = None, expected: Tensor | None = None) -> None:
    """Fail the test with this hint unless `holds`; on visible inputs with what was found and expected, if given.

    expected may be a tensor on the device "meta", which has a shape and a dtype and no numbers.
    """
    if not bool(holds):
        raise Failed(hint, "" if expected is None else difference(found, expected))


def difference(found: Any, expected: Tensor) -> str:
    """What a student reads of a wrong tensor: its form if that is wrong, else one entry and the error of the whole."""
    if not isinstance(found, Tensor):
        return f"Expected a tensor, found {_words_of(found)}."
    found = found.as_subclass(Tensor).detach()
    if expected.is_meta or found.shape != expected.shape:
        words = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (expected, found)]
        return f"Expected {words[0]}, found {words[1]}." if words[0] != words[1] else "Found NaN or infinity."
    wanted, got = expected.as_subclass(Tensor).detach().double().flatten(), found.double().flatten()
    if not len(got):
        return "Found an empty tensor."
    error = (got - wanted).abs().nan_to_num(math.inf, math.inf)
    place = int((error >= error.max() / 100).nonzero()[0])  # the first entry that is no mere rounding
    index = [int(i) for i in (error == error).view(found.shape).nonzero()[place]]
    whole = (got - wanted).norm() / wanted.norm()
    return f"At {index}: expected {wanted[place]:.6g}, found {got[place]:.6g}; relative error of the whole {whole:.2g}."


def close(actual: Any, expected: Tensor, hint: str, *, relative_l2: float) -> None:
    """Fail with this hint unless |actual - expected| <= relative_l2 |expected|, in the Frobenius norm.

    Another shape, NaN and infinity fail too; dtypes may differ, as float64 holds both.
    """
    shown = {"found": actual, "expected": expected}
    expect(isinstance(actual, Tensor) and actual.shape == expected.shape, hint, **shown)
    actual, expected = actual.double(), expected.double()
    if not expected.isfinite().all():
        raise ArithmeticError("expected: a finite tensor, got NaN or infinity")
    # False for NaN and infinity too.
    error = torch.linalg.vector_norm(actual - expected)
    expect(error <= relative_l2 * torch.linalg.vector_norm(expected), hint, **shown)


class Draw:
    """Seeded inputs of one test; torch tensors and Python numbers."""

    def __init__(self, *names: Any):
        digest = hashlib.sha256(repr(names).encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent standard normal numbers."""
        return torch.randn(shape, generator=self.generator).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.rand(shape, generator=self.generator) * (high - low) + low

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Any:
        """Integers in [low, high): a tensor of this shape, or a Python int if there is none."""
        drawn = torch.randint(low, high, shape, generator=self.generator)
        return drawn.to(dtype) if shape else int(drawn)

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integers(0, len(options))]

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator)


def off_ties(x: Tensor, block: int) -> Tensor:
    """x [N, D] with 0 for entries so close to a rounding tie that x / s and x * (1 / s) may go different ways.

    s: one scale per `block` rows. One such entry of a right operand would move a whole column of the result.
    """
    quantized = quantize(x.float(), (block, None))
    step = quantized.scale.repeat_interleave(block, 0)[: len(x)]
    return torch.where((x - quantized.dequantize()).abs() > 0.4999 * step, 0, x)


def rounding_distance(actual: Tensor, expected: Tensor) -> float:
    """How far actual [N, D] is from expected [N, D], in units of what flipped roundings explain: over 1 is too far.

    A rounding to nearest flips when float32 sums in another order, which moves a few rows by a thousandth part or
    more. The median row off by 1e-4, or the whole by 6e-3, as by a missing rounding, is no such accident.
    """
    actual, expected = actual.double(), expected.double()
    error, size = (actual - expected).norm(dim=-1), expected.norm(dim=-1)
    typical = (error / size.clamp(min=1e-30)).median()
    return max(typical.item() / TYPICAL_ROW, relative_l2(actual, expected) / WHOLE)


def unlike(
    actual: Tensor,
    wrong: Tensor,
    expected: Tensor,
    hint: str,
    *,
    within: float,
    distance: Callable[[Tensor, Tensor], float] = relative_l2,
) -> None:
    """Fail with this hint if actual is a known wrong answer: within this distance of it, and nearer than to expected.

    Some draws bring a wrong answer so close to the right one that the right one is within that distance, too.
    """
    from_wrong = distance(actual, wrong)
    right = from_wrong > within or from_wrong >= distance(actual, expected)
    expect(right, hint, found=actual, expected=expected)


@dataclasses.dataclass(frozen=True)
class Test:
    name: str
    points: float
    function: Callable[["Student", Draw], None]
    needs_gpu: bool = False


class Grader:
    """The tests of one exercise, in the order in which a student should solve them.

    functions: names of what the submission defines; a mapping says what each returns, a type or a tuple of types
    (`{"quantize_block": (Tensor, Tensor)}`), and any other answer fails with a message that says so.
    triton: on a machine with CUDA the submission's tensors are on the GPU (else Triton's interpreter runs).
    """

    def __init__(self, name: str, functions: Sequence[str] | Mapping[str, Any], *, triton: bool = False):
        self.name = name
        self.returns = dict(functions) if isinstance(functions, Mapping) else dict.fromkeys(functions)
        self.triton = triton
        self.tests: list[Test] = []
        self.hints: dict[str, str] = {}

    def hint(self, key: str, text: str) -> None:
        """What a student reads when an expectation with this key fails. Static: it holds no input and no answer."""
        if key in self.hints:
            raise ValueError(f"key: expected a new hint, got {key!r} twice")
        self.hints[key] = text

    def test(self, name: str, points: float = 1) -> Callable:
        """Decorator of a test (student, draw) -> None; it fails by expect, close or a StudentError."""

        def add(function):
            self.tests.append(Test(name, points, function))
            return function

        return add

    def speed_test(
        self,
        name: str,
        function: str,
        arguments: Callable[[Draw], tuple],
        reference: Callable[..., Any],
        *,
        slower: float,
        hint: str,
        points: float = 1,
    ) -> None:
        """A mark for speed, only with CUDA and if all tests before it pass.

        At most `slower` times the time of `reference` on the same inputs. The grader's clock measures one request for
        many calls in the submission's process, transfers and all, against as many calls of `reference` (with CUDA
        tensors) in its own, so many that they take SPEED_SECONDS. A submission could skip calls, since the loop runs
        beside it: give few points.
        """

        def run(student, draw):
            inputs = arguments(draw)
            moved = [x.cuda() if isinstance(x, Tensor) else x for x in inputs]

            def run_reference(count):
                for _ in range(count):
                    reference(*moved)
                torch.cuda.synchronize()

            run_reference(1)  # compiles
            count = 1
            while (allowed := slower * _seconds(run_reference, count)) < slower * SPEED_SECONDS:
                count *= 2
            student.repeat(function, 1, *inputs)  # compiles
            expect(_seconds(lambda count: student.repeat(function, count, *inputs), count) <= allowed, hint)

        self.tests.append(Test(name, points, run, needs_gpu=True))

    @property
    def max_score(self) -> float:
        """Points that can be had on any machine."""
        return sum(test.points for test in self.tests if not test.needs_gpu)


def _seconds(run, count):
    start = time.monotonic()
    run(count)
    return time.monotonic() - start


class Student:
    """The submission as a grader sees it: student.f(x) calls f in the submission's process.

    student.f(*arguments, **keywords)                      the result
    student.f.gradients(*arguments, upstream=dO)           (result, gradient or None of each tensor argument)
    student.f.in_place(*arguments)                         (result, the arguments as the call left them)
    student.f.casts(*arguments)                            (result, whether NaN or too large a number became an integer)
    student.launches                                       how many Triton kernels the last call launched
    Arguments may be Guarded(tensor) with in_place: they come back as Buffer(tensor, intact).
    What the submission's process says of casts, launches and margins helps an honest mistake; a forger can change it.
    """

    def __init__(self, grader: Grader, source: bytes, sandbox: Sandbox):
        self._grader, self._source, self._sandbox = grader, source, sandbox
        self._child = None
        self.correct = {}  # of functions: what takes the place of those that they use
        self.called = []  # the names of what a test has called
        self._deadline = time.monotonic() + sandbox.limits.exercise_seconds
        self._device = "cuda" if grader.triton and torch.cuda.is_available() else "cpu"
        self.printed, self.launches = "", 0

    def __getattr__(self, name: str) -> "Function":
        if name not in self._grader.returns:
            raise AttributeError(f"{name}: expected one of {tuple(self._grader.returns)}")
        return Function(self, name)

    def repeat(self, name: str, count: int, *arguments: Any) -> Any:
        return self._call(name, arguments, {}, repeat=count)

    def _call(self, name, arguments, keywords, **how):
        if time.monotonic() >= self._deadline:
            raise StudentError("used up the time of the exercise")
        if any(name in self.correct[other].names for other in self.called if other in self.correct):
            raise AssertionError(f"{name}: expected a test of its own, got one that calls what uses it, too")
        self.called.append(name)
        if self._child is None:
            self._child = self._sandbox.start(self._source)
        where = {"device": self._device, "deadline": self._deadline, "correct": self.correct.get(name)}
        try:
            answer = self._child.call(name, arguments, keywords, **how, **where)
        except ChildError as error:
            message = f"{name} {error.shown}", f"{name} {error}"
            if error.fatal:
                self.close()
            raise StudentError(*message) from error
        except WireError as error:
            if not _holds_claimed((arguments, keywords, how)):
                raise
            raise StudentError(f"{name} can't be called with what was returned before") from error
        self.launches = self._child.launches
        result = answer[0] if how.get("mode") else answer
        expected = self._grader.returns[name]
        if expected is not None and not _is_a(result, expected):
            message = f"{name} returned {_words_of(result)}, expected {_words(expected)}"
            raise StudentError(f"{name} returned something else than {_words(expected)}", message)
        return _claimed(answer)

    def close(self) -> None:
        if self._child is not None:
            self.printed += self._child.printed()
            self._child.close()
            self._child = None


class Claimed(Tensor):
    """A tensor that a submission returned, and whatever is computed from it.

    If an operation on it can't be done, its shape or dtype is at fault: with the master's tensors it can.
    """

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        try:
            return super().__torch_function__(function, types, arguments, keywords)
        except MALFORMED as error:
            raise StudentError("returned tensors whose shapes or dtypes don't fit together") from error


def _claimed(answer):
    """The answer with each tensor in it marked as Claimed, and no integer that a float can't hold."""
    if isinstance(answer, Tensor):
        return answer.as_subclass(Claimed)
    if isinstance(answer, Buffer):
        return answer._replace(tensor=answer.tensor.as_subclass(Claimed))
    if isinstance(answer, tuple):
        return tuple(map(_claimed, answer))
    if isinstance(answer, dict):
        return {key: _claimed(item) for key, item in answer.items()}
    if isinstance(answer, int) and abs(answer) >= 2**63:
        raise StudentError("returned an integer of more than 64 bits")
    return answer


def _holds_claimed(value):
    """Whether a value is or holds what the submission returned."""
    if isinstance(value, tuple | list):
        return any(map(_holds_claimed, value))
    if isinstance(value, dict):
        return any(map(_holds_claimed, value.values()))
    return isinstance(value.tensor if isinstance(value, Guarded) else value, Claimed)


class Function:
    """One function of the submission."""

    def __init__(self, student: Student, name: str):
        self._student, self._name = student, name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._student._call(self._name, arguments, keywords)

    def gradients(self, *arguments: Any, upstream: Any, **keywords: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
        """upstream: d(loss)/d(result), or a tuple of them if the result is one (None where it isn't needed)."""
        return self._student._call(self._name, arguments, keywords, mode="gradients", upstream=upstream)

    def in_place(self, *arguments: Any, **keywords: Any) -> tuple[Any, tuple[Any, ...]]:
        return self._student._call(self._name, arguments, keywords, mode="in_place")

    def casts(self, *arguments: Any, **keywords: Any) -> tuple[Any, bool]:
        return self._student._call(self._name, arguments, keywords, mode="casts")


def _is_a(value, expected):
    if isinstance(expected, tuple):
        fits = isinstance(value, tuple) and len(value) == len(expected)
        return fits and all(_is_a(item, kind) for item, kind in zip(value, expected, strict=True))
    if expected is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return value is None if expected is None else isinstance(value, expected)


def _words(expected):
    if isinstance(expected, tuple):
        return f"a tuple of {len(expected)} ({', '.join(map(_words, expected))})"
    kinds = {Tensor: "a tensor", float: "a number", int: "an integer", dict: "a dictionary", None: "None"}
    return kinds.get(expected, str(expected))


def _words_of(value):
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return {Tensor: "a tensor", type(None): "None"}.get(type(value), f"a {type(value).__name__}")


@dataclasses.dataclass(frozen=True)
class TestResult:
    """status: passed, failed, skipped (not on this machine; counts for nothing) or broken (the grader's fault)."""

    name: str
    max_score: float
    status: str
    hint: str | None = None  # the key of the hint that was shown
    feedback: str = ""
    called: tuple[str, ...] = ()  # the functions that it called

    @property
    def score(self) -> float:
        return self.max_score if self.status == "passed" else 0.0


@dataclasses.dataclass(frozen=True)
class ExerciseResult:
    exercise: str
    tests: list[TestResult]
    seconds: float
    printed: str = ""
    error: str | None = None  # why the grader broke, for the instructor

    @property
    def broken(self) -> bool:
        return any(test.status == "broken" for test in self.tests)

    @property
    def score(self) -> float | None:
        """Points, or None if the grader broke."""
        return None if self.broken else sum(test.score for test in self.tests)

    @property
    def max_score(self) -> float:
        return sum(test.max_score for test in self.tests if test.status != "skipped")

    def as_json(self) -> dict[str, Any]:
        """For --json: nothing that the submission printed."""
        tests = [dataclasses.asdict(test) | {"score": test.score} for test in self.tests]
        scores = {"score": self.score, "max_score": self.max_score}
        return {"exercise": self.exercise, **scores, "seconds": round(self.seconds), "tests": tests}


def grade(
    grader: Grader, source: bytes | None, seeds: Sequence[int], sandbox: Sandbox, *, first_failure_only: bool = False
) -> ExerciseResult:
    """All tests of one submission on all seeds, the visible one first. source None: nothing was handed in."""
    start = time.monotonic()
    results, errors = [], []
    if source is None or len(source) > FILE_LIMIT:
        reason = "exercise.py wasn't handed in" if source is None else "exercise.py is larger than 1 MiB"
        results = [TestResult(test.name, test.points, "failed", None, reason) for test in grader.tests]
        return ExerciseResult(grader.name, results, 0.0)
    student = Student(grader, source, sandbox)
    try:
        for test in grader.tests:
            failed = [x for x in results if x.status == "failed"]
            result = _run(grader, test, student, seeds, failed, errors)
            if result.status == "failed" and failed:
                result = _explained(grader, test, student, seeds, failed, errors, result)
            results.append(result)
            if first_failure_only and result.status in ("failed", "broken"):
                break
    finally:
        student.close()
    return ExerciseResult(grader.name, results, time.monotonic() - start, student.printed, "\n".join(errors) or None)


def grade_folder(folder: Path, name: str, seeds: Sequence[Any], sandbox: Sandbox, *, alone: bool) -> ExerciseResult:
    """The result of one exercise of a submission; whatever goes wrong with it costs no other exercise its score."""
    try:
        grader = load_grader(name)
    except Exception as error:
        broken = TestResult("grader.py can be loaded", 1, "broken", None, "the grader broke")
        return ExerciseResult(name, [broken], 0.0, error="".join(traceback.format_exception(error)))
    for _ in range(2):
        try:
            return grade(grader, read_submission(folder, name, alone=alone), seeds, sandbox)
        except Exception as error:  # outside of a test: no error of a grader
            crash = "".join(traceback.format_exception(error))
            sandbox.restart()
    results = [TestResult(test.name, test.points, "failed", None, CRASHED) for test in grader.tests]
    return ExerciseResult(name, results, 0.0, error=crash)


class Correct(NamedTuple):
    """Functions of the master that take the place of a submission's, and the code that defines them."""

    names: tuple[str, ...]
    source: str


def correct_functions(grader: Grader) -> dict[str, Correct] | None:
    """For each function of an exercise what it uses of the others, as the master has it; None where no master is."""
    path = ROOT / grader.name / "master.py"
    if not path.exists():  # in the student's zip
        return None
    module = ast.parse(path.read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    found = {}
    for name in grader.returns:
        used, front = set(), {name} & functions.keys()
        while front:
            words = {x.id for other in front for x in ast.walk(functions[other]) if isinstance(x, ast.Name)}
            front = words & functions.keys() - used
            used |= front
        names = tuple(other for other in grader.returns if other in used - {name})
        solution = grader.returns.keys() - set(names)  # the submission must not meet the rest of it
        kept = [node for node in module.body if getattr(node, "name", None) not in solution]
        if names:
            found[name] = Correct(names, ast.unparse(ast.Module(kept, [])))
    return found


def _explained(grader, test, student, seeds, failed, errors, result):
    """What becomes of a test that fails after others.

    Functions that it uses and that failed before are replaced by correct ones, and it runs again: in a process of its
    own, so that no other test meets their code, and with fixed hints alone, since a submission could show that code.
    If its own function has failed before, or there is no master, its hint may miss the point and says so.
    """
    broken, correct = {name for earlier in failed for name in earlier.called}, correct_functions(grader)
    suspects = set(result.called)
    if correct is None:
        names = list(grader.returns)
        suspects = set(names[: 1 + max(map(names.index, result.called), default=-1)])
    used = {name: correct[name] for name in result.called if name in correct} if correct else {}
    if replaced := sorted({name for x in used.values() for name in x.names} & broken):
        student.close()
        student.correct = correct
        try:
            result = _run(grader, test, student, seeds, failed, errors)
        finally:
            student.close()
            student.correct = {}
        note = f"(with a correct {' and '.join(replaced)} in the place of yours)"
        result = dataclasses.replace(result, feedback=f"{result.feedback} {note}".strip())
    causes = [earlier.name for earlier in failed if suspects & set(earlier.called)]
    if result.status == "failed" and result.hint and causes:
        feedback = f"Perhaps for the same reason as '{causes[0]}'. If not: {result.feedback}"
        result = dataclasses.replace(result, feedback=feedback[:FEEDBACK_LIMIT])
    return result


def _run(grader, test, student, seeds, failed, errors):
    """One test on all seeds, up to the first that fails."""
    student.called = []
    result = _judge(grader, test, student, seeds, bool(failed), errors)
    return dataclasses.replace(result, called=tuple(dict.fromkeys(student.called)))


def _judge(grader, test, student, seeds, failed_before, errors):
    if test.needs_gpu and not torch.cuda.is_available():
        return TestResult(test.name, test.points, "skipped", None, "needs a GPU")
    if grader.triton and importlib.util.find_spec("triton") is None:
        return TestResult(test.name, test.points, "skipped", None, "needs Triton: Linux, or WSL on Windows")
    if test.needs_gpu and failed_before:  # to be fast at something else is no merit
        return TestResult(test.name, test.points, "failed", None, NOT_JUDGED)
    for seed in seeds:
        visible = seed == VISIBLE_SEED
        shows = visible and not student.correct
        where = "" if visible else " (on hidden inputs)"
        try:
            test.function(student, Draw(seed, grader.name, test.name))
        except StudentError as error:
            feedback = " ".join((str(error) if shows else error.shown).split())[:FEEDBACK_LIMIT] + where
            return TestResult(test.name, test.points, "failed", None, feedback)
        except Failed as failure:
            key = str(failure)
            if key in grader.hints:
                feedback = grader.hints[key] + (f" {failure.data}" if shows and failure.data else where)
                return TestResult(test.name, test.points, "failed", key, feedback[:FEEDBACK_LIMIT])
            errors.append(f"{test.name}: no hint has the key {key!r}")
            return TestResult(test.name, test.points, "broken", None, "the grader broke")
        except Exception as error:
            # A wrong shape that an earlier test has named may well stop this test's own arithmetic.
            if failed_before and isinstance(error, MALFORMED):
                return TestResult(test.name, test.points, "failed", None, NOT_JUDGED)
            errors.append(f"{test.name}, seed {seed}: {''.join(traceback.format_exception(error))}")
            return TestResult(test.name, test.points, "broken", None, "the grader broke")
    return TestResult(test.name, test.points, "passed")


def load_grader(name: str) -> Grader:
    """The `grader` of exercises/NAME/grader.py."""
    path = ROOT / name / "grader.py"
    if name not in exercise_names():
        raise ValueError(f"name: expected one of {exercise_names()}, got {name!r}")
    spec = importlib.util.spec_from_file_location(f"exercises.grader_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.grader


def submission_folder(folder: Path) -> Path:
    """Where the exercises lie in what was handed in: here, in the only folder of a zip, or in `exercises` of either."""
    for _ in range(2):
        inside = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
        if _is_real_folder(folder / "exercises"):
            return folder / "exercises"
        if len(inside) != 1 or not _is_real_folder(inside[0]) or inside[0].name in exercise_names():
            break
        (folder,) = inside
    return folder


def _is_real_folder(path):
    return path.is_dir() and not path.is_symlink()


def read_submission(folder: Path, name: str, *, alone: bool) -> bytes | None:
    """What was handed in for an exercise: FOLDER/NAME/exercise.py, FOLDER/NAME.py or, if alone, FOLDER/exercise.py.

    Symbolic links are no submission: the grader may read files that a student may not.
    """
    for path in (Path(name, "exercise.py"), Path(f"{name}.py"), *([Path("exercise.py")] if alone else [])):
        steps = [folder / above for above in (path, *path.parents[:-1])]
        if (folder / path).is_file() and not any(step.is_symlink() for step in steps):
            with (folder / path).open("rb") as file:
                return file.read(FILE_LIMIT + 1)
    return None


def seeds_of_grading(seed: int | None = None) -> list[Any]:
    """The visible seed, then hidden ones: of hidden_seeds.json if it is there, of `seed`, or of fresh entropy."""
    recorded = ROOT / "hidden_seeds.json"
    if seed is not None:
        return [VISIBLE_SEED, *(f"{seed}.{i}" for i in range(HIDDEN_SEEDS))]
    return [VISIBLE_SEED, *(read_seeds(recorded) if recorded.exists() else fresh_seeds())]


def read_seeds(path: Path) -> list[str]:
    """The hidden seeds of a file. ValueError if it holds anything else, since nothing would be hidden then."""
    try:
        seeds = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON list of hidden seeds, got an error: {error}") from error
    strings = isinstance(seeds, list) and all(isinstance(seed, str) and seed for seed in seeds)
    if not strings or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: expected a JSON list of different texts, at least one, got {str(seeds)[:100]}")
    return seeds


def fresh_seeds() -> list[str]:
    """Hidden seeds that nobody can guess."""
    return [secrets.token_hex(16) for _ in range(HIDDEN_SEEDS)]


def table(result: ExerciseResult) -> str:
    """The result as a student reads it."""
    marks = {"passed": "ok", "failed": "FAIL", "skipped": "skipped", "broken": "BROKEN"}
    width = max(len(test.name) for test in result.tests)
    lines = [result.exercise]
    for test in result.tests:
        lines.append(f"  {marks[test.status]:7} {test.name:{width}}  {test.score:g}/{test.max_score:g}")
        if test.feedback:
            lines.append(f"          {test.feedback}")
    total = "no score: the grader broke" if result.score is None else f"{result.score:g} of {result.max_score:g} points"
    lines.append(f"  {total}, {result.seconds:.1f} s")
    return "\n".join(lines)
