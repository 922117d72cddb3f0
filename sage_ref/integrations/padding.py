"""Padding masks, which need no masked attention if each sequence is cut to its own tokens.

Sequences of several lengths share a batch because padding is put after them or before them. Attention then needs no
mask if each sequence is computed on its own tokens; sequences with padding in the same places are computed together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

HIDDEN = torch.finfo(torch.float16).min  # a mask that is added hides a key by this number or a lower one


class Part(NamedTuple):
    """Queries of a sequence and the keys that they see, as start and stop; is_causal: query i sees keys 0..i."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool


Parts = tuple[tuple[Part, ...], ...]  # of every sequence of a batch; other queries see no key

_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # mask -> (its version and place, the sizes), its parts


def can_be_read(mask: Tensor) -> bool:
    """Return whether Python may read a mask: not under torch.compile, torch.func or torch.vmap.

    A meta tensor and a FakeTensor have no numbers to read.
    """
    if torch.compiler.is_compiling() or mask.device.type == "meta" or isinstance(mask, torch._subclasses.FakeTensor):
        return False
    return not torch._C._are_functorch_transforms_active()


def parts_of(mask: Tensor, sizes: tuple[int, int, int, int]) -> Parts | None:
    """Return what each sequence of a batch attends to under a mask of SDPA; None if the mask is more than padding.

    It is padding if the keys that a sequence has are next to each other, and a query sees all of them, or those up to
    its own place (causal), or none. A query at a place without a key is separated from the others: under a causal mask
    it is padding, too, and gets no part. Without causality it may belong to a different sequence that happens to be as
    long (cross-attention), so such queries get a part of their own.

    On a GPU reading a mask waits for it. There it is read once for as long as that tensor lives, since the layers of a
    model share theirs, and again when PyTorch has changed it. A change that PyTorch doesn't count goes unnoticed.

    Args:
        mask: bool, True where a query sees a key, or float, 0 there and at most `HIDDEN` elsewhere; the same for all
            heads.
        sizes: B, H, Nq, Nk, to which it broadcasts.
    """
    if mask.is_inference() or not _waits(mask):  # changes of an inference tensor are not counted
        return _read(mask, sizes)
    key = mask._version, mask.data_ptr(), sizes
    known = _found.get(mask)
    if known is None or known[0] != key:
        known = _found[mask] = key, _read(mask, sizes)
    return known[1]


def _waits(mask: Tensor) -> bool:
    """Return whether reading a mask waits for its device."""
    return mask.device.type != "cpu"


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
    facts = _facts(sees[:, 0].expand(-1, -1, n_k), n_q)
    plain, *facts = torch.cat([plain[None], facts.flatten()]).tolist()  # the only wait for a GPU
    if not plain:
        return None
    facts = [_Facts(*facts[i : i + len(_Facts._fields)]) for i in range(0, len(facts), len(_Facts._fields))]
    facts *= batch // len(facts)
    if all(one.whole for one in facts):
        return tuple(_whole_parts(one, n_q, n_k) for one in facts)
    if all(one.causal for one in facts):
        keys = [(one.start, one.stop) for one in facts]
        return tuple((Part(one, one, True),) if one[0] < one[1] else () for one in keys)
    return None


class _Facts(NamedTuple):
    """Facts of one sequence: its keys are `start` to `stop`; the other fields are 0 or 1.

    everyone: every query sees a key.
    whole, causal: what queries see is a part without causality, with it.
    """

    start: int
    stop: int
    everyone: int
    whole: int
    causal: int


def _facts(sees: Tensor, n_q: int) -> Tensor:
    """Return the `_Facts` of each sequence, [b, 5], from bool sees [b, n_q or 1, n_k]."""
    has, looks = sees.any(1), sees.any(2)  # [b, n_k] and [b, n_q or 1]: keys that are seen, queries that see
    n_k = has.shape[1]
    start = has.int().argmax(1)
    stop = start + has.sum(1)
    place = torch.arange(n_k, device=sees.device)
    together = (has == (place >= start[:, None]) & (place < stop[:, None])).all(1)
    everyone = looks.all(1)
    beside_key = (looks == has).all(1) if n_q == n_k else ~has.any(1)  # queries that see are at places with a key
    seen = has[:, None] & looks[:, :, None]
    whole = (sees == seen).all((1, 2)) & (everyone | beside_key)
    causal = torch.zeros_like(whole)
    if sees.shape[1] == n_q <= n_k:
        query = torch.arange(n_q, device=sees.device)[:, None]
        from_start = (looks == (query.mT >= start[:, None])).all(1)
        causal = (sees == (seen & (place <= query))).all((1, 2)) & (from_start | beside_key)
    return torch.stack([start, stop, everyone, whole & together, causal & together], 1)


def _whole_parts(one: _Facts, n_q: int, n_k: int) -> tuple[Part, ...]:
    """Return the parts of one sequence without causality."""
    keys = start, stop = one.start, one.stop
    if start == stop:
        return ()
    if n_q != n_k:
        return (Part((0, n_q), keys, False),)
    ranges = [(0, start), keys, (stop, n_q)] if one.everyone else [keys]
    return tuple(Part(queries, keys, False) for queries in ranges if queries[0] < queries[1])


def by_parts(attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, parts: Parts) -> Tensor:
    """Compute O [B, H, Nq, D] by attention(query, key, value, is_causal) of each part; a query without one gets zeros.

    query [B, H, Nq, D]; key, value [B, Hkv, Nk, D]. Sequences with the same part are one call.
    """
    sequences: dict[Part, list[int]] = {}
    for i, of_one in enumerate(parts):
        for part in of_one:
            sequences.setdefault(part, []).append(i)
    queries, keys, values = query.unbind(), key.unbind(), value.unbind()
    outputs: list[dict[tuple[int, int], Tensor]] = [{} for _ in parts]
    for part, chosen in sequences.items():
        cut = ((queries, part.queries), (keys, part.keys), (values, part.keys))
        tensors = [torch.stack([x[i][:, start:stop] for i in chosen]) for x, (start, stop) in cut]
        for i, output in zip(chosen, attention(*tensors, is_causal=part.is_causal).unbind(), strict=True):
            outputs[i][part.queries] = output
    return torch.stack([_with_zeros(found, x) for found, x in zip(outputs, queries, strict=True)])


def _with_zeros(found: dict[tuple[int, int], Tensor], like: Tensor) -> Tensor:
    """Join the outputs [H, stop - start, D] of one sequence, with zeros between them: [H, Nq, D]."""
    pieces, end = [], 0
    for (start, stop), output in sorted(found.items(), key=lambda item: item[0]):
        pieces += [like.new_zeros(like.shape[0], start - end, like.shape[2]), output]
        end = stop
    return torch.cat([*pieces, like.new_zeros(like.shape[0], like.shape[1] - end, like.shape[2])], 1)
