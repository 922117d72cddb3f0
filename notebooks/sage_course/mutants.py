"""Small changes of a program's text, made by rules at every place of the lines that differ from another program's.

Nothing is run here. Each change has two sentences: for a reader who made it, and for one who has to make it.
"""

import ast
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple

SENTENCES = {  # kind of change, the most telling first: for a reader who made it, and for one who has to make it
    "order": ("These are in the wrong order: `{}`.",) * 2,
    "turned": ("The two sides of `{}` are exchanged.",) * 2,
    "axis": ("`{}` goes along the wrong axis.",) * 2,
    "factor": ("The factor `{}` is missing.", "The factor `{}` does not belong here."),
    "divisor": ("The divisor `{}` is missing.", "The divisor `{}` does not belong here."),
    "term": ("The term `{}` is missing.", "The term `{}` does not belong here."),
    "part": ("`{}` is missing.", "`{}` does not belong here."),
    "operator": ("`{}` stands where a different operator belongs.",) * 2,
    "exchange": ("`{}` stands where something different belongs.",) * 2,
    "brackets": ("The parts are right, but brackets are in the wrong place.",) * 2,
}
OMISSIONS = ("factor", "divisor", "term")  # of them, a reader's text shows nothing
LONGEST = 16  # characters of a missing part that a sentence gives away
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

Rule = tuple[str, ast.AST, str]  # the change's kind, what takes the place of a part, and the text of what is left out


class Mutant(NamedTuple):
    """A program with one small change."""

    text: str
    kind: str
    old: str  # the part that the change replaces or leaves out
    new: str  # what it puts there, or again what is left out

    @property
    def if_made(self) -> str:
        """Return the sentence for a reader who made the change. It gives no long part away."""
        if self.kind in (*OMISSIONS, "part") and len(self.old) > LONGEST:
            return f"A {self.kind} is missing."
        return SENTENCES[self.kind][0].format(self.new)

    @property
    def if_to_be_made(self) -> str:
        """Return the sentence for a reader who has to make the change."""
        return SENTENCES[self.kind][1].format(self.old)


def mutants(text: str, other: str) -> list[Mutant]:
    """Return a program with one small change in a line that the other doesn't have, the most telling first."""
    tree, found = ast.parse(text), {}
    names = [x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)]
    names += [x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
    for line in different_lines(tree, other):
        for place in parts_of(line.get()):
            old = place.get()
            for kind, new, left_out in changes_of_part(old, dict.fromkeys(names)):
                with suppress(Exception), place.holding(new):  # such as a sum in the place of a name that is set
                    mutant = Mutant(ast.unparse(tree), kind, left_out or shown(old), left_out or shown(new))
                    found.setdefault(mutant.text, mutant)
    found.pop(text, None)
    kinds = list(SENTENCES)
    return sorted(found.values(), key=lambda mutant: kinds.index(mutant.kind))


# Rules: what may stand in the place of a part of a line


def changes_of_part(node: ast.AST, names: Collection[str]) -> Iterator[Rule]:
    """Yield what may stand in the place of an expression, in which these names may stand."""
    yield from along_other_axes(node)
    yield from without_a_part(node)
    yield from rearranged(node)
    yield from with_similar(node, names)


def along_other_axes(node: ast.AST) -> Iterator[Rule]:
    """Yield a sum or the like along other axes."""
    if not isinstance(node, ast.Call) or name_of(node.func) not in ALONG_AXES.split():
        return
    first = not is_method(node)  # torch.sum(x, axis), or x.sum(axis)
    for axis in map(ast.Constant, AXES):
        if len(node.args) > first:
            yield "axis", with_item(node, "args", first, axis), ""
        for i, x in enumerate(node.keywords):
            if x.arg in ("dim", "axis"):
                yield "axis", with_item(node, "keywords", i, changed(x, value=axis)), ""


def without_a_part(node: ast.AST) -> Iterator[Rule]:
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
        for x in node.args:
            yield "part", x, ast.unparse(node.func)
        for x in node.keywords:
            yield "part", changed(node, keywords=[y for y in node.keywords if y is not x]), ast.unparse(x)


def rearranged(node: ast.AST) -> Iterator[Rule]:
    """Yield an expression with its parts in another order, or with brackets elsewhere."""
    field = {ast.Call: "args", ast.Tuple: "elts"}.get(type(node), "")
    items = getattr(node, field, [])
    for i in range(1, len(items)):
        yield "order", changed(node, **{field: [*items[: i - 1], items[i], items[i - 1], *items[i + 1 :]]}), ""
    if isinstance(inner := subject(node), ast.BinOp) and is_method(node):  # (a * b).f(): a * b.f()
        yield "brackets", changed(inner, right=applied(node, inner.right)), ""
    if isinstance(inner, ast.Call) and (innermost := subject(inner)):  # f(x).g(): f(x.g())
        yield "order", applied(inner, applied(node, innermost)), ""
    for i, x in enumerate(node.args if isinstance(node, ast.Call) else []):
        if isinstance(x, ast.BinOp):  # f(a + b): f(a) + b, a + f(b), f(a) + f(b)
            of = partial(with_item, node, "args", i)
            yield "brackets", changed(x, left=of(x.left)), ""
            yield "brackets", changed(x, right=of(x.right)), ""
            yield "brackets", changed(x, left=of(x.left), right=of(x.right)), ""
    if not isinstance(node, ast.BinOp):
        return
    if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.FloorDiv | ast.Mod | ast.Pow):
        yield "turned", changed(node, left=node.right, right=node.left), ""
    for side, x in (("left", node.left), ("right", node.right)):
        if isinstance(x, ast.BinOp):  # (a + b) * c: a + b * c, a * c + b
            for inner in ("left", "right"):
                yield "brackets", changed(x, **{inner: changed(node, **{side: getattr(x, inner)})}), ""
        for i, y in enumerate(x.args if isinstance(x, ast.Call) else []):  # f(a) + b: f(a + b)
            yield "brackets", with_item(x, "args", i, changed(node, **{side: y})), ""


