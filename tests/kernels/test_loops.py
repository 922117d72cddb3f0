"""A loop that Triton 3.6 and 3.7 compile wrongly: what only the bounds of a nested loop use is frozen. See NOTES."""

import ast
from pathlib import Path

import pytest
import sage_kernels

KERNELS = sorted(Path(sage_kernels.__file__).parent.rglob("*.py"))
WRONG = """
for g in range(n):
    last = min(end, count)
    for i in range(0, last):
        use(i)
    end -= count
"""


def names(*nodes: ast.AST) -> set[str]:
    return {x.id for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)}


def computed_from(name: str, loop: ast.For) -> set[str]:
    found = {name}
    for x in 3 * [x for x in ast.walk(loop) if isinstance(x, ast.Assign | ast.AugAssign)]:
        targets = x.targets if isinstance(x, ast.Assign) else [x.target]
        found |= names(*targets) if names(x.value) & found else set()
    return found


def frozen(source: str) -> list[tuple[str, str]]:
    """Return (name, range) for what an outer loop changes, an inner one's range uses, and its body doesn't."""
    loops = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.For)]
    return [
        (name, ast.unparse(inner.iter))
        for outer in loops
        for name in names(*(x.target for x in ast.walk(outer) if isinstance(x, ast.AugAssign)))
        for inner in loops
        if inner is not outer and inner in ast.walk(outer)
        and names(inner.iter) & (used := computed_from(name, outer)) and not names(*inner.body) & used
    ]  # fmt: skip


def test_what_would_be_frozen_is_found():
    assert frozen(WRONG) == [("end", "range(0, last)")]
    assert frozen(WRONG.replace("use(i)", "use(i, last)")) == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda x: x.stem)
def test_nothing_in_the_kernels_would_be_frozen(path):
    assert frozen(path.read_text(encoding="utf-8")) == []
