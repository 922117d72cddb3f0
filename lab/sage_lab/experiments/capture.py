"""`python -m sage_lab capture`: save what enters the attention of a pre-trained model on one validation sequence."""

from __future__ import annotations  # a field may have the name of what reads it

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch

from sage_lab.command_line import (
    POSITIONAL,
    Arguments,
    device,
    from_zero,
    input_file,
    output_file,
    positive,
    usual_device,
)
from sage_lab.records import provenance, write_record
from sage_lab.training import capture as captures
from sage_lab.training.capture import attention_tensors, write_capture
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import VALIDATION_SHARE, load_model


@dataclass(frozen=True, kw_only=True)
class Capture(Arguments):
    """Save Q, K, V and dO of some layers and heads."""

    checkpoint: Annotated[Path, POSITIONAL, input_file, "written by `pretrain`"]
    corpus: Annotated[Path | None, input_file, "text, or a .bin file of uint16 tokens"] = None
    layers: Annotated[tuple[int, ...], from_zero, "numbers from 0"]
    heads: Annotated[tuple[int, ...], from_zero, "numbers from 0 (default: all)"] = ()
    context: Annotated[int | None, positive, "tokens of the sequence (default: all that fit)"] = None
    out: Annotated[Path, output_file] = Path("runs/capture.safetensors")
    device: Annotated[str, device] = field(default_factory=usual_device)

    def run(self, command: str) -> None:
        corpus = read_corpus(self.corpus)
        model, arguments = load_model(self.checkpoint, self.device, corpus)
        check_numbers("layers", self.layers, model.config.layers)
        check_numbers("heads", self.heads, model.config.heads)
        _, validation = corpus.split(VALIDATION_SHARE)
        context = self.context or model.config.context
        batch = [x.to(self.device) for x in validation.batch(1, context, seed=0, step=0)]
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=arguments["autocast"]):
            loss, layers = attention_tensors(model, *batch, sorted(set(self.layers)))
        heads = sorted(set(self.heads or range(model.config.heads)))
        layers = {number: {name: x[:, heads] for name, x in tensors.items()} for number, tensors in layers.items()}
        facts = {
            "corpus": corpus.facts,
            "run": arguments,
            "captured": "one validation sequence",
            "heads": heads,
            "loss": loss,
            "loss_normalisation": f"mean over {batch[0].numel()} tokens",
        }
        write_capture(self.out, captures.Capture(provenance(command) | facts, layers))
        print(f"layers {', '.join(map(str, layers))} of a sequence with loss {loss:.3f}: {self.out}")
        write_record(self.json, [{"loss": loss}], command=command, **facts)


def check_numbers(name: str, numbers: Sequence[int], count: int) -> None:
    if max(numbers, default=0) >= count:
        raise ValueError(f"{name}: expected numbers from 0 to {count - 1}, got {list(numbers)}")
