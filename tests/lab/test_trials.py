"""Trials of a kernel from a blank page accept right kernels of any build, and name what a program touches."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sage_course.gaps import Mistake, defined, edited
from sage_lab.capstones import trials
from sage_lab.capstones.observe import DOT, Elements, laid_out, observe
from sage_lab.records import REPOSITORY

MASTER = (REPOSITORY / "exercises" / "22_capstone_attention" / "master.py").read_text()
TILES = "BLOCK_Q, BLOCK_KV = 64, 32"
PLAIN = ("quantized(k, BLOCK_KV, mean)", "quantized(k, BLOCK_KV)")
BUILDS = {
    "smaller tiles": ((TILES, TILES.replace("64, 32", "16, 16")),),
    "larger tiles, no smoothing, one scale for all of P": (
        (TILES, TILES.replace("64, 32", "128, 64")), PLAIN, ("s_p = tl.max(p, 1) / 127", "s_p = 1 / 127 + 0 * l")),
    "P V in 16 bit": (
        ("tl.dot(p_hat, v, out_dtype=tl.int32).to(tl.float32)", "tl.dot(p.to(tl.float16), v.to(tl.float16))"),
        ("(s_p * s_v)[:, None]", "s_v")),
}  # fmt: skip


def attention(edits=()):
    first, *more = edits or ((TILES, TILES),)
    text = edited(MASTER, [Mistake(*first, more=tuple(more))])
    return defined(text, f"<{hash(text)}>", {"__name__": "built"})["attention"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("build", BUILDS)
def test_right_kernels_pass_however_they_are_built(build):
    milestones = [x for x in trials.ATTENTION.milestones if x.name.startswith(("tiles", "causal"))]
    results = list(trials.run(attention(BUILDS[build]), trials.Capstone("attention", milestones), seed=1))
    assert [result.verdict.hint for result in results] == [""] * 2
    assert max(result.verdict.error for result in results) < 0.75 * trials.BAR
    assert str(results[0]).startswith("4 tiles that raise the maximum: right, a row is off by ")


@pytest.mark.gpu
def test_the_kernel_passes_on_a_gpu():
    results = list(trials.run(attention(), trials.ATTENTION, device="cuda"))
    assert [result.verdict.hint for result in results] == [""] * len(results)


def test_what_fails_is_a_verdict_and_no_error():
    def attention(q, k, v, is_causal=False):
        return q[:, :, 5:1:0]

    result = next(trials.run(attention, trials.ATTENTION))
    assert (result.points, result.verdict.kind) == (0, "raised")
    assert result.verdict.found.startswith("line ")
    assert str(result).startswith("0 one head: attention raised an error. (line ")
    result = next(trials.run(lambda q, k, v: 0 * q, trials.ATTENTION))
    assert (result.points, result.verdict.kind) == (0, "not launched")


@triton.jit
def copy_kernel(x_ptr, y_ptr, first, last, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + first + n), mask=n < last)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("first", "last", "layout", "outside"),
    [
        (0, 8, "", ""),
        (1, 8, "", "program (0, 0, 0) reads 1 element past the last of x_ptr"),
        (-2, 8, "", "program (0, 0, 0) reads 2 elements before the first of x_ptr"),
        (0, 8, "sliced", "program (0, 0, 0) reads between the elements of x_ptr, 4 after the first"),
        (0, 7, "", ""),
        (0, 9, "", "program (0, 0, 0) writes 1 element past the last of y_ptr"),
    ],
)
def test_addresses_outside_of_tensors_are_named(first, last, layout, outside):
    def copy(x):
        y = torch.empty(8)
        copy_kernel[(1,)](x, y, first, last, N=16 if last > 8 else 8)
        return y

    x = torch.arange(16.0 if last > 8 else 8.0).view(1, 1, -1, 4)
    observed = observe(copy, {"x": x}, {"x": layout})
    assert observed["outside"] == outside
    assert observed["launched"]
    assert observed["changed"] == ()
    if not outside:
        y = observed["result"]
        assert torch.equal(y[:last], torch.arange(float(last)))
        assert y[last:].isnan().all()  # what nobody wrote


@triton.jit
def masked_kernel(x_ptr, y_ptr, count, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(y_ptr + n, tl.load(x_ptr + n, mask=n < count))


@triton.jit
def descriptor_kernel(x_ptr, y_ptr, count, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [1, count], [count, 1], [1, N])
    tl.store(y_ptr + tl.arange(0, N), x.load([0, 0]).reshape(N))


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "end", "copied", "given"),
    [
        (masked_kernel, torch.float16, None, (), ""),
        (masked_kernel, torch.int8, 127, ("x",), "x_ptr"),
        (descriptor_kernel, torch.float16, 0, (), ""),
    ],
)
def test_undefined_numbers_copies_and_integers_from_pytorch_are_noted(kernel, dtype, end, copied, given):
    def copy(x):
        y = torch.empty(32, dtype=dtype)
        kernel[(1,)](x.to(dtype), y, 16, N=32)
        return y

    x = torch.arange(16.0).half()
    observed = observe(copy, {"x": x}, {})
    assert (observed["copied"], observed["given"]) == (copied, given)
    assert torch.equal(observed["result"][:16].half(), x)
    assert (observed["result"][16:] == end).all() if end is not None else observed["result"][16:].isnan().all()


@pytest.mark.parametrize("layout", ["", "transposed", "columns", "sliced", "expanded"])
def test_layouts_hold_the_same_numbers_and_elements_lie_where_the_strides_say(layout):
    x = torch.randn(2, 3, 4, 5)
    x = x[:, :1].expand_as(x) if layout == "expanded" else x
    view, whole = laid_out(x, layout)
    assert torch.equal(view, x)
    assert whole.isnan().sum() == len(whole) - x[:, : 1 if layout == "expanded" else 3].numel()
    assert view.is_contiguous() is (layout == "")
    elements = Elements("x", view)
    addresses = np.arange(-8, len(elements.known) + 8) * 4 + view.data_ptr()
    inside = torch.zeros(len(whole), dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    start = view.storage_offset() - 8
    assert elements.hold(addresses).tolist() == inside[start : start + len(addresses)].tolist()


def test_products_of_compiled_kernels_are_read():
    line = "%s_1 = tt.dot %q, %k, %zero : tensor<64x32xi8> * tensor<32x32xi8> -> tensor<64x32xi32> loc(#loc5)"
    assert DOT.findall(line) == [("i8", "i8", "i32")]
