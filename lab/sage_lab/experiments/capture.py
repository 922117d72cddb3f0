"""`python -m sage_lab capture`: save what enters the attention of a pre-trained model on one validation sequence."""

import argparse

import torch

from sage_lab.command_line import add_corpus_option, add_device_option, from_zero, input_file, output_file, positive
from sage_lab.records import provenance, write_record
from sage_lab.training.capture import Capture, attention_tensors, write_capture
from sage_lab.training.corpus import read_corpus
from sage_lab.training.pretrain import VALIDATION_SHARE, load_model


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=input_file, metavar="CHECKPOINT", help="written by `pretrain`")
    add_corpus_option(parser)
    parser.add_argument("--layers", type=from_zero, nargs="+", required=True, metavar="LAYER")
    parser.add_argument("--heads", type=from_zero, nargs="+", metavar="HEAD", help="(default: all)")
    parser.add_argument("--context", type=positive, help="tokens of the sequence (default: all that fit)")
    parser.add_argument("--out", type=output_file, default="runs/capture.safetensors", metavar="FILE")
    add_device_option(parser)


def capture_command(options: argparse.Namespace) -> None:
    corpus = read_corpus(options.corpus)
    model, arguments = load_model(options.checkpoint, options.device, corpus)
    for name, count in (("layers", model.config.layers), ("heads", model.config.heads)):
        if max(getattr(options, name) or [0]) >= count:
            raise ValueError(f"{name}: expected numbers from 0 to {count - 1}, got {getattr(options, name)}")
    _, validation = corpus.split(VALIDATION_SHARE)
    context = options.context or model.config.context
    batch = [x.to(options.device) for x in validation.batch(1, context, seed=0, step=0)]
    device_type = torch.device(options.device).type
    with torch.autocast(device_type, torch.bfloat16, enabled=arguments["autocast"]):
        loss, layers = attention_tensors(model, *batch, sorted(set(options.layers)))
    heads = sorted(set(options.heads or range(model.config.heads)))
    layers = {number: {name: x[:, heads] for name, x in tensors.items()} for number, tensors in layers.items()}
    facts = {
        "corpus": corpus.facts,
        "run": arguments,
        "captured": "one validation sequence",
        "heads": heads,
        "loss": loss,
        "loss_normalisation": f"mean over {batch[0].numel()} tokens",
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    print(f"layers {', '.join(map(str, layers))} of a sequence with loss {loss:.3f}: {options.out}")
    write_record(options.json, [{"loss": loss}], command=options.command, **facts)
