"""Bank conflicts of a Hopper program, found while it is compiled: no GPU is needed.

Shared memory has 32 banks of 4 bytes, and takes one clock for 128 bytes that lie in different banks: a wavefront. Where
threads of a warp meet in a bank, it takes several. Which thread holds what is the layout of the registers, where it
goes is the layout of the tile; Triton's compiler counts from both. Gluon's `bank_conflicts` does that for one exchange
that a program names; here it is asked for every exchange that a program has.

Matmuls and the copy engine read and write tiles by themselves, and without conflicts in the layouts that we give them.
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
