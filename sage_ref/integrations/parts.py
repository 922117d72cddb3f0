"""Masks that need no masked attention, because each sequence is computed by parts.

A part is a range of queries and the range of keys that they see, all of them or causally. Padding leaves one part of a
sequence, packed documents are a part each, and new tokens behind cached ones are a part with more keys than queries.
Parts of the same lengths are computed together, in one call of attention.
"""

from collections.abc import Callable
from itertools import chain, groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

HIDDEN = torch.finfo(torch.float16).min  # a mask that is added hides a key by this number or a lower one
Range = tuple[int, int]  # start and stop


class Part(NamedTuple):
    """Queries of a sequence and the keys that they see.

    is_causal: the last query sees all of the keys, the one before it all but the last, and so on.
    """

    queries: Range
    keys: Range
    is_causal: bool


Parts = tuple[tuple[Part, ...], ...]  # of every sequence of a batch; other queries see no key

# tensor -> (its version and place, what it was asked for), the answer
_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def can_be_read(x: Tensor) -> bool:
    """Return whether Python may read a tensor's numbers: not under torch.compile, torch.func or torch.vmap.

    A meta tensor and a FakeTensor have no numbers to read.
    """
    if torch.compiler.is_compiling() or x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor):
        return False
    return not torch._C._are_functorch_transforms_active()


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
    return read_once(mask, sizes, _read)


def read_once(x: Tensor, question: object, read: Callable[[Tensor, object], object]) -> object:
    """Return read(x, question), from memory where reading x waits for a GPU and x has not changed since.

    The layers of a model share their mask. A change that PyTorch doesn't count goes unnoticed.
    """
    if x.is_inference() or not _waits(x):  # changes of an inference tensor are not counted
        return read(x, question)
    key = x._version, x.data_ptr(), question
    known = _found.get(x)
    if known is None or known[0] != key:
        known = _found[x] = key, read(x, question)
    return known[1]


def _waits(x: Tensor) -> bool:
    """Return whether reading a tensor waits for its device."""
    return x.device.type != "cpu"


@torch.no_grad()
def _read(mask: Tensor, sizes: tuple[int, int, int, int]) -> Parts | None:
    batch, _, n_q, n_k = sizes
    fits = mask.dim() <= 4 and all(x in (1, full) for x, full in zip(mask.shape[::-1], sizes[::-1], strict=False))
    if not fits or mask.requires_grad or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    for dim in (1, 2):  # read once what heads or queries share
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    sees = mask if mask.dtype == torch.bool else mask == 0
    plain = (sees[:, :1] == sees).all()
    if mask.dtype != torch.bool:
        plain = plain & (sees | (mask <= HIDDEN)).all()
    sees = sees[:, 0].expand(-1, -1, n_k)
    count = sees.sum(2)
    start = torch.where(count > 0, sees.view(torch.uint8).argmax(2), -1)  # a query without keys has those from -1 to -1
    stop = start + count
    place = torch.arange(n_k, device=mask.device)
    plain = plain & (sees == ((place >= start[..., None]) & (place < stop[..., None]))).all()
    plain, *ranges = torch.cat([plain[None], start.flatten(), stop.flatten()]).cpu().split([1, *2 * [start.numel()]])
    if not plain:
        return None
    rows = zip(*(x.view_as(start).expand(-1, n_q) for x in ranges), strict=True)
    parts = [_parts_of_one(*row, n_k) for row in rows]
    return None if None in parts else tuple(parts) * (batch // len(parts))


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


def parts_between(edges_q: list[int], edges_k: list[int], is_causal: bool) -> tuple[Part, ...]:
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


def by_parts(attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, parts: Parts) -> Tensor:
    """Compute O [B, H, Nq, D] by attention(query, key, value, is_causal) of each part; a query without one gets zeros.

    query [B, H, Nq, D]; key, value [B, Hkv, Nk, D]. Parts of the same lengths are one call. In `attention` query i sees
    the keys 0..i, so a causal part with more keys than queries gets queries of zeros in front. What is computed for
    them is thrown away.
    """
    pieces = [
        (_cut(q, [part.queries for part in of_one]), *(_cut(x, [part.keys for part in of_one]) for x in (k, v)))
        for q, k, v, of_one in zip(query.unbind(), key.unbind(), value.unbind(), parts, strict=True)
    ]
    alike: dict[tuple[int, int, bool], list[tuple[int, Part]]] = {}
    for i, of_one in enumerate(parts):
        for part in of_one:
            lengths = (stop - start for start, stop in part[:2])
            alike.setdefault((*lengths, part.is_causal), []).append((i, part))
    outputs: list[dict[Range, Tensor]] = [{} for _ in parts]
    for (n_q, n_k, is_causal), chosen in alike.items():
        q = torch.stack([pieces[i][0][part.queries] for i, part in chosen])
        k, v = (torch.stack([pieces[i][n][part.keys] for i, part in chosen]) for n in (1, 2))
        ahead = n_k - n_q if is_causal else 0
        output = attention(F.pad(q, (0, 0, ahead, 0)) if ahead else q, k, v, is_causal=is_causal)
        for (i, part), of_part in zip(chosen, output[:, :, ahead:].unbind(), strict=True):
            outputs[i][part.queries] = of_part
    return torch.stack([_with_zeros(found, x) for found, x in zip(outputs, query.unbind(), strict=True)])


def _cut(x: Tensor, ranges: list[Range]) -> dict[Range, Tensor]:
    """Return the tokens of each range of x [H, N, D], by one operation where ranges don't overlap."""
    ranges = sorted({*ranges})
    sizes = [stop - start for start, stop in pairwise([0, *chain.from_iterable(ranges), x.shape[1]])]
    if min(sizes) < 0:
        return {(start, stop): x[:, start:stop] for start, stop in ranges}
    return dict(zip(ranges, x.split(sizes, 1)[1::2], strict=True))


def _with_zeros(found: dict[Range, Tensor], like: Tensor) -> Tensor:
    """Join the outputs [H, stop - start, D] of one sequence, with zeros between them: [H, Nq, D]."""
    pieces, end = [], 0
    for (start, stop), output in sorted(found.items(), key=lambda item: item[0]):
        pieces += [like.new_zeros(like.shape[0], start - end, like.shape[2]), output]
        end = stop
    return torch.cat([*pieces, like.new_zeros(like.shape[0], like.shape[1] - end, like.shape[2])], 1)
