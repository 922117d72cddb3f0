"""Bank conflicts of a Hopper program, counted while it is compiled, without a GPU.

Shared memory has 32 banks of 4 bytes. It needs one clock, a wavefront, for 128 bytes in different banks, and several
clocks if threads of a warp use the same bank. The layout of the registers says which thread holds which number, the
layout of the tile says where a number goes, and Triton's compiler counts conflicts from both. Gluon's `bank_conflicts`
does so for one exchange that a program names. Here it is called for every exchange of a program.

Matmuls and the copy engine access tiles by themselves, without conflicts in the layouts that we give them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from triton import knobs
from triton.experimental.gluon.language._semantic import GluonSemantic


@contextmanager
def conflicts() -> Iterator[list[str]]:
    """Collect a line for every store and load compiled inside that takes more wavefronts than its bytes do.

    Triton's cache is left out: what it holds would not be compiled.
    """
    found = []

    def note(what: str, semantic, registers, tile) -> None:
        layouts = (x.layout._to_ir(semantic.builder) for x in (registers, tile))
        bits = registers.element_ty.primitive_bitwidth
        shape = [int(size) for size in registers.shape]
        excess = semantic.builder.get_shared_bank_conflicts(*layouts, shape, bits)
        if excess:
            found.append(f"{what} of {shape} {registers.element_ty}: {1 + excess} wavefronts for one")

    def store(self, tile, value):
        note("store", self, value.type, tile.type)
        return shared_store(self, tile, value)

    def load(self, tile, layout):
        value = shared_load(self, tile, layout)
        note("load", self, value.type, tile.type)
        return value

    shared_store, shared_load = GluonSemantic.shared_store, GluonSemantic.shared_load
    patched = mock.patch.multiple(GluonSemantic, shared_store=store, shared_load=load)
    with knobs.compilation.scope(), patched:
        knobs.compilation.always_compile = True
        yield found
