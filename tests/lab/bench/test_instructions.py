"""Instructions of a kernel's loop, counted in the machine code that Triton's compiler made."""

import pytest

pytest.importorskip("triton")
from sage_lab.bench.instructions import adding_loop, hot_loop, kind_of

# A spin on a barrier, the loop over tiles in a larger one, and twice the exponentials after it.
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0008*/               @P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
.L_x_2:
        /*0020*/              @!P0 FADD R3, R3, R4 ;
        /*0030*/                   F2I.S8.NTZ R5, R3 ;
        /*0038*/                   MUFU.EX2 R5, R3 ;
        /*0040*/                   IGMMA.64x128x32.S8.S8 R24, gdesc[UR8], R24 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   MUFU.EX2 R5, R3 ;
        /*0068*/               @P0 BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_3);
.L_x_3:
"""


def test_the_loop_is_the_one_with_the_exponentials_of_one_tile():
    kinds = ["arithmetic", "rounding", "exp2", "matmul", "rest"]
    assert [kind_of(line) for line in hot_loop(CODE, scores=1)] == kinds
    assert [kind_of(line) for line in hot_loop(CODE, scores=2)][0] == "matmul"
    twice = CODE.replace("FADD R3, R3, R4", "MUFU.EX2 R3, R4")  # a loop over more than one tile
    for code, scores in ((CODE, 3), (CODE, 100), (twice, 1)):
        with pytest.raises(ValueError, match=f"code: expected a loop with {scores} exponentials"):
            hot_loop(code, scores)


def test_among_the_loops_that_add_to_memory_the_shortest_counts():
    code = CODE.replace("F2I.S8.NTZ R5, R3", "UTMAREDG.2D.ADD [UR8], [UR4]")
    assert [kind_of(line) for line in adding_loop(code)] == ["arithmetic", "rest", "exp2", "matmul", "rest"]
    with pytest.raises(ValueError, match="code: expected a loop that adds to memory, found none"):
        adding_loop(CODE)
