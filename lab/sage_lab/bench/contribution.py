"""Measurements that others send: what such a file must hold, and the rules that refuse what can't be true.

`python -m sage_lab bench --contribute` writes a file into CONTRIBUTED, `--check-contribution FILE` applies RULES to it,
and a test applies them to the whole folder. A rule finds mistakes, broken drivers and mixed-up files. It can't find a
patient liar: the numbers remain those of whoever sent them.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sage_lab.bench.accuracy import TENSORS
from sage_lab.bench.case import COLUMNS, OPERATIONS, Shape
from sage_lab.bench.dense import CONTRIBUTION
from sage_lab.bench.judge import LARGEST_ERROR
from sage_lab.bench.peers import PEERS
from sage_lab.bench.ratios import OURS, UNBIASED, turns
from sage_lab.bench.timing import REPETITIONS
from sage_lab.records import RECORDED, Row, read_json

CONTRIBUTED = RECORDED / "elsewhere"
LARGEST_FILE = 200_000  # bytes
# Trillions of operations per second that a card's data sheet promises without sparsity: in INT8, and in 16 bit with
# sums in float32. From NVIDIA's data sheets and white papers on A100, GA102, Ada, Hopper and Blackwell.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": (624, 312), "NVIDIA A100-SXM4-80GB": (624, 312), "NVIDIA A100-PCIE-40GB": (624, 312),
    "NVIDIA A100 80GB PCIe": (624, 312), "NVIDIA A10": (250, 125), "NVIDIA A40": (299, 150),
    "NVIDIA GeForce RTX 3090": (284, 71), "NVIDIA GeForce RTX 4090": (661, 165), "NVIDIA GeForce RTX 5090": (838, 210),
    "NVIDIA L4": (242, 121), "NVIDIA L40S": (733, 366), "NVIDIA H100 PCIe": (1513, 756),
    "NVIDIA H100 80GB HBM3": (1979, 989), "NVIDIA H200": (1979, 989),
}  # fmt: skip
NO_CARD = 10_000  # trillions of operations per second, more than a card has
ABOVE_PEAK = 1.2  # a card's clock may exceed the data sheet's
BELOW_PEAK = 200  # a time that is so many times as long has a different unit
WIDEST = 1.5  # the 80th percentile over the 20th: beyond it something else used the GPU
LARGEST_DIFFERENCE = 0.02  # between kernels and reference; 0.004 on an H200
ROUNDED = 0.002  # how far a ratio or TOPS may be from those of its times, relatively
CHECKED = {"lengths": ((113, 203), (1023, 1024), (2048, 2048)), "head_dims": (64, 128), "heads": ((8, 2),)}
CHECKED |= {"dtypes": ("bfloat16",), "granularities": ("row",)}
CHECKS = len(CHECKED["lengths"]) * len(CHECKED["head_dims"]) * 2  # with a causal mask and without
TEXTS = ("gpu", "driver", "torch", "triton", "commit", "date", "command")
FACTS = (*TEXTS, "capability", "peak", "launches")
LISTS = ("checks", "ratios")
WHERE = ("n_q", "heads", "kv_heads", "head_dim", "causal", "layout", "scope", "direction", "cuda_graph")
NEEDED = (*(name for name in COLUMNS if name not in ("selected_blocks", "mask", "part", "peak_mb")), "turn")
# What share of a direction's operations our INT8 levels do in INT8: all but dP.
INT8_SHARE = {"fwd": 1.0, "bwd": 2 / 2.5, "fwd+bwd": 3 / 3.5}

Content = dict[str, Any]


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def _is_positive(found: Any) -> bool:
    return _is_number(found) and found > 0


def _is_text(found: Any) -> bool:
    return isinstance(found, str) and bool(found)


COUNTS = ("batch", "heads", "kv_heads", "n_q", "n_k", "head_dim", "repetitions")
# What a row's columns must hold.
KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS, lambda found: _is_positive(found) and isinstance(found, int)),
    **dict.fromkeys(("ms_median", "ms_p20", "ms_p80", "tops", "rel_l2"), _is_positive),
    **dict.fromkeys(("provider", "dtype", "layout", "scope", "protocol", "turn"), _is_text),
    "causal": lambda found: isinstance(found, bool),
    "direction": lambda found: found in OPERATIONS,
}


class Rule(NamedTuple):
    """A rule, with its message "{name}: expected {expected}, got ..." for the first thing that breaks it."""

    name: str
    expected: str
    broken: Callable[[Content], Iterator[Any]]


def of_fact(name: str, is_broken: Callable[[Any], bool], shown: Callable[[Any], Any] = str) -> Callable:
    """Return `Rule.broken` for one fact of the provenance."""
    return lambda content: (shown(fact) for fact in [content["provenance"][name]] if is_broken(fact))


def of_rows(is_broken: Callable[[Row], bool], shown: Callable[[Row], Any]) -> Callable:
    """Return `Rule.broken` for each row by itself; shown: what it has that is wrong, without its provider."""
    return lambda content: (f"{shown(row)} of {_name(row)}" for row in content["rows"] if is_broken(row))


def of_turns(column: str, shown: Callable[[list], str]) -> Callable:
    """Return `Rule.broken` for turns whose rows differ in a column, of which `shown` gets the values."""

    def differing(content: Content) -> Iterator[str]:
        for where, rows in turns(content["rows"]):
            values = sorted({row[column] for row in rows})
            if len(values) > 1:
                yield f"{shown(values)} at {tuple(where.values())}"

    return differing


# What a file must look like


def _missing_keys(content: Content) -> Iterator[str]:
    about, rows = content.get("provenance"), content.get("rows")
    if not isinstance(about, dict) or not _are_flat(rows) or not rows:
        yield "no provenance, or no rows"
        return
    yield from (f"nothing as {name}" for name in (*FACTS, *LISTS) if name not in about)
    yield from (f"{name} that is no list of flat rows" for name in LISTS if not _are_flat(about.get(name)))
    yield from (f"a row without {name}" for row in rows for name in NEEDED if name not in row)


def _are_flat(rows: Any) -> bool:
    """Check for a list of objects without lists or objects in them."""
    return isinstance(rows, list) and all(
        isinstance(row, dict) and not any(isinstance(value, list | dict) for value in row.values()) for row in rows
    )


def _not_finite(found: Any, place: str = "") -> Iterator[str]:
    """Yield the places of numbers that JSON doesn't have, but Python reads."""
    if isinstance(found, float) and not math.isfinite(found):
        yield f"{found} in {place}"
    if isinstance(found, dict | list):
        for name, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from _not_finite(value, f"{place}/{name}")


