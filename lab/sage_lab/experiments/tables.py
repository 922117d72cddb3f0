"""`python -m sage_lab tables 1` and `tables 2`: the SageBwd paper's two tables of errors, computed again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sage_lab.command_line import POSITIONAL, Arguments, positive
from sage_lab.experiments.table1 import LENGTHS, table1_rows, table1_runs, table1_text
from sage_lab.experiments.table2 import CAPTURES, capture_rows, table2_text
from sage_lab.plan import Plan, opened
from sage_lab.records import RECORDED, write_record
from sage_lab.training.capture import read_capture


@dataclass(frozen=True, kw_only=True)
class Tables(Arguments):
    """Compute one table."""

    table: Annotated[Literal["1", "2"], POSITIONAL, "1: Gaussian inputs; 2: inputs of trained models"]
    n: Annotated[tuple[int, ...], positive, "sequence lengths of table 1"] = LENGTHS
    seeds: Annotated[int, positive, "number of seeds of table 1"] = 5

    def run(self, command: str) -> None:
        if self.table == "1":
            self.compute_first(command)
        else:
            self.compute_second(command)

    def compute_first(self, command: str) -> None:
        """Compute Table 1 for all settings that the paper leaves open."""
        with opened(Plan("table1", table1_runs(self.n)), Path("runs"), (self.n, self.seeds)) as work:
            work.finish(lambda run, _: table1_rows(run, self.seeds))
            write_record(self.json, work.rows, command=command, seeds=list(range(self.seeds)))
            print(table1_text(work.rows))
            work.parts.remove()

    def compute_second(self, command: str) -> None:
        """Compute Table 2 on captured activations of two models."""
        rows, facts = [], []
        for name in CAPTURES.values():
            capture = read_capture(RECORDED / f"{name}.safetensors")
            found = capture_rows(name, capture)
            print(table2_text(found) + "\n")
            rows += found
            facts.append({"file": f"{name}.safetensors"} | capture.provenance)
        write_record(self.json, rows, command=command, captures=facts)
