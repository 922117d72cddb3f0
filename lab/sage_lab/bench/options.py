"""Options and checks that several commands share."""

import argparse

import torch

from sage_ref.command_line import Failed, output_file


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", "--json", type=output_file, metavar="FILE", help="write the rows to FILE")


def require_gpu() -> None:
    """`Failed` without one; with one, seed it: what a command draws is always the same."""
    if not torch.cuda.is_available():
        raise Failed("device: expected a CUDA device, found none (recorded results are in notebooks/recorded)")
    torch.manual_seed(0)
