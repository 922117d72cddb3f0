"""The tables of RESULTS.md about times that were taken in turn, from records of `python -m sage_lab bench`."""

import textwrap
from collections.abc import Sequence

from sage_lab.bench.ratios import OURS, PEER_NAMES, UNBIASED, pays_from, peer_ratios, turns
from sage_lab.records import Record, Row, markdown_table, read_record

from sage_course.results.pretraining import TIMES, relative_rate, step_times, timed_model

PAIRED, PAIRED_SPARSE, PRETRAIN_SPEED = "paired_h200", "paired_sla2_h200", "pretrain_speed_h200"
VIDEO = "video_speed_h200"
OUR_NAMES = {OURS: "ours", UNBIASED: "ours with an unbiased O"}
COMPARED = "A peer's time divided by ours, timed in turn: above 1 ours is faster"
BRANCHES = {2: "16 bit", 4: "INT8"}  # SLA2's levels that are timed in turn, of which the faster one counts
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def at_a_glance() -> str:
    """Return the first table of times: how many times as fast as each peer we are, alone, in training, and sparse."""
    both = {"scope": "autograd", "direction": "fwd+bwd", "cuda_graph": False}
    dense, sparse = read_record(PAIRED), read_record(PAIRED_SPARSE)
    rows = dense.select(**both, layout="bhnd", head_dim=128)
    lines = {}
    for where, of in sorted(turns(rows), key=lambda turn: turn[0]["causal"]):
        if where["n_q"] in (1024, 4096, 16384) and where["heads"] == where["kv_heads"]:
            lines[f"SageBwd, {where['n_q']:,} tokens{', causal' if where['causal'] else ''}"] = peer_ratios(of)
    times = read_record(TIMES)
    for n, (exact, ours) in step_times(times).items():
        lines[f"training step of {timed_model(times)} with SageBwd, {n:,} tokens"] = {"exact": exact / ours}
    steps = read_record(PRETRAIN_SPEED)
    names = {"sdpa_flash": "flash_attention_2", "sdpa_cudnn": "exact", "fa4": "flash_attention_4", "exact": "exact"}
    for row in steps.select(attention="sagebwd"):
        ratios = {peer: relative_rate(steps, row, attention=name) for peer, name in names.items()}
        lines[f"training step of a small Llama with SageBwd, {row['context']:,} tokens{archived(steps)}"] = ratios
    *_, (where, of) = turns(sparse.select(mask="random", **both))
    same_mask = peer_ratios(of)
    lines[f"SLA2 at 97% sparsity, {where['n_q']:,} tokens"] = same_mask | {"fa4": None}
    names |= {"sdpa_cudnn": "cudnn"}
    video = read_record(VIDEO)
    for tokens in sorted({row["tokens"] for row in video.rows}):
        ms = {row["provider"]: row["ms_median"] for row in video.select(what="step", tokens=tokens)}
        ratios = {peer: ms[name] / ms["sla2"] for peer, name in names.items()}
        lines[f"training step of a small video model with SLA2, {tokens:,} tokens{archived(video)}"] = ratios
    peers = {x: PEER_NAMES[x] for x in ("sdpa_flash", "sdpa_cudnn", "cudnn_fp8", "fa4")} | {"exact": "PyTorch's pick"}
    cells = [(name, *(f"{ratios[x]:#.3g}x" if ratios.get(x) else "" for x in peers)) for name, ratios in lines.items()]
    table = markdown_table(("how many times as fast as", *peers.values()), cells)
    errors = {name: max(row["rel_l2"] for row in rows if row["provider"] == name) for name in (OURS, "cudnn_fp8")}
    is_fastest = all(ratios["fa4"] == min(1, *ratios.values()) for ratios in (peer_ratios(of) for _, of in turns(rows)))
    plan = steps.provenance["plan"]
    explained = (
        "Forward and backward pass together, head size 128 (of the language models "
        f"{plan['width'] // plan['heads']}), quantisation included, all timed in turn on one GPU "
        f"({dense.provenance['gpu']}); below 1x we are slower. "
        f"FlashAttention-4 in bf16 is {'the fastest dense attention at every length' if is_fastest else 'fast'}: INT8 "
        "makes matmuls cheaper, but not exponentials and rounding, and dP stays in 16 bit. cuDNN's FP8 attention has "
        f"{errors['cudnn_fp8'] / errors[OURS]:.1f} times our error. SLA2 alone has a given, random block mask, and is "
        "compared with attention to all keys. With the same block mask it is "
        f"{same_mask['fa4']:.2f}x as fast as FlashAttention-4, which computes no linear branch."
    )
    return f"{table}\n\n{textwrap.fill(explained, 128, break_on_hyphens=False)}"


