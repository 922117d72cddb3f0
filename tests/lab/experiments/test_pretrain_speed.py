"""Step times: one row per way to use the devices, context and attention, and a table that compares them."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from process_cases import run_together
from sage_lab.__main__ import main
from sage_lab.experiments import pretrain_speed as speed
from sage_lab.experiments.pretrain_speed import SpeedPlan, speed_table, step_times
from sage_lab.models.llama import Llama, LlamaConfig
from sage_lab.records import read_record
from sage_lab.training.pretrain import Pretraining, PretrainSettings
from sage_lab.training.processes import Processes, processes
from torch.nn.attention import SDPBackend, sdpa_kernel

# Once per process, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:sage_ref. backend='auto' uses the reference:UserWarning")

PLAN = SpeedPlan((16, 32), layers=1, width=16, heads=2, tokens_per_device=64, tokens_per_pass=32, warmup=1, steps=5)
CELLS = [(context, name) for context in (16, 32) for name in ("exact", "flash_attention_2", "sagebwd")]
FLASH_ON_CPU = "ScaledDotProductFlashAttentionForCpuBackward0"
ON_CPU = {"exact": FLASH_ON_CPU, "flash_attention_2": FLASH_ON_CPU, "sagebwd": "SageBwdFunctionBackward"}


@pytest.fixture
def clock(monkeypatch):
    """Steps take 1, 2, 3, ... seconds of a clock that stands still otherwise; the first of each model is 100 s longer.

    The list of models that took steps, each once a step.
    """
    now, stepped = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed, "VOCABULARY", 64)
    take_step = Pretraining.advance

    def advance(training):
        take_step(training)
        number = sum(x is training for x in stepped)
        stepped.append(training)
        now[0] += number + 100 * (number == 0)

    monkeypatch.setattr(Pretraining, "advance", advance)
    return stepped


def rows_of(plan):
    return [row for _, rows in step_times(plan, Processes()) for row in rows]


def test_a_row_is_the_median_and_the_percentiles_of_the_timed_steps_of_the_plan(clock):
    with sdpa_kernel(SDPBackend.MATH):  # a different pick of PyTorch's: FlashAttention-2 is still itself
        rows = rows_of(PLAN)
    assert [(row["context"], row["attention"]) for row in rows] == CELLS
    for row in rows:
        # Steps of 1, 2, 3, 4 and 5 seconds after one that doesn't count.
        assert (row["ms_median"], row["ms_p20"], row["ms_p80"]) == (3000.0, 1800.0, 4200.0)
        assert (row["devices"], row["parallel"], row["tokens_per_step"]) == (1, "none", 64)
        assert (row["tokens_per_second"], row["protocol"]) == (round(64 / 3), "paired")
    model = Llama(LlamaConfig(64, context=16, layers=1, width=16, heads=2, kv_heads=2, qk_norm=True))
    assert {row["parameters"] for row in rows} == {sum(x.numel() for x in model.parameters())}
    assert [row["autograd_node"] == FLASH_ON_CPU for row in rows] == [False, True, False] * 2
    trainings = list(dict.fromkeys(clock))
    in_model = {"exact": "exact", "flash_attention_2": "exact", "sagebwd": "sagebwd"}
    assert [(x.config.context, x.config.attention) for x in trainings] == [(n, in_model[name]) for n, name in CELLS]
    for training in trainings:
        settings, config = training.settings, training.config
        assert (settings.batch_size * config.context, settings.micro_batch_size * config.context) == (64, 32)
        assert (config.layers, config.width, config.heads, config.kv_heads) == (1, 16, 2, 2)
        assert (config.qk_norm, config.smooth_k, config.backend) == (True, True, "auto")
        assert not settings.autocast  # that is for a GPU
        assert not settings.compile  # a compiled model may keep a backend that is no longer asked for
    warming, *turns = (clock[place : place + 3] for place in range(0, 18, 3))
    assert warming == trainings[:3]
    assert all(set(turn) == set(warming) for turn in turns)
    assert len({tuple(map(id, turn)) for turn in turns}) > 2  # in several orders
    assert len(clock) == 6 * 6


def test_flash_attention_4_takes_the_place_of_exact_attention(clock, monkeypatch):
    """Of a package that is made up, in 16 bit as under autocast. Steps have at least a pass."""
    seen = []

    def flash_attention_4(query, key, value, is_causal):
        seen.append((query.dtype, query.shape))
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    monkeypatch.setattr(speed.fa4, "flash_attention_4", flash_attention_4)
    monkeypatch.setattr(speed, "why_missing", lambda name, device: None)
    rows = rows_of(replace(PLAN, contexts=(16,), tokens_per_pass=2**15))
    assert [row["attention"] for row in rows] == list(speed.ATTENTIONS)
    assert seen == [(torch.float32, (4, 2, 16, 8))] * 6
    query, key = torch.randn(2, 1, 1, 4, 8)
    assert speed._flash_attention_4(query, key, key.bfloat16()).dtype == torch.bfloat16


def row(context, attention, rate, devices=1, parallel="none"):
    names = {"context": context, "attention": attention, "devices": devices, "parallel": parallel}
    return names | {"ms_median": 1e6 / rate, "tokens_per_second": rate}


def test_the_table_compares_with_exact_attention_and_with_one_device():
    rows = [row(32, "sagebwd", 250), row(32, "exact", 500), row(16, "sagebwd", 5000, 2, "ddp")]
    rows += [row(16, "flash_attention_2", 2000, 2, "ddp"), row(16, "exact", 4000, 2, "ddp")]
    rows += [row(16, "exact", 2000, 2, "fsdp"), row(16, "sagebwd", 1500), row(16, "exact", 1000)]
    header, lines = speed_table(rows)
    assert header[6:] == ("against PyTorch's pick", "against FlashAttention-2", "against one device")
    assert lines == [
        (16, 1, "none", "PyTorch's pick", 1000.0, "1,000", "1.00", "", "1.00"),
        (16, 1, "none", "SageBwd", 1e6 / 1500, "1,500", "1.50", "", "1.00"),
        (16, 2, "ddp", "PyTorch's pick", 250.0, "4,000", "1.00", "2.00", "4.00"),
        (16, 2, "ddp", "FlashAttention-2", 500.0, "2,000", "0.50", "1.00", ""),
        (16, 2, "ddp", "SageBwd", 200.0, "5,000", "1.25", "2.50", "3.33"),
        (16, 2, "fsdp", "PyTorch's pick", 500.0, "2,000", "1.00", "", "2.00"),
        (32, 1, "none", "PyTorch's pick", 2000.0, "500", "1.00", "", "1.00"),
        (32, 1, "none", "SageBwd", 4000.0, "250", "0.50", "", "1.00"),
    ]
    # Without a column that compares nothing.
    assert speed_table([row(16, "exact", 1000), row(16, "sagebwd", 1500)])[0][6:] == ("against PyTorch's pick",)


def timed(arguments):
    """In each of two processes: the command, interrupted as it begins with FSDP, and again."""
    speed.VOCABULARY, measure, measured = 64, speed._rows, []

    def rows(cell, attentions):
        if cell.parallel == "fsdp" and not again:
            raise KeyboardInterrupt
        measured.append((cell.group.count, cell.parallel, cell.context, len(attentions)))
        return measure(cell, attentions)

    speed._rows, again = rows, False
    with processes("cpu") as group:
        speed.processes = lambda device: nullcontext(group)
        with pytest.raises(SystemExit):
            main(arguments)
        again = True
        main(arguments)
    print(f"process {group.rank} measured {measured}\n", end="")


def test_two_processes_are_timed_after_one_and_go_on_after_an_interruption(tmp_path):
    """What is finished is known to the first process alone, and both leave out the same: else one waits for ever."""
    path = tmp_path / "speed.json"
    sizes = "--contexts 16 --layers 1 --width 16 --heads 1 --tokens-per-device 32 --warmup 1 --steps 2 --device cpu"
    printed = run_together(tmp_path, timed, ["pretrain-speed", *sizes.split(), "--json", str(path)])
    both = [(2, "ddp", 16, 3), (2, "fsdp", 16, 3)]
    assert f"process 0 measured {[(1, 'none', 16, 3), *both]}" in printed
    assert f"process 1 measured {both}" in printed
    assert "not timed: FlashAttention-4, flash-attn-4 needs a CUDA device" in printed
    record = read_record(path)
    assert record.provenance["plan"] == json.loads(
        json.dumps(asdict(SpeedPlan((16,), 1, 16, 1, 32, warmup=1, steps=2)))
    )
    found = [(row["devices"], row["parallel"], row["attention"]) for row in record.rows]
    assert found == [(*way, name) for way in ((1, "none"), (2, "ddp"), (2, "fsdp")) for name in ON_CPU]
    assert [path.name for path in tmp_path.glob("speed*")] == ["speed.json"]
    for row in record.rows:
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["autograd_node"] == ON_CPU[row["attention"]]
        assert row["tokens_per_second"] == pytest.approx(32e3 * row["devices"] / row["ms_median"], rel=0.01)


def trained_together(folder):
    """In each of two processes: the weights after two steps of three passes."""
    with processes("cpu") as group:
        for parallel in ("ddp", "fsdp"):
            weights = stepped(group, parallel).state_dict()
            whole = {name: x.full_tensor() if parallel == "fsdp" else x for name, x in weights.items()}
            if group.is_first:
                torch.save(whole, folder / f"{parallel}.pt")


def stepped(group, parallel, micro_batch_size=1):
    tokens = torch.randint(64, (999,), generator=torch.Generator().manual_seed(0)).to(torch.uint16)
    config = LlamaConfig(64, context=16, layers=1, width=16, heads=2, kv_heads=2)
    settings = PretrainSettings(steps=2, batch_size=6, micro_batch_size=micro_batch_size, max_grad_norm=0.1)
    training = speed.SpeedTraining(speed.Corpus("some", tokens, 64), config, settings, group, parallel)
    for _ in range(2):
        training.advance()
    return training.model


def test_two_processes_train_like_one_that_reads_as_many_tokens(tmp_path):
    run_together(tmp_path, trained_together, tmp_path)
    expected = stepped(Processes(), "none", micro_batch_size=2).state_dict()
    for parallel in ("ddp", "fsdp"):
        found = torch.load(tmp_path / f"{parallel}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, dict(expected), atol=1e-5, rtol=0)
