"""`python -m sage_lab info`: this machine, the versions, and the backend that "auto" would choose."""

import argparse

import torch

from sage_lab.records import as_json, markdown_table, provenance, write_file
from sage_ref.backend import sagebwd_kernels, why_not_triton


def info_command(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = provenance(options.command)
    example = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
    obstacle = why_not_triton(sagebwd_kernels, example, False)
    facts["backend chosen by auto"] = f"reference, because {obstacle}" if obstacle else "triton"
    print(markdown_table(("what", "here"), facts.items()))
    if options.json:
        write_file(options.json, as_json(facts, indent=1) + "\n")