def with_similar(node: ast.AST, names: Collection[str]) -> Iterator[Rule]:
    """Yield what is similar to an operator, a function, a name or a number."""
    for group in OPERATORS:
        if type(node) in group:
            for other in group:
                yield "operator", other(), ""
    for group in map(str.split, FUNCTIONS):
        if name_of(node) in group:
            field = "attr" if isinstance(node, ast.Attribute) else "id"
            for other in group:
                yield "exchange", changed(node, **{field: other}), ""
    if isinstance(node, ast.Name) and node.id in names:
        for other in names:
            yield "exchange", ast.Name(other), ""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        x = node.value
        codes = (255, 254, 127.5) if x == 127 else (127,) if x > 100 else ()
        for other in (x + 1, x - 1, -x, 2 * x, x / 2, *codes):
            yield "exchange", ast.Constant(other), ""


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


# Places in a program


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

    @contextmanager
    def holding(self, new: ast.AST) -> Iterator[None]:
        """Have something else in this place for a while."""
        old = self.get()
        self.put(new)
        try:
            yield
        finally:
            self.put(old)


def children(node: ast.AST) -> Iterator[Place]:
    for field, value in ast.iter_fields(node):
        for number, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST):
                yield Place(node, field, number)


def lines_of(node: ast.AST) -> Iterator[Place]:
    """Yield the places of all lines of a program."""
    for place in children(node):
        if isinstance(place.get(), ast.stmt):
            yield place
        yield from lines_of(place.get())


def parts_of(line: ast.AST) -> Iterator[Place]:
    """Yield the places of all parts of a line, but not of the lines inside it."""
    for place in children(line):
        if not isinstance(place.get(), ast.stmt):
            yield place
            yield from parts_of(place.get())


def different_lines(tree: ast.Module, other: str) -> list[Place]:
    """Return the places of the lines that the other text doesn't have; of a loop, its first line counts."""
    theirs = {first_line(place) for place in lines_of(ast.parse(other))}
    lines = [place for place in lines_of(tree) if not isinstance(place.get(), ast.FunctionDef)]
    return [place for place in lines if first_line(place) not in theirs]


def first_line(place: Place) -> str:
    return ast.unparse(place.get()).splitlines()[0]


def shown(node: ast.AST) -> str:
    """Return the text of an operator, the name of a function alone, else the program's text."""
    for group in OPERATORS:
        if type(node) in group:
            return group[type(node)]
    is_function = isinstance(node, ast.Attribute) and any(node.attr in group.split() for group in FUNCTIONS)
    return node.attr if is_function else ast.unparse(node)
