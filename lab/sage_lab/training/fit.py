"""Short fits with Adam, of one layer to full attention; training of whole models is in `loop`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def fit_with_adam(
    groups: list[dict[str, Any]],
    steps: int,
    loss_of: Callable[[int], Tensor],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
) -> None:
    """Take `steps` steps of Adam on loss_of(step); learning rates follow a cosine to zero.

    groups: Adam's parameter groups, with "lr".
    """
    optimizer = torch.optim.Adam(groups, betas=betas)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
