"""What a loop asks of the units, counted by hand."""

import pytest

pytest.importorskip("triton")
from sage_lab.bench.cost_model import demand
from sage_lab.bench.instructions import tile_loops

INSTRUCTIONS = {  # -> multiply-adds in INT8 and in 16 bit, bytes of shared memory
    "IMMA.16832.S8.S8.SAT R104, R32.reuse.ROW, R164.COL, R140": (16 * 8 * 32, 0, 0),
    "HMMA.16816.F32.BF16 R172, R204, R172, RZ": (0, 16 * 8 * 16, 0),
    "HFMA2.BF16 R1, R2, R3, R4": (0, 0, 0),
    "LDSM.16.MT88.2 R4, [R5]": (0, 0, 256),
    "STSM.16.M88.4 [R80+0x10000], R56": (0, 0, 512),
    "STS.64 [R5], R4": (0, 0, 256),
    "STS.U16 [R5], R4": (0, 0, 128),
    "LDGSTS.E.BYPASS.128 [R5], [R6.64]": (0, 0, 512),
    "LDL.LU R4, [R1]": (0, 0, 128),
    "SHFL.BFLY PT, R4, R5, 0x1, 0x1f": (0, 0, 128),
    "LDGDEPBAR": (0, 0, 0),
    "LEA R1, R2, R3": (0, 0, 0),
}
MASKED = ["IMMA.16832.S8.S8 R0, R1, R2, R3", "MUFU.EX2 R0, R1", *["FSEL R0, R1, R2, P0"] * 3, "STL [R1], R0"]
UNMASKED = [
    "IMMA.16832.S8.S8 R0, R1, R2, R3", "@P0 MUFU.EX2 R0, R1", "FADD2 R0, R1, R2", "I2FP.F32.S32 R0, R1",
    "UMOV UR1, 0x1",
]  # fmt: skip
LINES = [
    ".L_x_1:", "LDL R0, [R1]", ".L_x_2:", *UNMASKED, "@P0 BRA `(.L_x_2)", ".L_x_3:", *MASKED, "@P1 BRA `(.L_x_3)",
    "@P2 BRA `(.L_x_1)", ".L_x_4:", "SYNCS.PHASECHK P0", "@P0 BRA `(.L_x_4)",
]  # fmt: skip


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_matmuls_and_bytes_of_shared_memory_are_counted(instruction):
    found = demand([instruction])
    assert (found["int8"], found["float16"], found["bytes"]) == INSTRUCTIONS[instruction]


def test_the_inner_loops_are_those_over_tiles_and_their_instructions_have_units():
    """As the disassembler prints them: a label ends with a colon, all else is an instruction."""
    code = "\n".join(x if x.endswith(":") else f"        /*0000*/                   {x} ;" for x in LINES)
    unmasked, masked = tile_loops(code)
    assert (len(unmasked), len(masked)) == (len(UNMASKED) + 1, len(MASKED) + 1)
    expected = {"instructions": 6, "float32": 2, "integer": 1, "special": 1, "other": 3, "bytes": 0}
    assert demand(unmasked) == expected | {"int8": 16 * 8 * 32, "float16": 0}