def archived(record: Record) -> str:
    return ", archived" if "archived" in record.provenance else ""


def paired_speed() -> str:
    """Return the table of peers' times over ours by shape, and of what one call costs the host."""
    record = read_record(PAIRED)
    where_all = {"scope": "autograd", "layout": "bhnd", "cuda_graph": False}
    rows = record.select(**where_all, direction="fwd+bwd")
    peers = peers_in(record)
    forward = {_shape(where): peer_ratios(of) for where, of in turns(record.select(**where_all, direction="fwd"))}
    lines = []
    for where, of in turns(rows):
        ratios, host = peer_ratios(of), {row["provider"]: row["host_us"] for row in of}
        shown = {peer: f"({ratio:.2f})" for peer, ratio in forward[_shape(where)].items()}
        shown |= {peer: f"{ratio:.2f} {shown[peer]}" for peer, ratio in ratios.items()}
        cells = [shown.get(peer, "") for peer in peers]
        cells += [f"{host[provider]:.0f}" if provider in host else "" for provider in (OURS, "sdpa_cudnn", "fa4")]
        lines.append((_shape(where), *cells))
    host_times = ("our host time, us", "cuDNN's", "FlashAttention-4's")
    table = markdown_table(("", *(PEER_NAMES[peer] for peer in peers), *host_times), lines)
    described = f"{COMPARED}; both passes, in brackets the forward pass, bfloat16; {record.caption}.{_absent(record)}"
    lengths = ", ".join(f"{length:,} ({shape})" for shape, length in pays_from(rows).items())
    pays = (
        "**From when on does `sdpa()` use INT8?** From the length at which both passes take at most 5% more time than "
        f"PyTorch's fastest kernel (FlashAttention-4 is not among them): {lengths}. Shorter calls stay exact, unless "
        "`minimum_tokens` says otherwise. INT8 also keeps less memory for the backward pass: 6 D + 4 bytes per token "
        "and head, and one number per block. FlashAttention keeps 8 D + 4."
    )
    pays = textwrap.fill(pays, 128, break_on_hyphens=False)
    return f"{table}\n\n{described}\n\n{pays}\n\n{when_it_pays(record)}\n\n{_errors(record.select(**where_all))}"


def when_it_pays(record: Record) -> str:
    """Return PyTorch's fastest time of both passes over ours by length, called and as a CUDA graph, on one card."""
    found: dict[str, dict[int, list[str]]] = {}
    for where, of in turns(record.select(scope="autograd", layout="bhnd", direction="fwd+bwd")):
        if where["heads"] == where["kv_heads"]:
            ratios, shape = peer_ratios(of), f"D={where['head_dim']}{', causal' if where['causal'] else ''}"
            fastest = min(ratios["sdpa_flash"], ratios["sdpa_cudnn"])
            found.setdefault(shape, {}).setdefault(where["n_q"], []).append(f"{fastest:.2f}")
    lengths = sorted({n for of_shape in found.values() for n in of_shape})
    lines = [(shape, *("{} ({})".format(*of_shape[n]) for n in lengths)) for shape, of_shape in found.items()]
    table = markdown_table(("N", *(f"{n:,}" for n in lengths)), lines)
    described = "PyTorch's fastest time of both passes over ours, above 1 ours is faster; in brackets as CUDA graphs:"
    return f"{described}\n\n{table}"


