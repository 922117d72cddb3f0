"""Explain a wrong function by small changes, made by rules at every place of the lines that differ from the solution.

A change explains it if the solution with this change gives the reader's results in every trial, or if the reader's
function with it gives the solution's. So no sentence is a guess.
"""

import ast
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from sage_course import check
from sage_course.check import Gap, plain

SECONDS = 3  # for all changes of a function

SENTENCES = {  # kind of change, the most telling first: of a reader who made it, and of one who has to make it
    "order": ("These are in the wrong order: `{}`.",) * 2,
    "turned": ("The two sides of `{}` are exchanged.",) * 2,
    "axis": ("`{}` goes along the wrong axis.",) * 2,
    "whole": (
        "`{}` runs over everything, but belongs along one axis.",
        "`{}` belongs over everything, not along an axis.",
    ),
    "replaced": ("Every round of the loop replaces `{}`. Add to it.", "`{}` is to be replaced, not to be added to."),
    "added": ("`{}` is to be replaced, not to be added to.", "Every round of the loop replaces `{}`. Add to it."),
    "factor": ("The factor `{}` is missing.", "The factor `{}` is too many."),
    "divisor": ("The divisor `{}` is missing.", "The divisor `{}` is too many."),
    "term": ("The term `{}` is missing.", "The term `{}` is too many."),
    "part": ("`{}` is missing.", "`{}` is too many."),
    "condition": ("A condition is missing.", "The condition `{}` is too many."),
    "operator": ("`{}` stands where a different operator belongs.",) * 2,
    "exchange": ("`{}` stands where something different belongs.",) * 2,
    "brackets": ("The parts are right, but brackets are in the wrong place.",) * 2,
    "line": ("A line that sets `{}` is missing.", "The line that sets `{}` is not needed."),
}
OMISSIONS = ("factor", "divisor", "term", "condition", "line")  # of them, a reader's text shows nothing
OPERATORS = (  # each may stand for the others of its group
    {ast.Add: "+", ast.Sub: "-"},
    {ast.Add: "+", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
    {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not"},
    {ast.And: "and", ast.Or: "or"},
    {ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Add: "+"},
)
FUNCTIONS = (  # each may stand for the others of its group
    "sum mean median amax amin max min std var norm prod",
    "maximum minimum",
    "exp exp2 log log2 sqrt square abs",
    "round floor ceil trunc",
    "repeat repeat_interleave",
    "zeros_like ones_like",
    "int8 uint8 int16 int32 int64 float16 float32 float64",
)
ALONG_AXES = "sum mean amax amin max min std var norm softmax logsumexp argsort cumsum"
AXES = (-1, -2, -3, 0, 1, 2, (0, 1), (1, 2))

Change = tuple[str, ast.AST, str]  # its kind, what takes the place of a part, and the text of what is left out


class Mutant(NamedTuple):
    text: str
    kind: str
    old: str  # the part that the change replaces or leaves out
    new: str  # what it puts there, or again what is left out

    def said(self, is_to_be_made: bool) -> str:
        """Return a sentence for a reader who made the change, or who has to make it. It gives no long part away."""
        if not is_to_be_made and self.kind in (*OMISSIONS, "part") and len(self.old) > 16:
            return f"A {self.kind} is missing."
        return SENTENCES[self.kind][is_to_be_made].format(self.old if is_to_be_made else self.new)


def changed(node: ast.AST, **fields: Any) -> Any:
    new = copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def with_item(node: ast.AST, field: str, number: int, new: ast.AST) -> Any:
    items = getattr(node, field)
    return changed(node, **{field: [*items[:number], new, *items[number + 1 :]]})


def name_of(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def is_method(call: ast.AST) -> bool:
    return isinstance(call.func, ast.Attribute) and name_of(call.func.value) not in ("torch", "tl", "gl", "math")


def subject(call: ast.AST) -> ast.AST | None:
    """Return x in x.f() and in f(x)."""
    if not isinstance(call, ast.Call):
        return None
    return call.func.value if is_method(call) else next(iter(call.args), None)


def applied(call: ast.Call, new: ast.AST) -> ast.Call:
    """Return the call with another subject."""
    if is_method(call):
        return changed(call, func=changed(call.func, value=new))
    return with_item(call, "args", 0, new)


def exchanged(node: ast.AST, names: Collection[str]) -> Iterator[Change]:
    """Yield what is similar to an operator, a function, a name or a number."""
    for group in OPERATORS:
        yield from (("operator", other(), "") for other in group if type(node) in group)
    for group in map(str.split, FUNCTIONS):
        field = "attr" if isinstance(node, ast.Attribute) else "id"
        yield from (("exchange", changed(node, **{field: x}), "") for x in group if name_of(node) in group)
    if isinstance(node, ast.Name) and node.id in names:
        yield from (("exchange", ast.Name(other), "") for other in names)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        x = node.value
        near = (x + 1, x - 1, -x, 2 * x, x / 2, *((255, 254, 127.5) if x == 127 else (127,) if x > 100 else ()))
        yield from (("exchange", ast.Constant(other), "") for other in near)


def along_other_axes(node: ast.AST) -> Iterator[Change]:
    """Yield a sum or the like along other axes, and over everything."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in ALONG_AXES.split():
        return
    first = not is_method(node)  # torch.sum(x, axis), or x.sum(axis)
    for axis in map(ast.Constant, AXES):
        if len(node.args) > first:
            yield "axis", with_item(node, "args", first, axis), ""
        for i, x in enumerate(node.keywords):
            if x.arg in ("dim", "axis"):
                yield "axis", with_item(node, "keywords", i, changed(x, value=axis)), ""
    yield "whole", changed(node, args=node.args[:first], keywords=[]), ""


def left_out(node: ast.AST) -> Iterator[Change]:
    """Yield an expression without one of its parts."""
    if isinstance(node, ast.BinOp):
        kinds = {ast.Add: "term", ast.Sub: "term", ast.Mult: "factor", ast.Div: "divisor"}
        left, right, kind = ast.unparse(node.left), ast.unparse(node.right), kinds.get(type(node.op), "part")
        yield kind, node.left, f"{shown(node.op)} {right}" if kind == "part" else right
        if isinstance(node.op, ast.Add | ast.Mult):
            yield kind, node.right, left
        elif isinstance(node.op, ast.Sub):
            yield kind, ast.UnaryOp(ast.USub(), node.right), left
    elif isinstance(node, ast.UnaryOp):
        yield "part", node.operand, "-" if isinstance(node.op, ast.USub) else "~"
    elif isinstance(node, ast.Attribute):
        yield "part", node.value, f".{node.attr}"
    elif isinstance(node, ast.Subscript):
        yield "part", node.value, ast.unparse(changed(node, value=ast.Name("")))
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield "part", node.func.value, f".{node.func.attr}"
            yield "part", changed(node, args=[]), ", ".join(map(ast.unparse, node.args))
        yield from (("part", x, ast.unparse(node.func)) for x in node.args)
        for x in node.keywords:
            yield "part", changed(node, keywords=[y for y in node.keywords if y is not x]), ast.unparse(x)
    elif isinstance(node, ast.BoolOp | ast.IfExp):
        values = node.values if isinstance(node, ast.BoolOp) else (node.body, node.orelse)
        yield from (("condition", x, ast.unparse(node)) for x in values)
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "condition", changed(node, ifs=[]), ast.unparse(node.ifs[0])


def rearranged(node: ast.AST) -> Iterator[Change]:
    """Yield an expression with its parts in another order, or with brackets elsewhere."""
    field = {ast.Call: "args", ast.Tuple: "elts"}.get(type(node), "")
    items = getattr(node, field, [])
    for i in range(1, len(items)):
        yield "order", changed(node, **{field: [*items[: i - 1], items[i], items[i - 1], *items[i + 1 :]]}), ""
    if isinstance(inner := subject(node), ast.Call) and (innermost := subject(inner)):  # f(x).g(): f(x.g())
        yield "order", applied(inner, applied(node, innermost)), ""
    for i, x in enumerate(node.args if isinstance(node, ast.Call) else []):
        if isinstance(x, ast.BinOp):  # f(a + b): f(a) + b, a + f(b), f(a) + f(b)
            of = partial(with_item, node, "args", i)
            for sides in ({"left": of(x.left)}, {"right": of(x.right)}, {"left": of(x.left), "right": of(x.right)}):
                yield "brackets", changed(x, **sides), ""
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.FloorDiv | ast.Mod | ast.Pow):
            yield "turned", changed(node, left=node.right, right=node.left), ""
        for side, x in (("left", node.left), ("right", node.right)):
            if isinstance(x, ast.BinOp):  # (a + b) * c: a + b * c, a * c + b
                for inner in ("left", "right"):
                    yield "brackets", changed(x, **{inner: changed(node, **{side: getattr(x, inner)})}), ""
            for i, y in enumerate(x.args if isinstance(x, ast.Call) else []):  # f(a) + b: f(a + b)
                yield "brackets", with_item(x, "args", i, changed(node, **{side: y})), ""


def other_lines(node: ast.AST) -> Iterator[Change]:
    """Yield what may stand in the place of a line."""
    if isinstance(node, ast.AugAssign):
        yield "replaced", ast.Assign([node.target], node.value, lineno=0), ast.unparse(node.target)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield "added", ast.AugAssign(node.targets[0], ast.Add(), node.value), ast.unparse(node.targets[0])
    if isinstance(node, ast.Assign | ast.AugAssign):
        yield "line", ast.Pass(), ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


class Place(NamedTuple):
    """Where a part of a program stands: in a field of its parent, maybe in a list."""

    parent: ast.AST
    field: str
    number: int | None

    def get(self) -> Any:
        value = getattr(self.parent, self.field)
        return value if self.number is None else value[self.number]

    def put(self, new: ast.AST) -> None:
        if self.number is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.number] = new


def places(node: ast.AST, lines: bool = False) -> Iterator[Place]:
    """Yield the places of all parts of a line, or of all lines of a program."""
    for field, value in ast.iter_fields(node):
        for number, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and (lines or not isinstance(child, ast.stmt)):
                if lines == isinstance(child, ast.stmt):
                    yield Place(node, field, number)
                yield from places(child, lines)


def first_lines(text: str) -> set[str]:
    """Return a program's lines, each written in one way."""
    return {ast.unparse(place.get()).splitlines()[0] for place in places(ast.parse(text), lines=True)}


def different_lines(tree: ast.Module, other: str) -> list[Place]:
    """Return the places of the lines that the other text doesn't have; of a loop, its first line counts."""
    own, theirs = list(places(tree, lines=True)), first_lines(other)
    lines = [x for x in own if not isinstance(x.get(), ast.FunctionDef)]
    return [x for x in lines if ast.unparse(x.get()).splitlines()[0] not in theirs]


def mutants(text: str, other: str) -> list[Mutant]:
    """Return a function with one small change in a line that the other doesn't have, the most telling first."""
    tree, found = ast.parse(text), {text: None}
    names = [x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)]
    names += [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    for line in different_lines(tree, other):
        for place in (line, *places(line.get())):
            old = place.get()
            rules = (along_other_axes(old), left_out(old), rearranged(old), exchanged(old, dict.fromkeys(names)))
            for kind, new, part in other_lines(old) if place is line else chain(*rules):
                place.put(new)
                with suppress(Exception):  # such as a sum in the place of a name that is set
                    mutant = Mutant(ast.unparse(tree), kind, part or shown(old), part or shown(new))
                    found.setdefault(mutant.text, mutant)
                place.put(old)
    return sorted(filter(None, found.values()), key=lambda mutant: list(SENTENCES).index(mutant.kind))


def shown(node: ast.AST) -> str:
    """Return the text of an operator, the name of a function alone, else the program's text."""
    for group in OPERATORS:
        if type(node) in group:
            return group[type(node)]
    is_function = isinstance(node, ast.Attribute) and any(node.attr in group.split() for group in FUNCTIONS)
    return node.attr if is_function else ast.unparse(node)


def differing(own: ast.AST, right: ast.AST, together: bool) -> list[ast.AST]:
    """Return the smallest parts of a program in whose place another has something different, or what holds them all."""
    mine, theirs = (list(ast.iter_child_nodes(x)) for x in (own, right))
    values, others = (
        [x for x in ast.iter_fields(node) if not isinstance(x[1], ast.AST | list)] for node in (own, right)
    )
    if type(own) is not type(right) or len(mine) != len(theirs) or values != others:
        return [own]
    parts = [part for pair in zip(mine, theirs, strict=True) for part in differing(*pair, together)]
    return [own] if together and len(parts) > 1 else parts


def wrong_parts(own: str, right: str, together: bool) -> Iterator[str]:
    """Yield a sentence about the one or two parts of a program that differ from the solution, unless whole lines do."""
    tree = ast.parse(own)
    whole = [part for line in different_lines(tree, right) for part in (line.get(), *ast.iter_child_nodes(line.get()))]
    parts = differing(tree, ast.parse(right), together)
    if len(parts) <= 2 and not any(x in whole or isinstance(x, ast.stmt) for x in parts):
        yield "All of it is right but " + " and ".join(dict.fromkeys(f"`{shown(x)}`" for x in parts)) + "."


def wrong_part(own: str, right: str, is_right: Callable[[str], bool]) -> Iterator[str]:
    """Yield a sentence about each part that a part of the solution makes right in its place, the smallest first."""
    tree, other = ast.parse(own), ast.parse(right)
    lines = different_lines(tree, right)
    parts = [x for line in lines for x in places(line.get()) if x.parent is not line.get()]
    new_parts = [
        x.get() for line in different_lines(other, own) for x in places(line.get()) if x.parent is not line.get()
    ]
    for place in sorted(parts, key=lambda x: len(ast.unparse(x.get()))):
        old = place.get()
        for new in new_parts:
            if isinstance(old, ast.expr) and isinstance(new, ast.expr):
                place.put(new)
                text = ast.unparse(tree)
                place.put(old)
                if is_right(text):
                    yield f"All of it is right but `{shown(old)}`."


def explanation(
    gap: Gap, function: Callable, found: list, expected: list, same: Callable[[Any, Any], bool], fact: str
) -> str:
    """Return a sentence about the small changes that explain a wrong function; "" if none does.

    Args:
        gap: What the function should do.
        function: The reader's.
        found: Its results, one for each trial.
        expected: The solution's results.
        same: Whether two results agree.
        fact: What is sure about the results, to be said if the text shows no single change.
    """
    own, right = (ast.unparse(ast.parse(check.source(x))) for x in (function, gap.solution))
    names = {**plain(gap.solution).__globals__, **plain(function).__globals__}
    trials = gap.inputs()
    order = sorted(range(len(trials)), key=lambda x: same(found[x], expected[x]))  # wrong ones first
    deadline = time.monotonic() + SECONDS

    def gives(text: str, results: list) -> bool:
        if time.monotonic() < deadline and type(gap.solution).__name__ != "JITFunction":  # on a GPU it may do harm
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = check.defined(text, f"<{text}>", dict(names))[ast.parse(text).body[0].name]
                return all(same(check.tried(gap, program, trials[x]), results[x]) for x in order)
        return False

    made, to_be_made = mutants(right, own), mutants(own, right)
    crashed = any(isinstance(x, check.Raised) for x in found)  # one error may have many reasons
    differ = "\n".join(ast.unparse(x.get()) for x in different_lines(ast.parse(own), right))
    unseen = (*OMISSIONS, "brackets")
    may_be_made = [x for x in made if not crashed and ((x.new in differ) != (x.kind == "part") or x.kind in unseen)]
    is_slow = hasattr(gap.solution, "fn")  # a Triton program
    searches = (
        (x.said(False) for x in made if x.text == own),
        (x.said(True) for x in to_be_made if x.text == right),
        filter(None, [fact]),
        wrong_parts(own, right, together=True),
        (x.said(True) for x in to_be_made if gives(x.text, expected)),
        (x.said(False) for x in may_be_made if gives(x.text, found)),
        () if is_slow else wrong_part(own, right, lambda text: gives(text, expected)),
        wrong_parts(own, right, together=False),
        (
            f"{first.said(True)} {second.said(True)}"
            for first in to_be_made
            if not is_slow and time.monotonic() < deadline
            for second in mutants(first.text, right)
            if (second.old in differ or second.kind == "brackets") and gives(second.text, expected)
        ),
    )
    return next(chain(*searches), "")
