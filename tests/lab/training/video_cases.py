"""Cases that the tests of the video experiment share: made-up digits, a model and a plan that train in a second."""

from dataclasses import replace

import torch
from sage_lab.experiments.video.plan import PLANS
from sage_lab.experiments.video.runs import Experiment
from sage_lab.models.video_dit import VideoDiT, VideoDiTConfig
from sage_lab.training.video_flow import FlowSettings

# 64 tokens: 8 blocks of 8, cubes of 2 x 2 x 2, and 4 blocks of 16 queries.
CONFIG = VideoDiTConfig(
    frames=4, size=8, patch=2, cube=(2, 2, 2), layers=2, width=16, heads=1, block_q=16, block_kv=8, backend="reference"
)
SETTINGS = FlowSettings(steps=6, batch_size=4, learning_rate=1e-2, warmup_steps=2, report_every=2, validation_videos=4)
PLAN = replace(PLANS["cpu"], videos=3, judged_batch=3)
QUICK = replace(PLAN, steps=1, stage1_steps=1, reports=1)


def made_up_digits():
    """Return five bars, in the shape of `digit_images()`."""
    digits = torch.zeros(5, 8, 8)
    for number, digit in enumerate(digits):
        digit[:, number : number + 3] = 1
    return digits


def opened_weights(config=CONFIG, seed=0):
    """Return weights with open gates and sharp attention, so that it matters which blocks the model sees."""
    torch.manual_seed(seed)
    model = VideoDiT(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=2.0 if "qk_norm" in name else 0.0, std=0.2)
    model.output.weight.data *= 0.1  # no worse than answering 0
    model.output.bias.data.zero_()
    return {name: x for name, x in model.state_dict().items() if ".core." not in name}


def experiment(plan=PLAN):
    return Experiment(plan, opened_weights(), CONFIG, made_up_digits(), torch.device("cpu"))
