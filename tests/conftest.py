"""Fixtures of several tests: reproducible hypothesis runs, seeded inputs; the tokens of each room at the end.

A run has a temporary folder of its own, and each test has one inside it, so that neither another test nor another run
on the same machine finds anything there. All of it is gone when the run ends.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from rooms import BUDGETS, tokens_in
from sage_kernels.common.device import triton_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

hypothesis.settings.register_profile("course", derandomize=True, deadline=None, database=None, max_examples=25)
hypothesis.settings.load_profile("course")
WORKER_GIB = 6  # of a GPU's memory, for a worker of xdist: a context, and tests of up to 5 GiB
LARGE_GIB = 64  # of a GPU, for tests of 10 to 52 GiB, which take turns
RUN_FOLDER = pytest.StashKey[str]()
torch.set_num_threads(1)  # the tensors here are small: threads would cost more than they give
# Without a GPU it turns Triton's interpreter on, which must happen before triton is imported.
if triton_device() == "cpu":
    import sage_kernels.common.interpreter  # noqa: F401 (mended)


def pytest_configure(config):
    """Make the run's temporary folder; workers of xdist, and all processes of tests, inherit it."""
    if not hasattr(config, "workerinput"):
        config.stash[RUN_FOLDER] = tempfile.mkdtemp(prefix="sage-")
        # The second is where pytest puts what `tmp_path` gives.
        os.environ["SAGE_REF_TEST_RUN"] = os.environ["PYTEST_DEBUG_TEMPROOT"] = config.stash[RUN_FOLDER]
        # What is compiled once serves all tests of a run.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{config.stash[RUN_FOLDER]}/inductor")
    use_as_temporary(os.environ["SAGE_REF_TEST_RUN"])


def pytest_unconfigure(config):
    if folder := config.stash.get(RUN_FOLDER, None):
        shutil.rmtree(folder, ignore_errors=True)


def use_as_temporary(folder):
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture(autouse=True)
def temporary_folder_of_the_test():
    """Whatever a test or a process that it starts leaves in the folder for temporary files is nobody else's."""
    run = os.environ["SAGE_REF_TEST_RUN"]
    with tempfile.TemporaryDirectory(dir=run, ignore_cleanup_errors=True) as folder:
        use_as_temporary(folder)
        yield
    use_as_temporary(run)


def pytest_collection_modifyitems(items):
    marker, reason = (
        ("no_gpu", "for machines without a GPU") if torch.cuda.is_available() else ("gpu", "needs a CUDA device")
    )
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    """Print the tokens of Python in each room beside its budget."""
    shown = ", ".join(f"{room} {tokens_in(room):,} of {most:,}" for room, most in BUDGETS.items())
    terminalreporter.write_line(f"tokens of Python: {shown}")


def pytest_runtest_setup():
    torch.manual_seed(0)  # what a test draws doesn't depend on the tests before it


def pytest_xdist_auto_num_workers(config):
    """With `-n auto` on a GPU: as many workers as its memory (WORKER_GIB each) and three cores in four allow."""
    if not torch.cuda.is_available():
        return None
    return max(1, min(os.cpu_count() * 3 // 4, gpu_gib() // WORKER_GIB))


def gpu_gib():
    return torch.cuda.get_device_properties(0).total_memory // 2**30


@pytest.fixture(autouse=torch.cuda.is_available())
def empty_cache():
    """Give back what PyTorch would keep for itself after a test: others share the GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def large_memory():
    """For tests of 10 GB and more: one at a time, and only where they fit beside others."""
    if gpu_gib() < LARGE_GIB:
        pytest.skip(f"needs a GPU with {LARGE_GIB} GiB of memory, this one has {gpu_gib()}")
    with Path(os.environ["SAGE_REF_TEST_RUN"], "large_memory.lock").open("w", encoding="utf-8") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # xdist's groups would need `--dist loadgroup`
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def inputs():
    """inputs(n_q, n_k, d) -> seeded Gaussian Q [1, 2, Nq, D], K, V [1, 2, Nk, D] and dO like Q, in float64."""

    def draw(n_q, n_k, head_dim, *, seed=0, dtype=torch.float64, heads=2, kv_heads=None):
        generator = torch.Generator().manual_seed(seed)
        q_shape, kv_shape = (1, heads, n_q, head_dim), (1, kv_heads or heads, n_k, head_dim)
        shapes = (q_shape, kv_shape, kv_shape, q_shape)
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    return draw


class LargestTensor(TorchDispatchMode):
    """Remember the most numbers that a tensor had which an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        sizes = [x.untyped_storage().nbytes() // x.itemsize for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


@pytest.fixture
def largest_tensor():
    return LargestTensor
