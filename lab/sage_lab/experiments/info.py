"""`python -m sage_lab info`: this machine, the versions, and the backend that "auto" would choose."""

from dataclasses import dataclass

import torch

from sage_lab.command_line import Arguments
from sage_lab.files import write_file
from sage_lab.records import as_json, markdown_table, provenance
from sage_ref.backend import sagebwd_kernels, why_not_triton


@dataclass(frozen=True, kw_only=True)
class Info(Arguments):
    """Show what a report of a fault should say."""

    def run(self, command: str) -> None:
        facts = provenance(command)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        example = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
        obstacle = why_not_triton(sagebwd_kernels, example, False)
        facts["backend chosen by auto"] = f"reference, because {obstacle}" if obstacle else "triton"
        print(markdown_table(("what", "here"), facts.items()))
        if self.json:
            write_file(self.json, as_json(facts, indent=1) + "\n")
