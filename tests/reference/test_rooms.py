"""The house: packages and rooms import in one direction, rooms keep their budgets."""

import ast
from pathlib import Path

import pytest
from rooms import BUDGETS, REPOSITORY, ROOMS, files, tokens_in

# From the ground up: a package imports packages that come before it. Notebooks may use all of them.
PACKAGES = ("sage_ref", "kernels/sage_kernels", "lab/sage_lab", "notebooks/sage_course", "exercises")
# Rooms of a package by floor, from the ground up. A room imports from floors below, on the ground floor from all rooms.
FLOORS = {
    "sage_ref": (
        {"attention", "backend", "checks", "derivatives", "prologue", "quantization", "shapes", "smoothing"},
        {"sagebwd", "sla2"},
        {"parallel", "tracing"},
        {"integrations"},
    ),
    "kernels/sage_kernels": ({"common"}, {"hopper"}, {"sagebwd"}, {"sla2"}),
}
REGISTRY = "sage_ref/backend.py"  # finds the kernels, within a call, since they import the library


def imports(path):
    """Yield (module, whether it is imported with the file itself) of all imports in a file."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{name.name}", id(node) in at_once) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, id(node) in at_once) for name in node.names)


def relative(path):
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_from_packages_below_it(package):
    above = {Path(name).name for name in PACKAGES[PACKAGES.index(package) + 1 :]}
    wrong = {
        f"{relative(path)} imports {name.rpartition('.')[0]}"
        for path in files(package)
        for name, at_once in imports(path)
        if name.partition(".")[0] in above and (relative(path) != REGISTRY or at_once)
    }
    assert not wrong


@pytest.mark.parametrize("package", FLOORS)
def test_a_room_imports_from_floors_below_it(package):
    root = REPOSITORY / package
    floor_of = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}
    wrong, found = set(), set()
    for path in files(package):
        room = path.relative_to(root).with_suffix("").parts[0]
        if room in ("__init__", "__main__"):
            continue
        found.add(room)
        for name, _ in imports(path):
            top, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if top != root.name or other not in floor_of or other == room:
                continue
            if floor_of[other] >= max(floor_of[room], 1):
                wrong.add(f"{relative(path)} imports {name}")
    assert found == floor_of.keys()
    assert not wrong


def test_every_room_has_a_budget():
    assert BUDGETS.keys() == ROOMS.keys()


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_its_budget_of_tokens(room):
    tokens = tokens_in(room)
    assert tokens <= BUDGETS[room], f"{room}: {tokens} tokens of Python, {BUDGETS[room]} are allowed"
