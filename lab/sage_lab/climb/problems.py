"""The standard problems on which kernels are compared, the GPUs for which they are counted, and our levels' record."""

from typing import NamedTuple

N, HEADS = 8192, 16  # batch 1
TARGETS = (80, 86, 89, 90, 120)  # compute capabilities
RECORD = "climb_levels_cpu"  # the command that its provenance names writes it


class Unfit(Exception):
    """A reader's file that runs, but isn't what `climb` needs; the text goes on after the file's name."""


class Problem(NamedTuple):
    """A standard problem: batch 1, HEADS heads, N tokens."""

    head_dim: int
    is_causal: bool

    @property
    def scores(self) -> int:
        """How many scores are needed."""
        return HEADS * N**2 // (2 if self.is_causal else 1)


PROBLEMS = tuple(Problem(head_dim, is_causal) for head_dim in (128, 64) for is_causal in (False, True))
MAIN = PROBLEMS[0]
