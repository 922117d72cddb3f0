"""Tensors [B, H, N, D] equal to one given, in other layouts of memory; how a launch is named in a test's id."""

import torch
from sage_kernels.common.launch import Launch


def heads_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # [B, N, H, D] in memory


def part_of_more_heads(x):
    return torch.stack([x, x + 1, x - 1], 2).flatten(1, 2)[:, ::3]


def head_dim_outermost(x):
    return x.mT.contiguous().mT


def every_third_number(x):
    return torch.stack([x, x + 1, x - 1], -1)[..., 0]


LAYOUTS = [heads_last, part_of_more_heads, head_dim_outermost, every_third_number]


def launch_name(value):
    return "x".join(map(str, value)) if isinstance(value, Launch) else str(value)
