"""`python -m sage_lab capture-video`: train a small video diffusion transformer and save what enters its attention."""

import argparse
from dataclasses import asdict

import torch
from torch import Tensor

from sage_lab.command_line import add_device_option, output_file, positive
from sage_lab.models.video_dit import VideoDiTConfig
from sage_lab.records import provenance, write_record
from sage_lab.training.capture import TENSORS, Capture, watched_attention, write_capture
from sage_lab.training.loop import TrainingSettings, train
from sage_lab.training.video import CAPTURED, VideoTraining, training_batch

# In the default model no head of these layers is near flat at these noise levels. Layer 0 has a nearly flat head, and
# the last layers' attention gets flatter towards pure noise. One video for each noise level.
LAYERS, NOISE_LEVELS = (2, 4), (0.4, 0.5)


@torch.no_grad()
def video_attention_tensors(training: VideoTraining) -> tuple[list[float], dict[int, dict[str, Tensor]]]:
    """Return the loss of one new video per noise level, and Q, K, V of each layer's attention, all [B, H, N, D].

    Q and K are those that are multiplied: after QK-norm and rotation.
    """
    video, _, noise = training_batch(training.config, len(NOISE_LEVELS), seed=(CAPTURED,))
    with watched_attention(training.model, LAYERS) as (inputs, _):
        losses = training.losses_of(video, torch.tensor(NOISE_LEVELS), noise)
    return losses.tolist(), {layer: dict(zip(TENSORS[:3], inputs[layer], strict=True)) for layer in LAYERS}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=700)
    add_device_option(parser)
    parser.add_argument("--out", type=output_file, default="runs/capture_video.safetensors", metavar="FILE")
    parser.add_argument("--checkpoint", type=output_file, default="runs/capture_video.pt", metavar="FILE")


def capture_video_command(options: argparse.Namespace) -> None:
    config = VideoDiTConfig()
    training = VideoTraining(config, TrainingSettings(steps=options.steps), options.device)
    train(training, options.checkpoint)
    losses, layers = video_attention_tensors(training)
    order = "cube after cube; cubes, and tokens of a cube, by frame, then row, then column"
    facts = {
        "model": asdict(config),
        "tokens": {"grid": config.grid, "order": order},
        "training": asdict(training.settings) | {"minutes": round(training.seconds / 60, 1)},
        "device": options.device,
        "threads": torch.get_num_threads(),
        "losses": training.losses,
        "captured": "one new video per noise level, after QK-norm and rotation",
        "noise_levels": NOISE_LEVELS,
        "captured_losses": losses,
    }
    write_capture(options.out, Capture(provenance(options.command) | facts, layers))
    print(f"loss {', '.join(f'{x:.3f}' for x in losses)} at noise levels {NOISE_LEVELS}: {options.out}")
    rows = [{"noise_level": t, "loss": x} for t, x in zip(NOISE_LEVELS, losses, strict=True)]
    write_record(options.json, rows, command=options.command, **facts)
