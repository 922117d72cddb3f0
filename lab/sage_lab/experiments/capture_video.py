"""`python -m sage_lab capture-video`: train a small video diffusion transformer and save what enters its attention."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from sage_lab.command_line import add_device_option, from_zero, output_file, positive, zero_to_one
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import provenance, write_record
from sage_lab.training.capture import Capture, watched_attention, write_capture
from sage_lab.training.loop import TrainingSettings, train
from sage_lab.training.video import CAPTURED, VideoTraining, training_batch

TENSORS = ("query", "key", "value")


@torch.no_grad()
def video_attention_tensors(
    training: VideoTraining, noise_levels: Sequence[float], layers: Sequence[int]
) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """Return the loss of one new video per noise level, and Q, K, V of each layer's attention, all [B, H, N, D].

    Q and K are those that are multiplied: after QK-norm and rotation.
    """
    check_choice_of(training.config, noise_levels, layers)
    video, _, noise = training_batch(training.config, len(noise_levels), seed=(CAPTURED,))
    with watched_attention(training.model, layers) as (inputs, _):
        losses = training.losses_of(video, torch.tensor(noise_levels), noise)
    tensors = {layer: dict(zip(TENSORS, inputs[layer], strict=True)) for layer in layers}
    return losses.tolist(), tensors


def check_choice_of(config: VideoDiTConfig, noise_levels: Sequence[float], layers: Sequence[int]) -> None:
    """Raise ValueError unless the model has these layers and flow matching these noise levels."""
    if not layers or min(layers) < 0 or max(layers) >= config.layers:
        raise ValueError(f"layers: expected numbers from 0 to {config.layers - 1}, got {list(layers)}")
    if not noise_levels or not all(0 <= level <= 1 for level in noise_levels):
        raise ValueError(f"noise_levels: expected numbers from 0 to 1, got {list(noise_levels)}")


def add_options(parser: argparse.ArgumentParser) -> None:
    default = VideoDiTConfig()
    parser.add_argument("--steps", type=positive, default=700)
    parser.add_argument("--frames", type=positive, default=default.frames)
    parser.add_argument("--size", type=positive, default=default.size, help="pixels of a frame's side")
    parser.add_argument("--cube", type=positive, nargs=3, default=default.cube, help="of consecutive patches")
    parser.add_argument("--depth", type=positive, default=default.layers, help="layers of the model")
    parser.add_argument("--width", type=positive, default=default.width)
    parser.add_argument("--heads", type=positive, default=default.heads)
    # In the default model no head of these layers is near flat at these noise levels. Layer 0 has a nearly flat head,
    # and the last layers' attention gets flatter towards pure noise.
    parser.add_argument("--layers", type=from_zero, nargs="+", default=(2, 4), help="layers to capture")
    parser.add_argument("--noise-levels", type=zero_to_one, nargs="+", default=(0.4, 0.5), help="one video for each")
    add_device_option(parser)
    parser.add_argument("--out", type=output_file, default="runs/capture_video.safetensors", metavar="FILE")
    parser.add_argument("--checkpoint", type=output_file, default="runs/capture_video.pt", metavar="FILE")


def capture_video_command(options: argparse.Namespace) -> None:
    shape = {name: getattr(options, name) for name in ("frames", "size", "width", "heads")}
    config = VideoDiTConfig(**shape, cube=tuple(options.cube), layers=options.depth)
    check_choice_of(config, options.noise_levels, options.layers)
    training = VideoTraining(config, TrainingSettings(steps=options.steps), options.device)
    train(training, options.checkpoint)
    losses, layers = video_attention_tensors(training, options.noise_levels, sorted(set(options.layers)))
    order = "cube after cube; cubes, and tokens of a cube, by frame, then row, then column"
    facts = {
        "model": asdict(config),
        "tokens": {"grid": config.grid, "order": order},
        "training": asdict(training.settings) | {"minutes": round(training.seconds / 60, 1)},
        "device": options.device,
        "threads": torch.get_num_threads(),
        "losses": training.losses,
        "captured": "one new video per noise level, after QK-norm and rotation",
        "noise_levels": options.noise_levels,
        "captured_losses": losses,
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    print(f"loss {', '.join(f'{x:.3f}' for x in losses)} at noise levels {options.noise_levels}: {options.out}")
    rows = [{"noise_level": t, "loss": x} for t, x in zip(options.noise_levels, losses, strict=True)]
    write_record(options.json, rows, command=options.command, **facts)
