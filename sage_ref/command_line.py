"""Types of command-line arguments, for argparse."""

import argparse


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def percentage(text: str) -> float:
    if not 0 < (number := float(text)) <= 100:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and up to 100, got {text}")
    return number


def tile_size(text: str) -> tuple[int, int]:
    try:
        block_q, block_kv = map(positive, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected two numbers as in 128x64, got {text!r}") from None
    return block_q, block_kv
