"""Ratios of times that were taken in turn, from rows of `python -m sage_lab bench`."""

from collections.abc import Iterator, Sequence

from sage_lab.records import Row

OURS, UNBIASED = "sage_kernels", "sage_kernels, unbiased"  # the second: with the option of that name
PEER_NAMES = {
    "sdpa_flash": "FlashAttention-2",
    "sdpa_cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
    "cudnn_fp8": "cuDNN, FP8",
    "flex": "FlexAttention",
    "sageattention": "SageAttention",
    "sla_triton": "SLA's kernels",
    "vsa": "VSA's kernels",
}
# The columns that rows of one turn have in common.
TURN = ("n_q", "heads", "kv_heads", "head_dim", "causal", "layout", "mask", "scope", "direction", "cuda_graph")


def turns(rows: Sequence[Row]) -> Iterator[tuple[dict, list[Row]]]:
    """Yield (what its rows have in common, its rows) of every turn, in the order of the record."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        if row["protocol"] == "paired":
            found.setdefault(tuple(row.get(name) for name in TURN), []).append(row)
    for values, of in found.items():
        yield dict(zip(TURN, values, strict=True)), of


def peer_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Return each peer's time over ours, by provider, from the rows of one turn; nothing if we are not in it.

    The fastest of ours counts, if there are several: levels, or a branch in INT8 and in 16 bit.
    """
    ours = [row["ms_median"] for row in rows if row["provider"] == OURS]
    return {row["provider"]: row["ms_median"] / min(ours) for row in rows if ours and row["provider"] in PEER_NAMES}


def pays_from(rows: Sequence[Row]) -> dict[str, int]:
    """Return from how many tokens on both passes take at most 5% more time than with PyTorch's fastest kernel.

    sage_kernels/sagebwd/pays_from.json has such lengths for each kind of card.
    """
    found: dict[str, int] = {}
    for where, of in turns(rows):
        ratios = peer_ratios(of)
        pytorch = [ratios[name] for name in ("sdpa_flash", "sdpa_cudnn") if name in ratios]
        is_called = (where["scope"], where["direction"], where["cuda_graph"]) == ("autograd", "fwd+bwd", False)
        if pytorch and is_called and where["mask"] is None and where["layout"] == "bhnd":
            name = f"D={where['head_dim']}{' causal' if where['causal'] else ''}"
            too_slow = min(pytorch) < 1 / 1.05
            found[name] = max(found.get(name, 0), 2 * where["n_q"] if too_slow else 0)
    return found


def ratio_lines(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[tuple]]:
    """Return the header and the lines of a table: every turn, and each peer's time over ours."""
    columns = [name for name in TURN if any(row.get(name) is not None for row in rows)]
    peers = {name: words for name, words in PEER_NAMES.items() if any(row["provider"] == name for row in rows)}
    lines = []
    for where, of in turns(rows):
        ratios = peer_ratios(of)
        cells = (f"{ratios[peer]:.2f}" if peer in ratios else "" for peer in peers)
        lines.append((*(where[name] for name in columns), *cells))
    return (*columns, *peers.values()), lines
