"""Options and checks that several commands share."""

import argparse
import sys
from pathlib import Path

import torch


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--record", "--json", type=Path, metavar="FILE", help="write the rows to FILE")


def require_gpu() -> None:
    """Exit without one; with one, seed it: what a command draws is always the same."""
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none (recorded results are in notebooks/recorded)")
    torch.manual_seed(0)