def _other_kinds(content: Content) -> Iterator[str]:
    about = content["provenance"]
    yield from (f"{name} = {about[name]!r}" for name in TEXTS if not _is_text(about[name]))
    for row in content["rows"]:
        yield from (f"{name} = {row[name]!r}" for name, is_kind in KINDS.items() if not is_kind(row[name]))
    for row in about["checks"]:
        yield from (f"{name} = {row[name]!r}" for name in TENSORS if name in row and not _is_number(row[name]))


# What it may say


def _date(content: Content) -> Iterator[str]:
    date = content["provenance"]["date"]
    try:
        is_past = datetime.fromisoformat(date) <= datetime.now(UTC)
    except (ValueError, TypeError):  # the second: it has no time zone
        is_past = False
    if not is_past:
        yield date


def _unknown_card(content: Content) -> Iterator[str]:
    about = content["provenance"]
    if peak_of(about) is None:
        yield f"{about['gpu']} with peak = {about['peak']!r}"


def peak_of(about: Content) -> tuple[float, float] | None:
    """Return a card's peak rates, in INT8 and in 16 bit: the table's, else the file's; None without either."""
    given = about["peak"]
    is_pair = isinstance(given, list) and len(given) == 2 and all(_is_positive(x) and x < NO_CARD for x in given)
    return PEAKS.get(about["gpu"], tuple(given) if is_pair else None)


def points() -> dict[tuple, Shape]:
    """Return the turns that a file must have, each with its shape."""
    kinds = (("autograd", "fwd+bwd"), ("kernel", "fwd"), ("kernel", "bwd"))
    found = {}
    for shape, (scope, direction) in itertools.product(CONTRIBUTION.shapes, kinds):
        turn = {"n_q": shape.n, "scope": scope, "direction": direction, "cuda_graph": False}
        found[_place(shape._asdict() | turn)] = shape
    return found


def _place(row: Row) -> tuple:
    return tuple(row[name] for name in WHERE)


def _name(row: Row) -> str:
    """Return who was timed: "level 0" for the kernels in 16 bit, else the provider."""
    return "level 0" if (row["provider"], row["level"]) == (OURS, 0) else row["provider"]


def _points(content: Content) -> Iterator[str]:
    found: dict[tuple, list[str]] = {}
    shapes = points()
    for row in content["rows"]:
        found.setdefault(_place(row), []).append(_name(row))
        shape = shapes.get(_place(row))
        if shape is not None and (row["batch"], row["n_k"], row["dtype"]) != (shape.batch, shape.n, "bfloat16"):
            yield f"batch, n_k and dtype {row['batch']}, {row['n_k']}, {row['dtype']} at {_place(row)}"
    yield from (f"a turn at {place}" for place in found if place not in shapes)
    for place in shapes:
        names = found.get(place, [])
        needed = (OURS, "sdpa_flash", *(("level 0",) if "kernel" in place else ()))
        yield from (f"{names.count(name)} of {name} at {place}" for name in needed if names.count(name) != 1)
        yield from (f"two of {name} at {place}" for name in set(names) if names.count(name) > 1 and name not in needed)


