"""The commands of `python -m sage_ref` that train a model, or measure one in training."""

import argparse
import json
from pathlib import Path

import torch

from sage_ref.command_line import percentage, positive, tile_size
from sage_ref.records import RECORDED, Record, markdown_table, provenance, write_record


def pretrain(options: argparse.Namespace) -> None:
    from sage_ref.models.llama import LlamaConfig
    from sage_ref.training import pretrain as training

    corpus = tokens(options)
    shape = {name: getattr(options, name) for name in ("context", "layers", "width", "heads", "kv_heads")}
    choice = {name: getattr(options, name) for name in ("attention", "backend", "qk_norm", "smooth_k", "smooth_q")}
    block_q, block_kv = options.blocks
    rounding = {"granularity": options.granularity, "ds_rounding": options.ds_rounding}
    rounding |= {"block_q": block_q, "block_kv": block_kv}
    config = LlamaConfig(corpus.vocab_size, **shape, **choice, **rounding)
    for name, number in (("tokens_per_step", options.context), ("tokens", options.tokens_per_step)):
        if getattr(options, name) % number:
            raise SystemExit(f"{name}: expected a multiple of {number}, got {getattr(options, name)}")
    steps = options.tokens // options.tokens_per_step
    settings = training.PretrainSettings(
        steps=steps,
        batch_size=options.tokens_per_step // options.context,
        learning_rate=options.learning_rate,
        warmup_steps=round(options.warmup * steps),
        report_every=-(-steps // options.reports),
        seed=options.seed,
        micro_batch_size=options.micro_batch,
        validation_sequences=options.validation_sequences,
        autocast=options.autocast,
        compile=options.compile,
    )
    with training.processes(options.device) as group:
        run = training.Pretraining(corpus, config, settings, group, fsdp=options.fsdp, trace=options.trace)
        log = options.checkpoint.with_suffix(".jsonl")
        training.pretrain(run, options.checkpoint, log, options.snapshots)
        if group.is_first:
            row = training.result_row(run)
            outcome = f"diverged: {run.diverged}" if run.diverged else f"validation loss {row['final_val_loss']:.4f}"
            print(f"{row['steps']} steps, {row['tokens']:,} tokens, {row['seconds']:.0f} s; {outcome}; {log}")
            if options.json:
                facts = {"corpus": corpus_facts(corpus), "arguments": run.arguments, "traces": run.traces}
                write_record(options.json, [row], command=options.command, **facts)


def tokens(options: argparse.Namespace):
    """The corpus that --corpus and --vocabulary name."""
    from sage_ref.training.corpus import BYTES, byte_pairs, read_corpus

    corpus = read_corpus(options.corpus)
    return (
        corpus if options.vocabulary == BYTES or corpus.vocab_size != BYTES else byte_pairs(corpus, options.vocabulary)
    )


def corpus_facts(corpus) -> dict:
    return {"name": corpus.name, "tokens": len(corpus.tokens), "sha256": corpus.sha256, "vocabulary": corpus.vocab_size}


def pretrain_grid(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.experiments.pretrain_grid import (
        CPU_PLAN,
        Grid,
        GridPlan,
        chosen_rates,
        grid_table,
        measured_on,
        traces,
    )
    from sage_ref.training.corpus import write_tokens

    on_gpu = torch.cuda.is_available()
    plan = GridPlan() if options.plan == "gpu" else CPU_PLAN
    devices = list(range(torch.cuda.device_count())) * options.runs_per_gpu if on_gpu else [None]
    corpus = options.folder / "corpus.bin"
    grid = Grid(plan, options.folder, corpus, devices)
    if not (corpus.exists() or options.report_only):
        write_tokens(tokens(options).tokens.numpy(), corpus)
    search = plan.search()
    if not options.report_only:
        grid.run(search)
    rates = chosen_rates(plan, [record.rows[0] for record in grid.records(search).values()])
    cells = list(dict.fromkeys(search + plan.cells(rates)))
    if not options.report_only:
        grid.run(cells)
    records = grid.records(cells)
    rows = [record.rows[0] for record in records.values()]
    print(markdown_table(*grid_table(rows)))
    unfinished = [cell.name for cell in cells if cell not in records]
    if unfinished:
        print(f"unfinished: {', '.join(unfinished)}")
    facts = {"plan": asdict(plan), "learning_rate": rates, "unfinished": unfinished}
    if options.json:
        first = next(iter(records.values())).provenance
        facts |= {"corpus": first["corpus"], "arguments": first["arguments"]}
        write_record(options.json, rows, command=options.command, **facts, **measured_on(records.values()))
    if options.traces:
        exact = [cell for cell in plan.cells(rates) if cell.attention == "exact" and cell.seed == plan.seeds[0]]
        traced = grid.records(exact)
        write_record(options.traces, traces(traced), command=options.command, **facts, **measured_on(traced.values()))


def noise(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.experiments.gradient_noise import NoiseSettings, noise_of_checkpoints, noise_table

    settings = NoiseSettings(options.batches, options.sequences, options.folds, tuple(options.variants))
    partial = (options.json or Path("runs/noise.json")).with_suffix(".partial")
    corpus = tokens(options)
    rows = noise_of_checkpoints(options.checkpoints, corpus, settings, partial, options.device)
    print(markdown_table(*noise_table(rows)))
    if options.json:
        facts = {"corpus": corpus_facts(corpus), "settings": asdict(settings)}
        write_record(options.json, rows, command=options.command, **facts)
    partial.unlink()


def pretrain_speed(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.experiments.pretrain_speed import SpeedPlan, interrupted, speed_table, step_times
    from sage_ref.training.pretrain import processes

    names = ("layers", "width", "heads", "tokens_per_device", "warmup", "steps")
    plan = SpeedPlan(tuple(options.contexts), **{name: getattr(options, name) for name in names})
    rows, facts = [], {"plan": asdict(plan)}
    with processes(options.device) as group:
        if options.json and group.is_first:
            rows, facts["commit"] = interrupted(options.json, plan, provenance(options.command))
            if rows:
                print(f"{options.json} has {len(rows)} rows, which are not measured again")
        for row in step_times(plan, group, tuple(rows)):  # on the first process alone
            rows.append(row)
            if options.json:
                write_record(options.json, rows, command=options.command, **facts)
        if group.is_first:
            print(markdown_table(*speed_table(rows)))


def capture(options: argparse.Namespace) -> None:
    from sage_ref.tracing import rms
    from sage_ref.training.capture import Capture, attention_tensors, write_capture
    from sage_ref.training.pretrain import VALIDATION_SHARE, load_model

    corpus = tokens(options)
    model, arguments = load_model(options.checkpoint, options.device)
    if arguments["corpus_sha256"] != corpus.sha256:
        raise SystemExit(f"corpus: expected that of {options.checkpoint}, got {corpus.name}, sha256 {corpus.sha256}")
    _, validation = corpus.split(VALIDATION_SHARE)
    context = options.context or model.config.context
    batch = [x.to(options.device) for x in validation.batch(1, context, seed=0, step=0)]
    device_type = torch.device(options.device).type
    with torch.autocast(device_type, torch.bfloat16, enabled=arguments["autocast"]):
        loss, layers = attention_tensors(model, *batch, sorted(set(options.layers)))
    heads = sorted(set(options.heads or range(model.config.heads)))
    layers = {number: {name: x[:, heads] for name, x in tensors.items()} for number, tensors in layers.items()}
    facts = {
        "corpus": corpus_facts(corpus),
        "run": arguments,
        "captured": "one validation sequence",
        "heads": heads,
        "loss": loss,
        "loss_normalisation": f"mean over {batch[0].numel()} tokens",
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    print(f"layers {', '.join(map(str, layers))} of a sequence with loss {loss:.3f}: {options.out}")
    if options.json:
        sizes = [
            {"layer": number, "tensor": name, "shape": list(x.shape), "rms": rms(x)}
            for number, tensors in layers.items()
            for name, x in tensors.items()
        ]
        write_record(options.json, sizes, command=options.command, **facts)


def capture_video(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from sage_ref.experiments.capture_video import VideoTraining, concentration, video_attention_tensors
    from sage_ref.models.video_dit import VideoDiTConfig
    from sage_ref.training.capture import Capture, write_capture
    from sage_ref.training.loop import TrainingSettings, train

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

    from sage_ref.experiments import router_fit as router_training
    from sage_ref.training.capture import read_capture
    from sage_ref.training.video_like import VideoLike, video_like

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


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_corpus_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, metavar="PATH", help="a text file, a folder or a .bin of uint16 tokens")
    parser.add_argument(
        "--vocabulary", type=positive, default=256, help="256: bytes; more: byte pairs made from the text"
    )


def add_pretrain_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.models.llama import ATTENTIONS, LlamaConfig
    from sage_ref.quantization import ROUNDINGS
    from sage_ref.sagebwd.settings import GRANULARITIES

    default = {name: field.default for name, field in LlamaConfig.__dataclass_fields__.items()}
    add_corpus_options(parser)
    for name in ("context", "layers", "width", "heads", "kv_heads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default[name])
    parser.add_argument("--attention", choices=ATTENTIONS, default="exact")
    parser.add_argument("--backend", choices=("auto", "reference", "triton"), default="auto")
    parser.add_argument("--qk-norm", action="store_true", help="normalise queries and keys")
    parser.add_argument("--smooth-k", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--smooth-q", action=argparse.BooleanOptionalAction, default=False, help="reference only")
    parser.add_argument("--granularity", choices=GRANULARITIES, default=default["granularity"], help="of P and dS")
    parser.add_argument("--ds-rounding", choices=ROUNDINGS, default=default["ds_rounding"], help="reference only")
    blocks = default["block_q"], default["block_kv"]
    parser.add_argument("--blocks", type=tile_size, default=blocks, metavar="BQxBKV", help="reference only")
    parser.add_argument("--tokens", type=positive, default=2**20, help="of the whole run")
    parser.add_argument("--tokens-per-step", type=positive, default=2**13)
    parser.add_argument("--micro-batch", type=positive, default=8, help="sequences that a process works on at once")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation-sequences", type=positive, default=64)
    parser.add_argument("--reports", type=positive, default=20, help="validation losses and checkpoints of a run")
    parser.add_argument("--snapshots", type=positive, nargs="+", default=(), metavar="STEP", help="checkpoints to keep")
    parser.add_argument("--trace", action="store_true", help="measure every layer's INT8 error at every report")
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=on_gpu, help="bfloat16 matmuls")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument(
        "--fsdp", action="store_true", help="under torchrun, share out weights (FSDP) instead of copying"
    )
    add_device_option(parser)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/pretrain.pt"), metavar="FILE", help="and FILE.jsonl"
    )


def add_pretrain_grid_options(parser: argparse.ArgumentParser) -> None:
    add_corpus_options(parser)
    parser.add_argument("--plan", choices=("gpu", "cpu"), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--report-only", action="store_true", help="train nothing: report the runs that are finished")
    parser.add_argument("--folder", type=Path, default=Path("runs/grid"), help="of checkpoints, logs and results")
    parser.add_argument("--runs-per-gpu", type=positive, default=3, help="runs that share a GPU")
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="write the errors of every layer over training, too"
    )


def add_noise_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.experiments.gradient_noise import VARIANTS, NoiseSettings

    default = NoiseSettings()
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="of `pretrain`")
    add_corpus_options(parser)
    parser.add_argument("--batches", type=positive, default=default.batches, help="pairs of gradients")
    parser.add_argument("--sequences", type=positive, default=default.sequences, help="of one batch")
    parser.add_argument("--folds", type=positive, default=default.folds, help="independent parts of the batches")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=default.variants, metavar="NAME")
    add_device_option(parser)


def add_pretrain_speed_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.experiments.pretrain_speed import SpeedPlan

    default = SpeedPlan()
    parser.add_argument("--contexts", type=positive, nargs="+", default=default.contexts, metavar="N")
    for name in ("layers", "width", "heads", "tokens_per_device", "warmup", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=getattr(default, name))
    add_device_option(parser)


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of `pretrain`")
    add_corpus_options(parser)
    parser.add_argument("--layers", type=int, nargs="+", required=True, metavar="LAYER")
    parser.add_argument("--heads", type=int, nargs="+", metavar="HEAD", help="default: all")
    parser.add_argument("--context", type=positive, help="tokens of the sequence; default: as many as the model takes")
    parser.add_argument("--out", type=Path, default=Path("runs/capture.safetensors"), metavar="FILE")
    add_device_option(parser)


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
    add_device_option(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/capture_video.safetensors"), metavar="FILE")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/capture_video.pt"), metavar="FILE")


def add_train_router_options(parser: argparse.ArgumentParser) -> None:
    from sage_ref.experiments.router_fit import FitSettings, RouterSweep

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
    add_device_option(parser)


COMMANDS = (
    ("pretrain", pretrain, add_pretrain_options, "pre-train a Llama, on one device or, under torchrun, on many"),
    ("pretrain-grid", pretrain_grid, add_pretrain_grid_options, "the plan of runs behind notebook 06, on all GPUs"),
    ("pretrain-speed", pretrain_speed, add_pretrain_speed_options, "time of a step: exact, FlashAttention-2, SageBwd"),
    ("noise", noise, add_noise_options, "gradient noise against the bias of quantisation, on checkpoints"),
    ("capture", capture, add_capture_options, "save what enters the attention of a pre-trained model"),
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