def peers_in(record: Record) -> list[str]:
    """Return the peers that were timed."""
    return [name for name in PEER_NAMES if record.select(provider=name)]


def _errors(rows: Sequence[Row]) -> str:
    """Return a list of everyone's relative L2 error, for each shape the largest of O, dQ, dK and dV."""
    errors: dict[str, dict[str, float]] = {}
    for where, of in turns(rows):
        for row in of:
            shapes = errors.setdefault(row["provider"], {})
            shapes[_shape(where)] = max(row["rel_l2"], shapes.get(_shape(where), 0.0))
    ranges = {name: (min(shapes.values()), max(shapes.values())) for name, shapes in errors.items()}
    listed = [f"- {(OUR_NAMES | PEER_NAMES)[name]}: {low:.4f} to {high:.4f}" for name, (low, high) in ranges.items()]
    return "\n".join(["The largest relative L2 error of O, dQ, dK and dV against exact attention:\n", *listed])


def paired_sparse() -> str:
    """Return the table of peers' times over those of `sparse_linear_attention`, by length, mask and direction."""
    record = read_record(PAIRED_SPARSE)
    peers = peers_in(record)
    lines = []
    for where, of in turns(record.rows):
        ratios = peer_ratios(of)
        if ratios and where["n_q"] > 4096:  # at 4,096 the GPU waits for the host
            ours = min((row for row in of if row["provider"] == OURS), key=lambda row: row["ms_median"])
            cells = (f"{ratios[peer]:.2f}" if peer in ratios else "not timed" for peer in peers)
            shape = f"{where['n_q']:,}", where["mask"], DIRECTIONS[where["direction"]]
            ms, host_ms = f"{ours['ms_median']:.2f} ({BRANCHES[ours['level']]})", f"{ours['host_us'] / 1e3:.2f}"
            lines.append((*shape, ms, host_ms, *cells))
    header = "N", "mask", "", "ours, ms", "our host time, ms", *(PEER_NAMES[peer] for peer in peers)
    table = markdown_table(header, lines)
    row = record.rows[0]
    size = f"{row['heads']} heads, D={row['head_dim']}"
    return f"{table}\n\n{COMPARED}; {size}, bfloat16; {record.caption}.{_absent(record)}"


def _shape(where: dict) -> str:
    grouped = f", {where['heads']} / {where['kv_heads']} heads" if where["heads"] != where["kv_heads"] else ""
    return f"N={where['n_q']:,}, D={where['head_dim']}{', causal' if where['causal'] else ''}{grouped}"


def _absent(record: Record) -> str:
    """Return a sentence on the peers that were missing in some turn, with their reasons; empty if none was."""
    missing = record.provenance.get("missing", ())
    names = dict.fromkeys(f"{PEER_NAMES[x['provider']]} ({x['missing'].partition(': ')[2]})" for x in missing)
    return f" Not timed in some turns: {', '.join(names)}." if names else ""


def backward_ratios() -> str:
    """Return the table of measured backward passes: ours and FlashAttention-4's, cuDNN's in FP8 and in bf16."""
    record, lines = read_record(PAIRED), []
    where = {"direction": "bwd", "head_dim": 128, "heads": 16, "layout": "bhnd", "cuda_graph": False}
    for n in (4096, 8192, 16384):
        for causal in (False, True):
            ms = {row["provider"]: row["ms_median"] for row in record.select(n_q=n, causal=causal, **where)}
            ours, fp8 = ms["fa4"] / ms["sage_kernels"], ms["sdpa_cudnn"] / ms["cudnn_fp8"]
            lines.append((f"{n:,}{', causal' if causal else ''}", f"{ours:.2f}x", f"{fp8:.2f}x"))
    header = ("tokens", "ours, against FlashAttention-4", "cuDNN's FP8, against cuDNN's bf16")
    return f"{markdown_table(header, lines)}\n\nThe backward pass alone, timed in turn, D=128; {record.caption}."