def _strangers(content: Content) -> Iterator[str]:
    known = {OURS, UNBIASED, *PEERS}
    yield from (row["provider"] for row in content["rows"] if row["provider"] not in known)


def operations(row: Row) -> float:
    """Return the operations of a row's direction, as `Case.row` counts them."""
    scores = row["batch"] * row["heads"] * row["n_q"] ** 2 / (2 if row["causal"] else 1)
    return 4 * scores * row["head_dim"] * OPERATIONS[row["direction"]]


def least_ms(row: Row, peak: tuple[float, float]) -> float:
    """Return the milliseconds that the matmuls alone take at the card's peak rates."""
    is_int8 = row["provider"] in (OURS, UNBIASED) and row["level"] != 0
    share = INT8_SHARE[row["direction"]] if is_int8 else float(row["provider"] == "cudnn_fp8")
    return operations(row) * (share / peak[0] + (1 - share) / peak[1]) / 1e9


def _too_fast(content: Content) -> Iterator[str]:
    peak = peak_of(content["provenance"])
    for row in content["rows"] if peak else ():
        if row["ms_median"] * ABOVE_PEAK < least_ms(row, peak):
            yield f"{row['ms_median']} ms of {_name(row)}, whose matmuls alone take {least_ms(row, peak):.3g} ms"


def _too_slow(content: Content) -> Iterator[str]:
    peak = peak_of(content["provenance"])
    for row in content["rows"] if peak else ():
        if row["ms_median"] > BELOW_PEAK * least_ms(row, peak):
            yield f"{row['ms_median']} ms of {_name(row)}, whose matmuls take {least_ms(row, peak):.3g} ms"


def _other_tops(content: Content) -> Iterator[str]:
    for row in content["rows"]:
        tops = operations(row) / row["ms_median"] / 1e9
        if abs(row["tops"] - tops) > 0.1 + ROUNDED * tops:
            yield f"{row['tops']} of {_name(row)}, whose time says {tops:.1f}"


def _largest_error(row: Row) -> float:
    return PEERS[row["provider"]].largest_error if row["provider"] in PEERS else LARGEST_ERROR


def _checks(content: Content) -> Iterator[str]:
    checks = content["provenance"]["checks"]
    places = {tuple(row.get(name) for name in ("n_q", "n_k", "head_dim", "causal")) for row in checks}
    wanted = {(*lengths, d, causal) for lengths in CHECKED["lengths"] for d in CHECKED["head_dims"]
              for causal in (False, True)}  # fmt: skip
    yield from (f"no check at {place}" for place in sorted(wanted - places))
    yield from (f"a check without {name}" for row in checks for name in TENSORS if name not in row)


def _failed_checks(content: Content) -> Iterator[str]:
    for row in content["provenance"]["checks"]:
        yield from (f"{row[name]} for {name}" for name in TENSORS if name in row and row[name] > LARGEST_DIFFERENCE)


def ratios_of(rows: Sequence[Row]) -> list[Row]:
    """Return, for each turn, everybody's time over that of our INT8 kernels."""
    found = []
    for where, of in turns(rows):
        ours = next((row["ms_median"] for row in of if _name(row) == OURS), None)
        others = {_name(row): round(row["ms_median"] / ours, 4) for row in of if ours and _name(row) != OURS}
        found.append({name: where[name] for name in WHERE} | others)
    return found


def _other_ratios(content: Content) -> Iterator[str]:
    given = {tuple(row.get(name) for name in WHERE): row for row in content["provenance"]["ratios"]}
    for ratios in ratios_of(content["rows"]):
        row = given.get(_place(ratios), {})
        for name in [name for name in ratios if name not in WHERE]:
            if not _is_number(row.get(name)) or abs(row[name] - ratios[name]) > ROUNDED * ratios[name]:
                yield f"{row.get(name)} for {name}, whose times say {ratios[name]} at {_place(ratios)}"


