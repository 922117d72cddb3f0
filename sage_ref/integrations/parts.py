"""Masks that need no masked attention, because each sequence is computed by parts.

A part is a range of queries and the range of keys that they see, all of them or causally. Padding leaves one part of a
sequence, packed documents are a part each, and new tokens behind cached ones are a part with more keys than queries.
Parts of the same lengths are computed together, in one call of attention. Where kernels run, so are packed documents of
several lengths: as rows of tokens with padding at their ends, which the kernels pass over.
"""

import sys
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = torch.finfo(torch.float16).min  # a mask that is added hides a key by this number or a lower one
LAUNCHED_HEADS = 65535  # that one launch of a kernel takes, in all sequences of a batch
# Documents of up to so many tokens share a call if that saves several. A longer one keeps a GPU busy alone.
LONGEST, SHORTEST_ROW, FEWEST_LENGTHS = 2048, 32, 4
KEPT = 8  # answers for the layers of a model, which share them
KNOWN = "_sage_ref_parts"  # an attribute of a mask: what was read of it
Range = tuple[int, int]  # start and stop


class Part(NamedTuple):
    """Queries of a sequence and the keys that they see.

    is_causal: the last query sees all of the keys, the one before it all but the last, and so on.
    """

    queries: Range
    keys: Range
    is_causal: bool


Parts = tuple[tuple[Part, ...], ...]  # of every sequence of a batch; other queries see no key
# What was worked out last: sizes, the numbers read of a mask, its parts.
_answers: deque[tuple[tuple[int, ...], Tensor, Parts | None]] = deque(maxlen=KEPT)


def can_be_read(x: Tensor) -> bool:
    """Return whether Python may read a tensor's numbers: not under torch.compile, torch.func or torch.vmap.

    A meta tensor and a FakeTensor have no numbers to read, and while a CUDA graph is captured nothing may be read.
    torch.jit.trace would keep what was read as constants.
    PyTorch's own causal bias has none, and needs none.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if is_causal_bias(x):
        return True
    without_numbers = x.is_meta or isinstance(x, torch._subclasses.FakeTensor)
    return not (without_numbers or torch._C._are_functorch_transforms_active() or is_captured(x))


def is_causal_bias(x: Tensor) -> bool:
    """Return whether this is what `causal_upper_left` or `causal_lower_right` makes.

    Whoever has one has imported its module, which takes seconds: it imports torch.compile.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(x, module.CausalBias)


def is_captured(x: Tensor) -> bool:
    """Return whether work on a tensor is recorded in a CUDA graph now."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor's memory holds what it means: a class that overrides functions says that by itself."""
    own = getattr(type(x).__torch_function__, "__func__", None)
    return isinstance(x, torch.nn.Parameter) or own is Tensor.__torch_function__.__func__


def parts_of(mask: Tensor, sizes: tuple[int, int, int, int]) -> Parts | None:
    """Return what each sequence of a batch attends to under a mask of SDPA, or None where parts would not do.

    They do if the keys that a query sees are next to each other. Neighbouring queries that see the same keys, or each
    one key more than the query before it, are a part. Keys of different parts are the same, begin at the same place, or
    don't overlap: so parts do not make a sliding window.

    Where there are as many queries as keys, a query at a place without a key is separated from the others. Under a
    causal mask it is padding, too, and gets no part. Without causality it may belong to a different sequence that
    happens to be as long (cross-attention), so such queries get a part of their own.

    Args:
        mask: bool, True where a query sees a key, or float, 0 there and at most `HIDDEN` elsewhere; the same for all
            heads.
        sizes: B, H, Nq, Nk, to which it broadcasts.
    """
    batch, _, n_q, n_k = sizes
    if is_causal_bias(mask):
        return _parts_of_bias(mask, batch, n_q, n_k)
    fits = mask.dim() <= 4 and all(x in (1, full) for x, full in zip(mask.shape[::-1], sizes[::-1], strict=False))
    is_mask = mask.dtype == torch.bool or mask.is_floating_point()
    if not (fits and is_mask and has_numbers(mask)) or mask.requires_grad:
        return None
    known = getattr(mask, KNOWN, None)
    if known is None:
        return _read(mask, sizes)
    question = mask._version, sizes
    if question not in known:
        known[question] = _read(mask, sizes)
    return known[question]


