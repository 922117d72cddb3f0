"""The book's page on many GPUs: what was measured in one host, and what follows from it for several hosts."""

import json
from typing import NamedTuple

from sage_lab.experiments.context_parallel import MEMORY_SHARE
from sage_lab.records import Record, Row, markdown_table, read_record

from sage_course.results.tables import CONTEXT_PARALLEL, parallel_rows

HOST = 8  # GPUs
BETWEEN = 50e9  # bytes per second of a GPU's own 400 Gb/s adapter, from data sheets
ULYSSES_BYTES = 16  # per entry of a GPU's Q: Q, K, V, O and their gradients in 16 bit
RING_BYTES = 13  # per entry of a GPU's K, in each round: K^ and V^; K^ and V in 16 bit; dK and dV in float32
LENGTHS = (2**20, 2**23)
GPUS = (64, 1024)


class Host(NamedTuple):
    """Measurements of one host, of forward and backward pass together."""

    width: int  # heads times head size
    seconds: dict[str, float]  # of one GPU, per N^2, by attention
    bytes_per_token: dict[str, float]  # that a GPU needs per token it holds
    inside: float  # bytes per second that one GPU sends in Ulysses' exchange


class Cost(NamedTuple):
    """Seconds of one pass, computed, and bytes of each GPU."""

    computing: float
    inside: float
    between: float
    memory: float

    @property
    def total(self) -> float:
        """Return the time of a pass in which the ring's transfers go on during the computation."""
        return self.inside + max(self.computing, self.between)


def longest(record: Record) -> tuple[dict[str, Row], dict[str, Row]]:
    """Return each attention's row of the longest sequence on the most GPUs, and the one on one GPU."""
    rows = sorted(parallel_rows(record), key=lambda row: (row["devices"], row["n"]))
    alone = {row["attention"]: row for row in rows if row["devices"] == 1}
    return {row["attention"]: row for row in rows}, alone


def host_of(record: Record) -> Host:
    last, alone = longest(record)
    width = record.provenance["plan"]["heads"] * record.provenance["plan"]["head_dim"]
    return Host(
        width,
        {name: row["ms_median"] / 1e3 / row["n"] ** 2 for name, row in alone.items()},
        {name: row["peak_bytes"] * row["devices"] / row["n"] for name, row in last.items()},
        _rate_inside(last, alone, width),
    )


def _rate_inside(last: dict[str, Row], alone: dict[str, Row], width: int) -> float:
    """Return bytes per second of the exchange without an attention, with the copies before and after it."""
    if row := last.get("none"):
        return row["sent_bytes"] / row["ms_median"] * 1e3
    row, one = last["sagebwd"], alone["sagebwd"]  # earlier records: what is more than a share of one GPU's time
    more = row["ms_median"] - one["ms_median"] / row["devices"]
    return ulysses_bytes(row["n"], width, row["devices"], row["devices"]) / more * 1e3


def ulysses_bytes(n: int, width: int, gpus: int, together: int) -> float:
    """Return the bytes that one of `gpus` GPUs sends in a pass if `together` of them exchange heads for tokens."""
    return ULYSSES_BYTES * n * width / gpus * (together - 1) / together


def ring_bytes(n: int, width: int, gpus: int, rounds: int) -> float:
    """Return the bytes that a GPU sends in a ring of `rounds`; only dK and dV travel in the last round, too."""
    return n * width / gpus * (RING_BYTES * rounds - 5 if rounds > 1 else 0)


def cost(host: Host, n: int, inside: int, rounds: int) -> Cost:
    """Return what SageBwd costs with Ulysses among `inside` GPUs, and a ring of `rounds` through slower links."""
    gpus = inside * rounds
    copies = ULYSSES_BYTES * host.width if inside > 1 else 0
    return Cost(
        host.seconds["sagebwd"] * n**2 / gpus,
        ulysses_bytes(n, host.width, gpus, inside) / host.inside,
        ring_bytes(n, host.width, gpus, rounds) / BETWEEN,
        (host.bytes_per_token["sagebwd_ring"] + copies) * n / gpus,
    )