# Without these, the others can't be asked.
FORM = (
    Rule("keys", f"provenance with {', '.join((*FACTS, *LISTS))}, and flat rows with all columns", _missing_keys),
    Rule("numbers", "finite numbers", _not_finite),
    Rule("columns", "text in every name, and numbers above 0 in every column of sizes, times and errors", _other_kinds),
)
# These are asked before anything is timed, too.
ABOUT = (
    Rule("commit", "the 40 hexadecimal digits of a commit",
        of_fact("commit", lambda commit: not re.fullmatch("[0-9a-f]{40}(-dirty)?", commit))),
    Rule("sources", "the sources as they were committed: commit or discard your changes, and measure again",
        of_fact("commit", lambda commit: commit.endswith("-dirty"))),
    Rule("date", "a time with its zone, in the past", _date),
    Rule("card", "a card whose peak rates are known, or --peak with those of its data sheet", _unknown_card),
    Rule("capability", "a compute capability as in 89",
        of_fact("capability", lambda found: not (isinstance(found, int) and 80 <= found < 200), repr)),
    Rule("launches", '"packaged" or "own"', of_fact("launches", lambda found: found not in ("packaged", "own"), repr)),
)  # fmt: skip
RULES = (
    Rule("providers", f"nobody but {', '.join((OURS, UNBIASED, *PEERS))}", _strangers),
    Rule("protocol", "times that were taken in turn, paired",
        of_rows(lambda row: row["protocol"] != "paired", lambda row: row["protocol"])),
    Rule("points", "each main point once, with ours, FlashAttention-2 and, for kernels alone, level 0", _points),
    Rule("turn", "one mark for all that was timed in turn: times from different files can't be compared",
        of_turns("turn", lambda marks: f"{len(marks)} marks")),
    Rule("repetitions", f"at least {REPETITIONS} repetitions",
        of_rows(lambda row: row["repetitions"] < REPETITIONS, lambda row: row["repetitions"])),
    Rule("balance", "equally many repetitions of everybody in a turn", of_turns("repetitions", str)),
    Rule("percentiles", "p20 <= median <= p80",
        of_rows(lambda row: not row["ms_p20"] <= row["ms_median"] <= row["ms_p80"],
                lambda row: f"{row['ms_p20']}, {row['ms_median']}, {row['ms_p80']}")),
    Rule("scatter", f"p80 at most {WIDEST} times p20: end what else uses the GPU, and measure again",
        of_rows(lambda row: row["ms_p80"] > WIDEST * row["ms_p20"],
                lambda row: f"{row['ms_p20']} to {row['ms_p80']} ms")),
    Rule("peak", "times that the card's peak rates allow", _too_fast),
    Rule("unit", f"milliseconds, at most {BELOW_PEAK} times what the card's peak rates allow", _too_slow),
    Rule("tops", "TOPS that follow from the times", _other_tops),
    Rule("rel_l2", "errors against exact attention that a right kernel has",
        of_rows(lambda row: not row["rel_l2"] < _largest_error(row), lambda row: row["rel_l2"])),
    Rule("checks", f"all {CHECKS} comparisons of the kernels with the reference", _checks),
    Rule("failed checks", f"kernels within {LARGEST_DIFFERENCE} of the reference", _failed_checks),
    Rule("ratios", "ratios that follow from the times", _other_ratios),
)  # fmt: skip


def complaints(content: Content) -> list[str]:
    """Return a sentence for each rule that a file breaks; if its form is wrong, one sentence on that."""
    for rule in FORM:
        if found := broken([rule], content):
            return found
    return broken(ABOUT + RULES, content)


def broken(rules: Sequence[Rule], content: Content) -> list[str]:
    """Return a sentence for each of these rules that is broken, with the first thing that breaks it."""
    sentences = []
    for rule in rules:
        if found := list(rule.broken(content)):
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            sentences.append(f"{rule.name}: expected {rule.expected}, got {found[0]}{more}")
    return sentences


def file_name(gpu: str, commit: str) -> str:
    """Return the name of a contributed file."""
    return f"{re.sub('[^A-Za-z0-9]+', '_', gpu)}_{commit[:7]}.json"


def file_complaints(path: Path) -> list[str]:
    """Return what is wrong with a contributed file, in one sentence each."""
    if path.stat().st_size > LARGEST_FILE:
        return [f"size: expected at most {LARGEST_FILE} bytes, got {path.stat().st_size}"]
    content = read_json(path, "a contributed measurement")
    if found := complaints(content):
        return found
    name = file_name(content["provenance"]["gpu"], content["provenance"]["commit"])
    return [] if path.name == name else [f"name: expected {name}, got {path.name}"]


def folder_complaints(folder: Path = CONTRIBUTED) -> list[str]:
    """Return what is wrong with the files of a folder, each sentence with its file's name."""
    found, marks = [], {}
    for path in sorted(folder.glob("*.json")):
        of_file = file_complaints(path)
        found += [f"{path.name}: {complaint}" for complaint in of_file]
        for mark in () if of_file else sorted({row["turn"] for row in read_json(path, "a measurement")["rows"]}):
            if marks.setdefault(mark, path.name) != path.name:
                found.append(f"{path.name}: turn: expected a new measurement, got one that is in {marks[mark]} too")
                break
    return found
