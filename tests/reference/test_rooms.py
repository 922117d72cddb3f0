"""Rooms import in one direction only: what stands on a floor takes from its own room and from the floors below."""

import ast

import pytest
from sage_lab.records import REPOSITORY

FLOORS = {
    "sage_ref": (
        {
            "attention", "quantization", "shapes", "smoothing", "prologue", "checks", "derivatives", "backend",
            "records", "moved",
        },
        {"sagebwd", "sla2"},
        {"parallel"},
        {"tracing", "models", "integrations"},
        {"training"},
        {"command_line"},
        {"experiments"},
        {"course"},
    ),
    "kernels/sage_kernels": ({"common"}, {"hopper"}, {"sagebwd"}, {"sla2"}, {"measure", "hub"}),
}  # fmt: skip
# The public functions call the kernels, which need the reference's settings: both ways, but only within a call.
BACKENDS = {
    "sage_ref/sagebwd/api.py",
    "sage_ref/sla2/api.py",
    "sage_ref/parallel/ring.py",
    "course/sage_course/teaching.py",
}
SOLUTIONS = REPOSITORY / "sage_ref" / "course" / "solutions"  # some in Triton; nothing imports them at once


def imports(path):
    """(name of a module, whether the file needs it to be imported itself) for all it imports."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield f"{node.module}.{name.name}", id(node) in at_once
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) in at_once


def room_of(path, root):
    return path.relative_to(root).with_suffix("").parts[0]


@pytest.mark.parametrize("package", FLOORS)
def test_every_file_imports_from_its_room_and_from_lower_floors(package):
    root, floors = REPOSITORY / package, FLOORS[package]
    floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
    found = {room_of(path, root) for path in root.rglob("*.py")} - {"__init__", "__main__"}
    assert found == floor_of.keys()
    wrong = []
    for path in root.rglob("*.py"):
        room = room_of(path, root)
        for name, _ in imports(path) if room in floor_of else ():
            prefix, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if prefix != root.name or other not in floor_of or other == room:
                continue
            if floor_of[other] >= floor_of[room] and not (floor_of[other] == floor_of[room] == 0):
                wrong.append(f"{path.relative_to(REPOSITORY)} imports {name}")
    assert wrong == []


def test_the_reference_imports_the_kernels_only_within_a_call():
    for path in (REPOSITORY / "sage_ref").rglob("*.py"):
        for name, at_once in imports(path):
            if path.parent != SOLUTIONS:
                assert not (at_once and name.startswith("sage_course.lessons.")), path
            if name.startswith("sage_kernels") and path.parent != SOLUTIONS:
                assert not at_once, path
                assert str(path.relative_to(REPOSITORY)) in BACKENDS, path