def least_tokens(host: Host) -> float:
    """Return how many tokens a member of the ring needs so that computing its round takes as long as sending it.

    A round of a GPU computes seconds N^2 / (gpus rounds) and sends RING_BYTES N width / gpus: N / rounds decides.
    """
    return RING_BYTES * host.width / (host.seconds["sagebwd"] * BETWEEN)


def in_time(seconds: float) -> str:
    """Return seconds with a unit and two or three digits."""
    if seconds == 0:
        return "none"
    if seconds >= 1:
        return f"{seconds:,.1f}\u00a0s"
    return f"{1e3 * seconds:,.{0 if seconds >= 0.01 else 1}f}\u00a0ms"


def measured() -> str:
    """Return the table of what the computed times rest on."""
    record = read_record(CONTEXT_PARALLEL)
    host, (last, alone) = host_of(record), longest(record)
    names = {"sagebwd": "SageBwd", "sla2": "SLA2, stage 2"}
    lines = [
        *(
            (f"{name} on one GPU, {alone[key]['n']:,} tokens", in_time(alone[key]["ms_median"] / 1e3))
            for key, name in names.items()
        ),
        (
            f"Ulysses' exchange among {last['sagebwd']['devices']} GPUs: each sends per second",
            f"{host.inside / 1e9:,.0f} GB",
        ),
        ("memory per token that a GPU holds, Ulysses", f"{host.bytes_per_token['sagebwd'] / 2**10:,.0f} KiB"),
        ("memory per token that a GPU holds, ring", f"{host.bytes_per_token['sagebwd_ring'] / 2**10:,.0f} KiB"),
    ]
    sizes = "{heads} heads of {head_dim}, no mask".format(**record.provenance["plan"])
    return f"{markdown_table(('measured', ''), lines)}\n\nForward and backward of one layer, {sizes}; {record.caption}."


def computed() -> str:
    """Return the table of computed times and memory for `GPUS`, and the rule for the ring."""
    record = read_record(CONTEXT_PARALLEL)
    host, lines = host_of(record), []
    for gpus in GPUS:
        for n in LENGTHS:
            for name, inside in (("a ring over all", 1), (f"Ulysses by {HOST}, ring", HOST)):
                found = cost(host, n, inside, gpus // inside)
                times = map(in_time, (found.computing, found.inside, found.between, found.total))
                by = "computing" if found.computing >= found.between else "links"
                cells = (f"{n / 2**20:.0f} M", name, *times, by, f"{found.memory / 2**30:.1f}")
                lines.append((f"{gpus:,}", *cells))
    header = ("GPUs", "tokens", "how", "computing", "inside hosts", "between hosts", "pass", "limited by", "GiB each")
    rule = (
        f"A member of the ring (a host; in the ring over all, a GPU) needs at least {least_tokens(host):,.0f} tokens. "
        "With fewer, its links take longer than its tensor cores."
    )
    return (
        f"{markdown_table(header, lines)}\n\nAll of it is computed, nothing in it measured. M is 2^20. A GPU has "
        f"{available(record):.0f} GiB to use.\n\n{rule}"
    )


def available(record: Record) -> float:
    """Return the GiB of a GPU that a pass may need."""
    return MEMORY_SHARE * record.provenance["memory_bytes"] / 2**30


def calculator() -> str:
    """Return the calculator's place in the page, with what `cost` reads."""
    record = read_record(CONTEXT_PARALLEL)
    host = host_of(record)
    numbers = {
        "heads": record.provenance["plan"]["heads"],
        "width": host.width,
        "seconds": host.seconds["sagebwd"],
        "memory": host.bytes_per_token["sagebwd_ring"],
        "inside": host.inside,
        "ulysses": ULYSSES_BYTES,
        "ring": RING_BYTES,
        "available": available(record),
    }
    return f"""<div class="calculator" data-host='{json.dumps(numbers)}'>
The calculator runs in the web book, with scripts. The table above has its answers for four cases.
</div>"""
