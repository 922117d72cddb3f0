"""The book's page on many GPUs: what was measured in one host, and what follows from it for several hosts."""

import json
from typing import NamedTuple

from sage_lab.experiments.context_parallel import ATTENTIONS, MEMORY_SHARE
from sage_lab.records import Record, markdown_table, read_record

from sage_course.results.tables import CONTEXT_PARALLEL

HOST = 8  # GPUs
BETWEEN = 50e9  # bytes per second of a GPU's own 400 Gb/s adapter, from data sheets
ULYSSES_BYTES = 16  # per entry of a GPU's Q: Q, K, V, O and their gradients in 16 bit
RING_BYTES = 13  # per entry of a GPU's K, in each round: K^ and V^; K^ and V in 16 bit; dK and dV in float32
LENGTHS = (2**20, 2**23)
GPUS = (64, 1024)
NAMES = {"sagebwd": "SageBwd", "sla2_stage_1": "SLA2, stage 1", "sla2": "SLA2, stage 2"}


class Host(NamedTuple):
    """Measurements of one host, of SageBwd's forward and backward pass together."""

    width: int  # heads times head size
    seconds: float  # of one GPU, per N^2
    merging: float  # seconds of the ring per round and entry of a GPU's Q, beside attention and exchange
    inside: float  # bytes per second that one GPU sends in Ulysses' exchange, with the copies before and after it
    link: float  # the same without the copies
    bytes_per_token: dict[str, float]  # that a GPU needs per token it holds, by attention


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


def host_of(record: Record, devices: int) -> Host:
    """Return what rows on one GPU and on so many say; times are of the longest sequence that was timed repeatedly."""
    rows = sorted(record.rows, key=lambda row: row["n"])
    timed = {(row["attention"], row["devices"]): row for row in rows if row["repetitions"] > 1}
    longest = {row["attention"]: row for row in rows if row["devices"] == devices}
    one, ring, exchange = timed["sagebwd", 1], timed["sagebwd_ring", devices], timed["none", devices]
    width = one["heads"] * one["head_dim"]
    seconds = one["ms_median"] / 1e3 / one["n"] ** 2
    merging = (ring["ms_median"] - ring["exchange_ms"]) / 1e3 - seconds * ring["n"] ** 2 / devices
    bytes_per_token = {name: row["peak_bytes"] * devices / row["n"] for name, row in longest.items()}
    return Host(
        width,
        seconds,
        merging / (ring["n"] * width),  # `devices` rounds with n / devices tokens in each
        exchange["sent_bytes"] / exchange["ms_median"] * 1e3,
        exchange["sent_bytes"] / exchange["exchange_ms"] * 1e3,
        {"sagebwd_both": bytes_per_token["sagebwd_ring"]} | bytes_per_token,
    )


def most_devices(record: Record) -> int:
    return max(row["devices"] for row in record.rows)


def ulysses_bytes(n: int, width: int, gpus: int, together: int) -> float:
    """Return the bytes that one of `gpus` GPUs sends in a pass if `together` of them exchange heads for tokens."""
    return ULYSSES_BYTES * n * width / gpus * (together - 1) / together


def ring_bytes(n: int, width: int, gpus: int, rounds: int) -> float:
    """Return the bytes that a GPU sends in a ring of `rounds`; only dK and dV travel in the last round, too."""
    return n * width / gpus * (RING_BYTES * rounds - 5 if rounds > 1 else 0)


def cost(host: Host, n: int, inside: int, rounds: int, link: float = BETWEEN) -> Cost:
    """Return what SageBwd costs with Ulysses among `inside` GPUs and a ring of `rounds`, through links of that rate."""
    gpus = inside * rounds
    merging = host.merging * n * host.width / gpus * rounds if rounds > 1 else 0
    way = "sagebwd" if rounds == 1 else "sagebwd_ring" if inside == 1 else "sagebwd_both"
    return Cost(
        host.seconds * n**2 / gpus + merging,
        ulysses_bytes(n, host.width, gpus, inside) / host.inside,
        ring_bytes(n, host.width, gpus, rounds) / link,
        host.bytes_per_token[way] * n / gpus,
    )


def least_tokens(host: Host) -> float:
    """Return how many tokens a member of the ring needs so that computing its round takes as long as sending it.

    In a round a GPU computes for seconds N^2 / (gpus rounds), merges N width / gpus entries and sends RING_BYTES of
    each: N / rounds decides.
    """
    return (RING_BYTES / BETWEEN - host.merging) * host.width / host.seconds


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
    devices = most_devices(record)
    host, n, longest = host_of(record, devices), 2**17, max(record.provenance["plan"]["lengths"])
    at = {(row["attention"], row["devices"]): row for row in record.select(n=n)}
    lines = [(f"time on one GPU, {n:,} tokens", *(in_time(at[name, 1]["ms_median"] / 1e3) for name in NAMES))]
    rows = [at[name, devices] for name in NAMES]
    lines += [
        (f"time on {devices} GPUs", *(in_time(row["ms_median"] / 1e3) for row in rows)),
        ("of this, waiting for NCCL", *(f"{row['exchange_ms'] / row['ms_median']:.1%}" for row in rows)),
        (
            f"memory per token that a GPU holds, {longest:,} tokens",
            *(f"{host.bytes_per_token[name] / 2**10:,.0f} KiB" for name in NAMES),
        ),
    ]
    sizes = "{heads} heads of {head_dim}, no mask".format(**record.provenance["plan"])
    rates = (
        f"In Ulysses' exchange each of {devices} GPUs sends {host.link / 1e9:,.0f} GB per second, or "
        f"{host.inside / 1e9:,.0f} GB if the copies before and after it count."
    )
    table = markdown_table(("measured", *NAMES.values()), lines)
    return f"{table}\n\nForward and backward of one layer, {sizes}; {record.caption}. {rates}"


def checked() -> str:
    """Return the table of times on the most GPUs: computed from those of one and two GPUs, and measured."""
    record = read_record(CONTEXT_PARALLEL)
    devices, host, lines = most_devices(record), host_of(record, 2), []
    ways = {"sagebwd": (devices, 1), "sagebwd_ring": (1, devices), "sagebwd_both": (2, devices // 2)}
    for n in (2**17, 2**19):
        for name, (inside, rounds) in ways.items():
            computed = cost(host, n, inside, rounds, host.link).total
            (row,) = record.select(attention=name, devices=devices, n=n)
            found = row["ms_median"] / 1e3
            lines.append((f"{n:,}", ATTENTIONS[name], *map(in_time, (computed, found)), f"{computed / found - 1:+.0%}"))
    return markdown_table(("tokens", f"on {devices} GPUs", "computed", "measured", "computed is off by"), lines)


def computed() -> str:
    """Return the table of computed times and memory for `GPUS`, and the rule for the ring."""
    record = read_record(CONTEXT_PARALLEL)
    host, lines = host_of(record, most_devices(record)), []
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
    host = host_of(record, most_devices(record))
    numbers = {
        "heads": record.provenance["plan"]["heads"],
        "width": host.width,
        "seconds": host.seconds,
        "merging": host.merging,
        "inside": host.inside,
        "memory": {name: host.bytes_per_token[name] for name in ("sagebwd", "sagebwd_ring", "sagebwd_both")},
        "ulysses": ULYSSES_BYTES,
        "ring": RING_BYTES,
        "available": available(record),
    }
    return f"""<div class="calculator" data-host='{json.dumps(numbers)}'>
The calculator runs in the web book, with scripts. The table above has its answers for four cases.
</div>"""
