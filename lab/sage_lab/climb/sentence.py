"""One sentence on what costs a kernel most, from its counted row."""

from sage_lab.climb.counting import UNITS, clocks_column
from sage_lab.records import Row

MUCH_AROUND, MANY_SPILLS, MOSTLY_TENSOR = 0.25, 0.5, 0.6
ADVICE = {
    "exp2": "a score needs one exponential, and a row per tile a few more",
    "conversions": "level 3 shows how the multiply-add of the exponent takes them over",
    "arithmetic": "fold factors into scales and into exp2's argument, and mask only the tiles that need it",
    "moves": "level 4 lets P stay where it is, so that no thread passes it to another",
    "memory": "larger tiles of queries read K and V less often",
    "rest": "addresses and masks: take out of the loop what doesn't change in it, and mask only the tiles that need it",
}
KINDS = {
    "units for exp2": ("exp2", "conversions"),
    "lanes of shared memory": ("memory",),
}  # whose work is of these kinds


def costliest(row: Row) -> str:
    """Return the sentence."""
    kernel, units = row["program"], {unit: row[clocks_column(unit)] for unit in (*UNITS, "memory")}
    busiest = max((unit for unit in UNITS if unit != "tensor cores"), key=units.get)
    kind = max(KINDS.get(busiest, ADVICE), key=row.get)
    if row["around_share"] > MUCH_AROUND:
        said = f"what runs around {kernel} takes {row['around_share']:.0%} of the clocks; prepare once, in one pass"
    elif row["spills"] > MANY_SPILLS:
        said = f"{row['spills']:.1f} of {row['instructions']:.1f} instructions per score move spilled registers; "
        said += "a smaller tile, or more warps, needs fewer of them"
    elif units["memory"] >= units["tensor cores"] + units[busiest]:
        said = f"the GPU's memory sets the pace of {kernel}; don't store S or P"
    elif row["tensor_share"] > MOSTLY_TENSOR:
        said = f"the tensor cores take {row['tensor_share']:.0%} of the clocks; "
        said += (
            "INT8 operands take half the time of 16 bit, or less" if row["is_16bit"] else "little else is left to save"
        )
    else:
        said = f"the tensor cores take {row['tensor_share']:.0%} of the clocks, of the rest the {busiest} are busiest; "
        said += f'{row[kind]:.1f} of {row["instructions"]:.1f} instructions per score are "{kind}" ({ADVICE[kind]})'
    line = f", and {row['line']} has most instructions, {row['of_line']:.1f} per score" if row["line"] else ""
    config = f" It was compiled with {row['config']}." if row["config"] else ""
    return (
        f"On sm_{row['target']} (D={row['head_dim']}, {'causal' if row['causal'] else 'no mask'}) {said}{line}.{config}"
    )