def share_parts(mask: Tensor | None) -> None:
    """Let the layers of a model read a mask once, which was made for them: nobody else has it to write into.

    Any other mask is read in each call. A kernel, a collective and `.data` write into a tensor unnoticed.
    """
    if mask is not None and can_be_read(mask) and not mask.is_inference():
        setattr(mask, KNOWN, {})


def _parts_of_bias(bias: Tensor, batch: int, n_q: int, n_k: int) -> Parts | None:
    """Return the parts of PyTorch's own causal biases, which have no numbers."""
    if (bias.seq_len_q, bias.seq_len_kv) != (n_q, n_k):
        return None
    if bias.variant.name == "LOWER_RIGHT":
        rows = (Part((max(n_q - n_k, 0), n_q), (0, n_k), True),)
    else:
        both = min(n_q, n_k)
        rows = (Part((0, both), (0, both), True), Part((both, n_q), (0, n_k), False))[: 1 + (n_q > n_k)]
    return (rows,) * batch


@torch.no_grad()
def _read(mask: Tensor, sizes: tuple[int, int, int, int]) -> Parts | None:
    batch, _, n_q, n_k = sizes
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in (1, 2):  # read once what heads or queries share
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    sees = mask if mask.dtype == torch.bool else mask == 0
    plain = torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.shape[1] > 1:
        plain = (sees[:, :1] == sees).all()
    if mask.dtype != torch.bool:
        plain = plain & (sees | (mask <= HIDDEN)).all()
    sees = sees[:, 0].expand(-1, -1, n_k).view(torch.uint8)
    count = sees.sum(2)
    first, last = sees.argmax(2), n_k - 1 - sees.flip(2).argmax(2)
    start = torch.where(count > 0, first, -1)  # a query without keys has those from -1 to -1
    plain = plain & ((count == 0) | (last - first + 1 == count)).all()
    found = torch.cat([plain[None], start.flatten(), (start + count).flatten()]).cpu()
    for question, numbers, parts in tuple(_answers):
        if question == sizes and torch.equal(numbers, found):
            return parts
    rows = zip(*(x.view_as(start).expand(-1, n_q) for x in found[1:].split(start.numel())), strict=True)
    parts = [_parts_of_one(*row, n_k) if found[0] else None for row in rows]
    answer = None if None in parts else tuple(parts) * (batch // len(parts))
    _answers.append((sizes, found, answer))
    return answer


def _parts_of_one(start: Tensor, stop: Tensor, n_k: int) -> tuple[Part, ...] | None:
    """Return the parts of one sequence, whose query i sees the keys from start[i] to stop[i], on the CPU."""
    n_q, parts = len(start), []
    starts, stops = start.tolist(), stop.tolist()
    for first, last in pairwise(_edges_of_runs(start, stop)):
        keys, is_causal = (starts[first], stops[last - 1]), stops[first] < stops[last - 1]
        if keys == (-1, -1):
            continue
        before = parts[-1] if parts else Part((0, 0), (0, 0), False)
        if before.keys[0] < keys[0] < before.keys[1]:
            return None
        cuts = [first, last]
        if n_q == n_k and not is_causal:
            if before.is_causal and before.keys == keys and first >= keys[1]:
                continue
            if first <= keys[0] and keys[1] <= last:
                cuts = sorted({*cuts, *keys})
        parts += [Part(queries, keys, is_causal) for queries in pairwise(cuts)]
    return tuple(parts)


def _edges_of_runs(start: Tensor, stop: Tensor) -> list[int]:
    """Return where queries begin that see the same keys, or each one key more than the query before it; and the end."""
    more = torch.where((start.diff() == 0) & (stop.diff() >= 0) & (stop.diff() <= 1), stop.diff(), -1)
    edges, query = [0], 0
    for kind, group in groupby(more.tolist()):
        steps = len(list(group))
        if kind == -1:  # every step leads to a new run
            edges.extend(range(query + 1, query + steps + 1))
        elif query > edges[-1]:  # a run of the other kind ends here
            edges.append(query + 1)
        query += steps
    return [*edges, len(start)]


@lru_cache(maxsize=KEPT)
def parts_between(edges_q: tuple[int, ...], edges_k: tuple[int, ...], is_causal: bool) -> tuple[Part, ...]:
    """Return the parts of documents that are packed into one sequence, whose tokens are between neighbouring edges."""
    lengths = [[stop - start for start, stop in pairwise(edges)] for edges in (edges_q, edges_k)]
    if len(edges_q) != len(edges_k) or (is_causal and any(n_q > n_k for n_q, n_k in zip(*lengths, strict=True))):
        raise ValueError(f"cu_seq_lens_k: expected as many keys as queries or more in each document, got {lengths}")
    parts = (Part(*ranges, is_causal) for ranges in zip(pairwise(edges_q), pairwise(edges_k), strict=True))
    return tuple(part for part in parts if all(start < stop for start, stop in part[:2]))


def visible(parts: Parts, n_q: int, n_k: int) -> Tensor:
    """Return the mask of SDPA that means the same, bool [B, 1, Nq, Nk], on the CPU."""
    mask = torch.zeros(len(parts), 1, n_q, n_k, dtype=torch.bool)
    for i, of_one in enumerate(parts):
        for queries, keys, is_causal in of_one:
            part = mask[i, 0, slice(*queries), slice(*keys)]
            part[:] = part.new_ones(part.shape).tril(part.shape[1] - part.shape[0]) if is_causal else True
    return mask


class Group(NamedTuple):
    """Parts that one call of attention computes: how many, and their lengths.

    lengths: the parts' own, queries and keys alike, where they differ; at most `queries`. Empty: they don't.
    """

    count: int
    queries: int
    keys: int
    is_causal: bool
    lengths: tuple[int, ...]


class Order(NamedTuple):
    """Groups of parts, and the ranges of tokens, counted through the batch, that they have in this order.

    The padding of a group's rows is a range of negative numbers up to 0.
    """

    groups: tuple[Group, ...]
    queries: tuple[Range, ...]
    keys: tuple[Range, ...]


def by_parts(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Parts,
    padded: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute O [B, H, Nq, D] by attention(query, key, value, is_causal) of each part; a query without one gets zeros.

    query [B, H, Nq, D]; key, value [B, Hkv, Nk, D]. Parts of the same lengths are one call. If one call computes all
    tokens, nothing is copied; otherwise one operation brings each tensor into the order of the groups, however many
    parts there are. In `attention` query i sees the keys 0..i, so a causal part with more keys than queries gets
    queries of zeros in front. What is computed for them is thrown away.

    padded: attention with a keyword `lengths`, int32 [B], how many tokens of each row there are: for documents of
    several lengths.
    """
    (batch, heads, n_q, _), n_k = query.shape, key.shape[2]
    in_order = _order.__wrapped__ if torch.compiler.is_compiling() else _order
    groups, q_ranges, k_ranges = in_order(parts, n_q, n_k, max(1, LAUNCHED_HEADS // heads), padded is not None)
    q = _taken(query, q_ranges, [(group.count, group.queries) for group in groups])
    k, v = (_taken(x, k_ranges, [(group.count, group.keys) for group in groups]) for x in (key, value))
    outputs = []
    for group, *qkv in zip(groups, q, k, v, strict=True):
        if group.lengths:
            lengths = _lengths(group.lengths, query.device)
            outputs.append(padded(*qkv, is_causal=group.is_causal, lengths=lengths).transpose(1, 2).flatten(0, 1))
            continue
        ahead = group.keys - group.queries if group.is_causal else 0
        qkv[0] = F.pad(qkv[0], (0, 0, ahead, 0)) if ahead else qkv[0]
        outputs.append(attention(*qkv, is_causal=group.is_causal)[:, :, ahead:].transpose(1, 2).flatten(0, 1))
    if q_ranges == ((0, batch * n_q),):
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    else:
        places = _places(q_ranges, batch * n_q, query.device)
        output = Moved.apply(torch.cat([*outputs, query.new_zeros(1, heads, query.shape[3])]), *places[::-1])
    return output.unflatten(0, (batch, n_q)).transpose(1, 2)


@lru_cache(maxsize=KEPT)
def _order(parts: Parts, n_q: int, n_k: int, most: int, with_padding: bool) -> Order:
    """Group parts of the same lengths, at most `most` in a group; with_padding: and documents of several lengths."""
    alike: dict[tuple[int, int, bool], list[tuple[Range, Range]]] = {}
    for i, of_one in enumerate(parts):
        for queries, keys, is_causal in of_one:
            ranges = tuple((i * n + start, i * n + stop) for n, (start, stop) in ((n_q, queries), (n_k, keys)))
            alike.setdefault((queries[1] - queries[0], keys[1] - keys[0], is_causal), []).append(ranges)
    if with_padding:
        alike = _with_several_lengths(alike)
    groups, places = [], ([], [])
    for (*sizes, is_causal), ranges in alike.items():
        for first in range(0, len(ranges), most):
            taken = ranges[first : first + most]
            lengths = tuple(stop - start for (start, stop), _ in taken)
            groups.append(Group(len(taken), *sizes, is_causal, lengths if min(lengths) < sizes[0] else ()))
        for place, size, of_one in zip(places, sizes, zip(*ranges, strict=True), strict=True):
            place += [part for start, stop in of_one for part in ((start, stop), (stop - start - size, 0))]
    return Order(tuple(groups), *map(_joined, places))


def _with_several_lengths(alike: dict) -> dict:
    """Return parts by their lengths, or for documents of several lengths by their longest."""
    keys = sorted(of_keys for ranges in alike.values() for _, of_keys in ranges)
    if any(stop > start for (_, stop), (start, _) in pairwise(keys)):  # the gradient of padding would count
        return alike
    classes: dict[tuple[int, bool], list[tuple[int, int, bool]]] = {}
    for kind in alike:
        row = max(SHORTEST_ROW, 1 << (kind[0] - 1).bit_length())
        if kind[0] == kind[1] <= LONGEST:
            classes.setdefault((row, kind[2]), []).append(kind)
    for kinds in classes.values():
        if len(kinds) >= FEWEST_LENGTHS:
            alike = {**alike, max(kinds): [pair for kind in kinds for pair in alike[kind]]}
            for kind in set(kinds) - {max(kinds)}:
                del alike[kind]
    return alike


@lru_cache(maxsize=4 * KEPT)
def _lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(lengths, dtype=torch.int32).to(device)


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """Join ranges that follow each other, without empty ones."""
    found: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


class Moved(torch.autograd.Function):
    """Rows of a tensor in a different order, whose gradient is a read, too: without sums, and faster than a write."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, back: Tensor) -> Tensor:
        """Return the rows of x [n, ...] at `places`. back: where each row of x is then."""
        ctx.back = back
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.back), None, None


class Places(NamedTuple):
    """Where the tokens of ranges are among all tokens; where all are among those, or behind them if in no range.

    `index` has one place more, behind those of the ranges. There and for padding it names any token.
    """

    index: Tensor
    inverse: Tensor | None  # None where ranges overlap


@lru_cache(maxsize=KEPT)
def _places(ranges: tuple[Range, ...], tokens: int, device: torch.device) -> Places:
    """Return the places of the tokens of some ranges, in the order of the ranges."""
    with torch.inference_mode(False):  # a later call with gradients saves them
        starts, stops = torch.tensor([*ranges, (-1, 0)], dtype=torch.int64).unbind(1)
        lengths = stops - starts
        order = torch.arange(int(lengths.sum()))
        index = order + (starts + lengths - lengths.cumsum(0)).repeat_interleave(lengths)
        is_token = index >= 0
        inverse = torch.full((tokens,), len(order) - 1).index_copy_(0, index[is_token], order[is_token])
        overlap = not torch.equal(inverse[index[is_token]], order[is_token])
        return Places(index.clamp(min=0).to(device), None if overlap else inverse.to(device))


def _taken(x: Tensor, ranges: tuple[Range, ...], sizes: list[tuple[int, int]]) -> list[Tensor]:
    """Return the tokens of ranges of x [B, H, N, D] by group: [count, H, n, D] for each (count, n) of sizes."""
    tokens = x.transpose(1, 2).flatten(0, 1)
    if len(ranges) == 1:
        taken = tokens[slice(*ranges[0])]
    else:
        index, inverse = _places(ranges, len(tokens), x.device)
        # Where tokens are taken twice, the gradient adds up, in an order that doesn't change.
        taken = tokens[index] if inverse is None else Moved.apply(tokens, index, inverse)
    counts = [count * n for count, n in sizes]
    of_groups = taken.split([*counts, len(taken) - sum(counts)])
    return [part.unflatten(0, size).transpose(1, 2) for part, size in zip(of_groups, sizes, strict=False)]
