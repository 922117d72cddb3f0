"""Every launch that can be chosen, in every kernel: it may change nothing but speed."""

from itertools import product

import kernel_cases
import pytest
import sla2_cases
import torch
from kernel_cases import MARKS, ON_GPU, name_of
from sage_kernels.common.candidates import CANDIDATES, DEFAULTS, candidates
from sage_kernels.common.launch import choose_launch
from sage_kernels.common.quantize import SCALE_BLOCK
from sage_kernels.sagebwd import ladder
from sage_kernels.sagebwd.ladder import BACKWARD_LEVELS, FORWARD_LEVELS
from sage_kernels.sla2 import ladder as sla2_ladder
from sage_kernels.sla2.ladder import BACKWARD_KERNELS, LEVELS
from triton.runtime.errors import OutOfResources

pytestmark = MARKS


def case_of(kernel, head_dim):
    """Return a case of more than one tile."""
    size = (777, 1000, head_dim, 2) if ON_GPU else (130, 140, head_dim, 1)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    if kernel.startswith("sla2_"):
        return sla2_cases.Case(*size[:2], "half", *size[2:], 1, dtype)
    return kernel_cases.Case(*size, 1, head_dim == 64, dtype)


def launches():
    """Yield (kernel, level, launch, head size): every candidate; on the CPU every tile, at a kernel's last level."""
    for head_dim in (64, 128):
        ladders = *FORWARD_LEVELS.items(), *BACKWARD_LEVELS.items()
        names = [(kernel, n) for n, level in ladders if level.hopper is None for kernel in level.kernels(head_dim)]
        names += [(kernel, n) for n, level in LEVELS.items() if level.hopper is None for kernel in level.kernels]
        names += product(BACKWARD_KERNELS, sla2_cases.TRAINED)
        if not ON_GPU:
            names = {(kernel, candidates(kernel, level)): (kernel, level) for kernel, level in names}.values()
        for kernel, level in names:
            if ON_GPU or head_dim == 64 or kernel in ("dk", "dv"):
                distinct = {launch if ON_GPU else launch[:2]: launch for launch in candidates(kernel, level)}
                yield from ((kernel, level, launch, head_dim) for launch in distinct.values())


LAUNCHES = list(launches())


def judge(kernel, level, case):
    """Compute what a kernel of a level does, and compare it with the oracles."""
    if kernel in BACKWARD_KERNELS:
        result = sla2_cases.forward_level(case, level)
        sla2_cases.assert_gradients(case, level, sla2_cases.run_gradients(case, level, result=result))
    elif kernel.startswith("sla2_"):
        sla2_cases.assert_forward(case, level, sla2_cases.run_level(case, level).forward.output)
    elif kernel == "forward":
        kernel_cases.assert_forward(case, level, kernel_cases.run_forward_level(case, level).output)
    else:
        forward = kernel_cases.forward_level(case, kernel_cases.feeding(level, case))
        kernel_cases.assert_backward(case, level, kernel_cases.run_backward_level(case, level, forward=forward))


@pytest.mark.parametrize(("kernel", "level", "launch", "head_dim"), LAUNCHES, ids=name_of)
def test_every_launch_gives_the_simulations_result(kernel, level, launch, head_dim, monkeypatch):
    case = case_of(kernel, head_dim)

    def chosen(name, *rest):
        return launch if name == kernel else choose_launch(name, *rest)

    for module in (ladder, sla2_ladder):
        monkeypatch.setattr(module, "choose_launch", chosen)
    try:
        judge(kernel, level, case)
    except OutOfResources as error:  # it can't be selected either: the launch table holds what ran
        pytest.skip(str(error))


def test_every_kernel_has_launches_that_keep_the_scales_constant():
    """An INT8 tile has as many keys (forward, dQ) or queries (dK, dV) as share a scale; its other side divides them."""
    assert CANDIDATES.keys() == DEFAULTS.keys() | {"forward_16bit"}
    assert DEFAULTS.keys() == {kernel for kernel, *_ in LAUNCHES}
    wrong = [
        (kernel, launch)
        for kernel in DEFAULTS if "16bit" not in kernel and not kernel.startswith("sla2_")
        for launch in (DEFAULTS[kernel], *CANDIDATES[kernel])
        for block, other in [launch[1::-1] if kernel.startswith(("forward", "dq")) else launch[:2]]
        if block != SCALE_BLOCK or SCALE_BLOCK % other
    ]  # fmt: skip
    assert wrong == []


def test_a_tile_that_scales_do_not_cover_is_an_error(monkeypatch):
    monkeypatch.setattr("sage_kernels.common.launch.SCALE_BLOCK", 64)
    with pytest.raises(ValueError, match="forward: expected a tile whose sides divide SCALE_BLOCK = 64, got 64 x 128"):
        choose_launch("forward", 4, 64, False, torch.device("cpu"))
