"""`python -m sage_lab pretrain`: a Llama with exact attention or SageBwd."""

import argparse

import torch

from sage_lab.command_line import (
    add_corpus_option,
    add_device_option,
    from_zero,
    output_file,
    positive,
    positive_number,
    tile_size,
    zero_to_one,
)
from sage_lab.experiments.table2 import with_paper
from sage_lab.models.llama import ATTENTIONS, LlamaConfig
from sage_lab.records import write_record
from sage_lab.repairs import REMEDIES
from sage_lab.training.corpus import BYTES, read_corpus
from sage_lab.training.loop import train
from sage_lab.training.pretrain import Pretraining, PretrainSettings, result_row
from sage_ref.checks import BACKENDS
from sage_ref.sagebwd.settings import GRANULARITIES

SHAPE = ("context", "layers", "width", "heads")
ATTENTION = ("attention", "backend", "qk_norm", "smooth_k", "smooth_q", "granularity", "remedy")


def add_options(parser: argparse.ArgumentParser) -> None:
    default, on_gpu = LlamaConfig(BYTES), torch.cuda.is_available()
    add_corpus_option(parser)
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=positive, default=getattr(default, name))
    parser.add_argument("--attention", choices=ATTENTIONS, default=default.attention)
    parser.add_argument("--backend", choices=BACKENDS, default=default.backend)
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys")
    parser.add_argument("--smooth-k", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--smooth-q", action="store_true", help="with the reference only")
    parser.add_argument("--granularity", choices=GRANULARITIES, default=default.granularity, help="scales of P and dS")
    parser.add_argument("--remedy", choices=REMEDIES, default=default.remedy, help="for dS, see `repair`")
    blocks = default.block_q, default.block_kv
    parser.add_argument("--blocks", type=tile_size, default=blocks, metavar="BQxBKV", help="with the reference only")
    parser.add_argument("--tokens", type=positive, default=2**20, help="tokens of the whole run")
    parser.add_argument("--tokens-per-step", type=positive, default=2**13, help="tokens per batch")
    parser.add_argument("--micro-batch", type=positive, default=8, help="sequences in one pass")
    parser.add_argument("--learning-rate", type=positive_number, default=2e-3)
    parser.add_argument("--warmup", type=zero_to_one, default=0.05, help="share of the steps")
    parser.add_argument("--seed", type=from_zero, default=0)
    parser.add_argument("--validation-sequences", type=positive, default=64)
    parser.add_argument("--reports", type=positive, default=20, help="validation losses and checkpoints of a run")
    parser.add_argument("--snapshots", type=positive, nargs="+", default=(), metavar="STEP", help="checkpoints to keep")
    parser.add_argument("--trace", action="store_true", help="measure every layer's INT8 error at every report")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=on_gpu, help="bfloat16 matmuls")
    add_device_option(parser)
    parser.add_argument("--checkpoint", type=output_file, default="runs/pretrain.pt", metavar="FILE")


def pretrain_command(options: argparse.Namespace) -> None:
    for name, number in (("tokens_per_step", options.context), ("tokens", options.tokens_per_step)):
        if getattr(options, name) % number:
            raise ValueError(f"{name}: expected a multiple of {number}, got {getattr(options, name)}")
    steps = options.tokens // options.tokens_per_step
    if max(options.snapshots, default=0) > steps:
        raise ValueError(f"snapshots: expected steps of the run, 1 to {steps}, got {list(options.snapshots)}")
    corpus, (block_q, block_kv) = read_corpus(options.corpus), options.blocks
    chosen = {name: getattr(options, name) for name in (*SHAPE, *ATTENTION)}
    config = LlamaConfig(corpus.vocab_size, **chosen, block_q=block_q, block_kv=block_kv)
    settings = PretrainSettings(
        steps=steps,
        batch_size=options.tokens_per_step // options.context,
        learning_rate=options.learning_rate,
        warmup_steps=round(options.warmup * steps),
        report_every=-(-steps // options.reports),
        seed=options.seed,
        micro_batch_size=options.micro_batch,
        validation_sequences=options.validation_sequences,
        autocast=options.autocast,
    )
    training = Pretraining(corpus, config, settings, options.device, trace=options.trace)
    train(training, options.checkpoint, options.snapshots)
    row = result_row(training)
    outcome = f"diverged: {row['diverged']}" if row["diverged"] else f"validation loss {row['final_val_loss']:.4f}"
    print(f"{row['steps']} steps, {row['tokens']:,} tokens, {row['seconds']:.0f} s; {outcome}")
    facts = {"corpus": corpus.facts, "arguments": training.arguments, "traces": with_paper(training.traces)}
    write_record(options.json, [row], command=options.command, **facts)
