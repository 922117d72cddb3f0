"""A corpus of tokens, and the batches that are drawn from it."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """tokens: uint8 or uint16 [T], each below vocab_size.

    held_out: tokens that are never trained on; None: the tail of `tokens` is kept for that.
    source: what the tokens were made from, for a record.
    """

    name: str
    tokens: Tensor
    vocab_size: int
    held_out: Tensor | None = None
    source: dict[str, str] = field(default_factory=dict)

    @cached_property
    def sha256(self) -> str:
        """The hash of the tokens as stored: for a single file the one that `sha256sum` prints."""
        return hashlib.sha256(self.tokens.numpy().data).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """The corpus as a record describes it."""
        sizes = {"tokens": len(self.tokens), "sha256": self.sha256, "vocabulary": self.vocab_size}
        return {"name": self.name} | sizes | self.source

    def split(self, validation_fraction: float = 0.1) -> tuple["Corpus", "Corpus"]:
        """Return (train, validation); validation is what is held out or the tail: no training sequence overlaps it."""
        cut = round(len(self.tokens) * (1 - validation_fraction))
        train, validation = self.tokens[:cut], self.tokens[cut:]
        if self.held_out is not None:
            train, validation = self.tokens, self.held_out
        parts = (("train", train), ("validation", validation))
        train, validation = (Corpus(f"{self.name} ({part})", tokens, self.vocab_size) for part, tokens in parts)
        return train, validation

    def batch(self, batch_size: int, context: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and the tokens that follow them, int64 [batch_size, context] each, from random places.

        They depend on (seed, step) alone: a run resumed at a step reads what the uninterrupted run read.
        """
        if len(self.tokens) <= context:
            tokens = f"the {len(self.tokens)} tokens of {self.name}"
            raise ValueError(f"context: expected fewer than {tokens}, got {context}")
        starts = np.random.default_rng((seed, step)).integers(len(self.tokens) - context, size=batch_size)
        windows = torch.stack([self.tokens[start : start + context + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]
