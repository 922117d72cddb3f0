"""`python -m sage_ref info|table1|table2|readme|capture|capture-video|train-router`: tables, and what they run on."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

from sage_ref.ops import triton_obstacle
from sage_ref.recorded import RECORDED, Record, markdown_table, provenance, read_record, replaced, write_record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sage_ref", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, add_options, description in COMMANDS:
        command = commands.add_parser(name, help=description, description=description)
        add_options(command)
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    options.command = "python -m sage_ref " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    options.run(options)


def info(options: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = provenance(options.command)
    example = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
    facts["backend chosen by auto"] = f"reference, because {o}" if (o := triton_obstacle(example)) else "triton"
    print(markdown_table(("what", "here"), facts.items()))
    if options.json:
        with replaced(options.json) as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n")


def table1(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from sage_ref import tables

    sweep = tables.Table1Sweep(options.n, options.head_dim, options.blocks, options.granularity, range(options.seeds))
    checkpoint = (options.json or Path("runs/table1.json")).with_suffix(".partial")
    total = len(sweep.lengths) * len(sweep.head_dims) * len(tables.PAPER_TABLE1)
    rows = [row for found in tqdm(tables.table1_sweep(sweep, checkpoint, options.device), total=total) for row in found]
    record = Record({}, rows)
    best = tables.closest_setting(record)
    print(f"Closest to the paper over all rows: {describe(best)}")
    header = ("sigma", *tables.TENSORS, "largest deviation", "closest setting for this row")
    lines = []
    for sigma, setting in tables.closest_setting_per_sigma(record).items():
        found = record.select(sigma=sigma, **best)
        cells = [f"{row['rel_l2']:.4f} (paper {row['paper_rel_l2']:.4f})" for row in found]
        lines.append((sigma, *cells, f"{max(map(tables.deviation, found)):.0%}", describe(setting)))
    print("\nRelative L2 error at that setting, mean over seeds:\n\n" + markdown_table(header, lines))
    if options.json:
        write_record(options.json, rows, command=options.command, seeds=list(sweep.seeds))
    checkpoint.unlink()


def describe(setting: dict) -> str:
    return "N={n} D={head_dim} tiles {block_q}x{block_kv}, scales per {granularity}".format(**setting)


def table2(options: argparse.Namespace) -> None:
    from sage_ref import tables
    from sage_ref.sagebwd import SageBwdSettings
    from sage_ref.training.capture import read_capture

    capture = read_capture(options.capture)
    settings = SageBwdSettings(is_causal=True, granularity=options.granularity)
    rows = tables.table2_rows(capture.layers, settings)
    header = ("layer", "tensor", "cosine", "relative L2", "RMS", "bound on RMS", "paper: cosine", "relative L2")
    print(markdown_table(header, [["" if x is None else x for x in row.values()] for row in rows]))
    if options.json:
        write_record(options.json, rows, command=options.command, capture=capture.provenance)


def capture(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.models.llama import LlamaConfig
    from sage_ref.training.capture import (
        Capture,
        Training,
        TrainingSettings,
        attention_tensors,
        train,
        write_capture,
    )
    from sage_ref.training.corpus import read_corpus

    corpus = read_corpus(options.corpus)
    print(f"corpus: {corpus.name}, {len(corpus.tokens):,} tokens, sha256 {corpus.sha256}")
    config = LlamaConfig(vocab_size=corpus.vocab_size, qk_norm=options.qk_norm)
    training = Training(corpus, config, TrainingSettings(steps=options.steps))
    train(training, options.checkpoint)
    batch = training.validation_corpus.batch(1, config.context, seed=0, step=0)
    loss, layers = attention_tensors(training.model, *batch, sorted(set(options.layers)))
    facts = {
        "corpus": {"name": corpus.name, "tokens": len(corpus.tokens), "sha256": corpus.sha256},
        "model": asdict(config),
        "training": asdict(training.settings) | {"minutes": round(training.seconds / 60, 1)},
        "threads": torch.get_num_threads(),
        "losses": training.losses,
        "captured": "one validation sequence",
        "loss": loss,
        "loss_normalisation": f"mean over {batch[0].numel()} tokens",
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    print(f"layers {', '.join(map(str, layers))} of a sequence with loss {loss:.3f}: {options.out}")
    if options.json:
        write_record(options.json, training.losses, command=options.command, **facts)


def capture_video(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.models.video_dit import VideoDiTConfig
    from sage_ref.training.capture import Capture, TrainingSettings, train, write_capture
    from sage_ref.training.capture_video import VideoTraining, concentration, video_attention_tensors

    shape = {name: getattr(options, name) for name in ("frames", "size", "width", "heads")}
    config = VideoDiTConfig(**shape, cube=tuple(options.cube), layers=options.depth)
    training = VideoTraining(config, TrainingSettings(steps=options.steps), options.device)
    train(training, options.checkpoint)
    losses, layers = video_attention_tensors(training, options.noise_levels, sorted(set(options.layers)))
    facts = {
        "model": asdict(config),
        "tokens": {
            "grid": config.grid,
            "order": "cube after cube; cubes, and tokens of a cube, by frame, then row, then column",
        },
        "training": asdict(training.settings) | {"minutes": round(training.seconds / 60, 1)},
        "device": options.device,
        "threads": torch.get_num_threads(),
        "losses": training.losses,
        "captured": "one new video per noise level, after QK-norm and rotation",
        "noise_levels": options.noise_levels,
        "captured_losses": losses,
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    rows = concentration(layers)
    print(f"Share of the softmax mass in the best blocks of keys:\n\n{concentration_table(rows)}\n\n{options.out}")
    if options.json:
        write_record(options.json, rows, command=options.command, **facts)


def concentration_table(rows: list[dict]) -> str:
    """One line per layer, sample and head, one column per tile size and share of the blocks."""
    columns, lines = {}, {}
    for row in rows:
        column = "{block_q}x{block_kv}: best {blocks} ({share:.0%})".format(**row)
        columns[column] = None
        lines.setdefault((row["layer"], row["sample"], row["head"]), {})[column] = f"{row['mass']:.3f}"
    cells = [(*place, *(line[column] for column in columns)) for place, line in sorted(lines.items())]
    return markdown_table(("layer", "sample", "head", *columns), cells)


def train_router(options: argparse.Namespace) -> None:
    from dataclasses import asdict
    from hashlib import sha256

    from tqdm import tqdm

    from sage_ref.training import router_training
    from sage_ref.training.capture import read_capture
    from sage_ref.training.structured import VideoLike, video_like

    if options.outlier is None:
        layers = read_capture(options.capture).layers
        source = {"capture": options.capture.name, "sha256": sha256(options.capture.read_bytes()).hexdigest()}
    else:
        config = VideoLike(outlier=options.outlier)
        layers = {0: video_like(config, samples=4)[0]}
        source = {"structured": asdict(config), "samples": 4}
    settings = router_training.FitSettings(block_q=options.block_q, block_kv=options.block_kv, steps=options.steps)
    sweep = router_training.RouterSweep(
        settings,
        sparsities=[round(1 - percent / 100, 6) for percent in options.k],
        relaxations=router_training.STUDY if options.study else router_training.RouterSweep().relaxations,
        seeds=range(options.seeds),
    )
    checkpoint = (options.json or Path("runs/train_router.json")).with_suffix(".partial")
    fits = router_training.router_sweep(sweep, layers, json.dumps(source), checkpoint, options.device)
    rows = [row for found in tqdm(fits, total=router_training.sweep_length(sweep, layers)) for row in found]
    print("Hard mask, mean over layers and seeds:\n\n" + router_training.result_table(Record({}, rows)))
    if options.json:
        facts = {"data": source, "settings": asdict(settings), "seeds": list(sweep.seeds), "device": options.device}
        write_record(options.json, rows, command=options.command, threads=torch.get_num_threads(), **facts)
    checkpoint.unlink()


def readme(options: argparse.Namespace) -> None:
    from sage_ref.plotting import overview_figure
    from sage_ref.readme import BENCH, OVERVIEW, TABLE2, rewrite

    OVERVIEW.parent.mkdir(exist_ok=True)
    overview_figure(read_record(TABLE2), read_record(BENCH)).savefig(OVERVIEW, dpi=130)
    changed = [str(path) for path in rewrite()]
    print(markdown_table(("rewritten",), [[path] for path in changed] or [["nothing: all up to date"]]))
    if options.json:
        with replaced(options.json) as temporary:
            temporary.write_text(json.dumps(changed) + "\n")


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


def add_table1_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.tables import Table1Sweep

    default = Table1Sweep()
    parser.add_argument("--n", type=positive, nargs="+", default=default.lengths, help="sequence lengths")
    parser.add_argument("--head-dim", type=positive, nargs="+", default=default.head_dims)
    parser.add_argument("--blocks", type=tile_size, nargs="+", default=default.blocks, metavar="BQxBKV")
    parser.add_argument("--granularity", nargs="+", default=default.granularities, choices=("block", "row"))
    parser.add_argument("--seeds", type=positive, default=len(default.seeds), help="number of seeds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_table2_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capture", type=Path, default=RECORDED / "capture_cpu.safetensors")
    parser.add_argument("--granularity", default="block", choices=("block", "row"))


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.models.llama import LlamaConfig

    depth = LlamaConfig.layers
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="a text file, a folder or a .bin of uint16 tokens")
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--layers", type=int, nargs="+", default=(0, depth // 2, depth - 1), choices=range(depth))
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys")
    parser.add_argument("--out", type=Path, default=Path("runs/capture.safetensors"), metavar="FILE")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/capture.pt"), metavar="FILE")


def add_capture_video_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.models.video_dit import VideoDiTConfig

    default = VideoDiTConfig()
    parser.add_argument("--steps", type=positive, default=700)
    parser.add_argument("--frames", type=positive, default=default.frames)
    parser.add_argument("--size", type=positive, default=default.size, help="pixels of a frame's side")
    parser.add_argument(
        "--cube",
        type=positive,
        nargs=3,
        default=default.cube,
        help="frames, rows, columns of consecutive patches",
    )
    parser.add_argument("--depth", type=positive, default=default.layers, help="layers of the model")
    parser.add_argument("--width", type=positive, default=default.width)
    parser.add_argument("--heads", type=positive, default=default.heads)
    # In the default model no head of these layers is near flat at these noise levels. Layer 0 has a nearly flat head,
    # and the last layers' attention gets flatter towards pure noise.
    parser.add_argument("--layers", type=int, nargs="+", default=(2, 4), help="layers to capture")
    parser.add_argument("--noise-levels", type=float, nargs="+", default=(0.4, 0.5), help="one video for each, 0 to 1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/capture_video.safetensors"), metavar="FILE")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/capture_video.pt"), metavar="FILE")


def add_train_router_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.training.router_training import FitSettings, RouterSweep

    default = FitSettings()
    parser.add_argument("--k", type=percentage, nargs="+", default=(5, 4, 3), help="per cent of the blocks to select")
    parser.add_argument("--seeds", type=positive, default=len(RouterSweep().seeds), help="number of seeds")
    parser.add_argument("--steps", type=positive, default=default.steps)
    parser.add_argument("--block-q", type=positive, default=default.block_q, help="queries in a block")
    parser.add_argument("--block-kv", type=positive, default=default.block_kv, help="keys in a block")
    parser.add_argument("--study", action="store_true", help="try every stand-in for the hard mask, not just two")
    parser.add_argument("--capture", type=Path, default=RECORDED / "capture_video.safetensors", metavar="FILE")
    parser.add_argument(
        "--outlier",
        type=float,
        metavar="LOGIT",
        help="instead of a capture, made-up data with outliers of that size among the queries (0: none)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


COMMANDS = (
    ("info", info, lambda parser: None, "this machine, the versions, and the backend that 'auto' would choose"),
    ("table1", table1, add_table1_options, "the paper's Table 1, swept over what it leaves open"),
    ("table2", table2, add_table2_options, "the paper's Table 2 on captured activations"),
    ("readme", readme, lambda parser: None, "write the READMEs' measured tables and figure from the records"),
    ("capture", capture, add_capture_options, "train a small Llama on a CPU and save what enters its attention"),
    (
        "capture-video",
        capture_video,
        add_capture_video_options,
        "train a small video diffusion transformer and save what enters its attention",
    ),
    (
        "train-router",
        train_router,
        add_train_router_options,
        "fit SLA2's router and alpha to full attention, and compare with SLA and the best mask",
    ),
)

if __name__ == "__main__":
    main()
