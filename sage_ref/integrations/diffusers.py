"""SageBwd and SLA2 in Hugging Face's diffusers, for inference and for training.

SageBwd is an attention backend like diffusers' own: call register(), then model.set_attention_backend("sagebwd").
SLA2 has parameters, so it becomes a part of the model: call install_sla2(model) before you make an optimiser. Later:

    model.save_pretrained(folder)  # router and alpha are in its file, the options of install_sla2 in its config
    model = with_sla2(WanTransformer3DModel).from_pretrained(folder)

EMAModel(model.parameters(), model_cls=with_sla2(WanTransformer3DModel), model_config=model.config) saves the averages.
"""

import copy
from collections.abc import Iterator
from functools import partial, wraps

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sage_ref.backend import warn_once
from sage_ref.checks import check_module, shown
from sage_ref.integrations.calls import Call, Policy, by_sagebwd, not_installed, obstacle, refuse
from sage_ref.integrations.pytorch import SdpaMode
from sage_ref.parallel import ParallelSLA2
from sage_ref.sagebwd.settings import Options
from sage_ref.sla2 import SLA2

NATIVE = "native"  # diffusers' name for F.scaled_dot_product_attention


# SageBwd


def register(
    name: str = "sagebwd",
    *,
    smooth_k: bool = True,
    smooth_q: bool = False,
    granularity: str = "row",
    unbiased: bool = False,
    backend: str = "auto",
    otherwise: str = "error",
) -> None:
    """Make `name` an attention backend of diffusers; call it again to change options.

    Then `model.set_attention_backend("sagebwd")`, for all models whose processors have backends. diffusers' registry is
    not public and its names are an enum: this extends both, as diffusers 0.42 has them.

    diffusers makes the backend that was set last that of all models which have none of their own, in the whole process.
    Give a model that has to stay exact, such as a teacher, `set_attention_backend("native")`.

    Args:
        name: A string in lower case.
        smooth_k, smooth_q, granularity, unbiased, backend: As in `sage_ref.sagebwd_attention`.
        otherwise: What happens to a call that SageBwd can't compute (a mask that isn't padding, dropout, context
            parallelism). "error": a ValueError that says why. "exact": diffusers' native attention computes it, with
            one warning for each reason.

    Raises:
        ImportError: diffusers is not installed, or has a different registry.
        TypeError, ValueError: An argument does not fit; the message names it.
    """
    names, registry = _dispatch()
    if not isinstance(name, str) or not name or name != name.lower():
        raise ValueError(f"name: expected a string in lower case, got {shown(name)}")
    if name in names._value2member_map_ and not hasattr(registry._backends.get(names(name)), "policy_of_sage_ref"):
        raise ValueError(f"name: expected one that diffusers doesn't have, got {name!r}")
    policy = Policy(Options(smooth_k, smooth_q, granularity, unbiased, backend), otherwise).checked()

    def sagebwd(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: object = None,
    ) -> Tensor:
        """Compute O [B, Nq, H, D] of query [B, Nq, H, D]; key, value [B, Nk, Hkv, D]."""
        rest = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        call = Call(*(x.transpose(1, 2) for x in (query, key, value)), **rest, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):  # diffusers: [B, Nk]
            call = call._replace(attn_mask=attn_mask[:, None, None])
        reason = obstacle(call, policy.options)
        if return_lse:
            reason = "return_lse: expected False, since L isn't a result, got True"
        elif _parallel_config is not None:
            reason = "_parallel_config: expected None, since tokens can't be on several GPUs here, got one"
        if reason is None:
            return by_sagebwd(call, policy.options).transpose(1, 2)
        refuse(reason, policy.otherwise, depth=2)
        rest |= {"enable_gqa": enable_gqa, "return_lse": return_lse, "_parallel_config": _parallel_config}
        return registry._backends[names(NATIVE)](query, key, value, **rest)

    sagebwd.policy_of_sage_ref = policy
    registry.register(_member(names, name))(sagebwd)


def _dispatch():
    """Return diffusers' enum of backends, and their registry."""
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise not_installed("diffusers", error) from error
    return AttentionBackendName, _AttentionBackendRegistry


def _member(names, value: str):
    """Return the member of an enum of strings with this value; make it if there is none."""
    if value not in names._value2member_map_:
        member = str.__new__(names, value)
        member._name_, member._value_ = value.upper(), value
        names._member_map_[member._name_] = names._value2member_map_[value] = member
        names._member_names_.append(member._name_)
    return names(value)


# SLA2


class SLA2Processor(nn.Module):
    """An attention processor with SLA2 as attention; all else, projections and positions, is the other processor's.

    Without arguments it stands for that of a layer: diffusers makes such ones by class, where it loads an IP-Adapter.

    Args:
        processor: The other one; it must call F.scaled_dot_product_attention, as diffusers' do on their native backend.
        attention: The module, whose router and alpha are parameters of the model.
    """

    _parallel: object = None
    self_attention = False  # whether `install_sla2` took it for one: then attention to other tokens is an error

    def __init__(self, processor=None, attention: SLA2 | None = None):
        super().__init__()
        self.attention = attention
        self.set_inner(processor)

    def set_inner(self, processor) -> None:
        """Take another processor's projections and positions; SLA2 stays."""
        self.processor = copy.copy(processor)  # several layers may share one
        # diffusers looks here for the arguments that it may pass, and would leave out an image's rotary positions
        self.__dict__["__call__"] = wraps(type(self.processor).__call__)(partial(nn.Module.__call__, self))
        if hasattr(self.processor, "_attention_backend"):
            names, _ = _dispatch()
            self.processor._attention_backend = names(NATIVE)
        if config := getattr(processor, "_parallel_config", None):
            self.processor._parallel_config = None  # what is native would exchange tokens and heads by itself
            self._parallel_config = config

    @property
    def _parallel_config(self) -> object:
        """The config that diffusers' `enable_parallelism` writes into each processor."""
        return self._parallel

    @_parallel_config.setter
    def _parallel_config(self, config: object) -> None:
        context = config.context_parallel_config
        if context.ring_degree > 1:
            got = context.ring_degree
            raise ValueError(f"ring_degree: expected 1, since SLA2 has no ring: use ulysses_degree, got {got}")
        self._parallel = config
        self.attention = ParallelSLA2.of(self.attention, context._ulysses_mesh.get_group())

    def forward(self, layer: nn.Module, *inputs, **options):
        """Run as the processor of `layer`; the arguments are the other processor's."""
        reached: list[bool] = []
        with _Sla2Mode(self, reached):
            output = self.processor(layer, *inputs, **options)
        if not reached:
            name = type(self.processor).__name__
            raise ValueError(
                "processor: expected one that calls F.scaled_dot_product_attention, as diffusers' own do without "
                f"attention slicing, got {name}"
            )
        return output


def _set_processor(layer: nn.Module, processor) -> None:
    """Set a layer's processor as its method does, but keep its SLA2.

    diffusers sets others by itself, as in fuse_qkv_projections and set_attention_slice, and would drop SLA2's weights.
    """
    if not isinstance(processor, SLA2Processor):
        layer.processor.set_inner(processor)
    elif processor.attention is not None:
        layer.processor = processor


class _Sla2Mode(SdpaMode):
    """SDPA computed by a processor's SLA2; `reached` gets an entry for each call."""

    def __init__(self, processor: SLA2Processor, reached: list[bool]):
        super().__init__()
        self.processor = processor
        self.reached = reached

    def attend(self, call: Call) -> Tensor:
        keys, queries = call.key.shape[2], call.query.shape[2]
        if self.reached and keys != queries:  # of an image beside the tokens, as IP-Adapters have it
            raise ValueError(f"processor: expected one self-attention, got a second attention, of {keys} keys")
        if self.processor.self_attention and keys != queries:
            got = f"None, and a layer with {queries} queries and {keys} keys"
            raise ValueError(f"names: expected the self-attentions of this model, got {got}")
        self.reached.append(True)
        found = {"mask": call.attn_mask, "dropout": call.dropout_p or None, "is_causal": call.is_causal or None}
        found["scale"] = None if call.scale in (None, call.query.shape[3] ** -0.5) else call.scale
        for name, value in found.items():
            if value is not None:
                raise ValueError(f"{name}: expected none, since SLA2 has nothing of the kind, got {shown(value)}")
        return self.processor.attention(call.query, call.key, call.value)


def install_sla2(
    model: nn.Module, names: list[str] | None = None, *, sparsity: float = 0.97, block_q: int = 128,
    block_kv: int = 64, quantize: bool = True, backward: str = "matched", query_blocks: int = 1, backend: str = "auto",
) -> list[SLA2]:  # fmt: skip
    """Give each self-attention of a diffusers model an SLA2 of its own, and return them in the model's order.

    Router and alpha become parameters of the model: in `model.parameters()`, and in `state_dict` under
    "....processor.attention". So load a state that has them after this, and make the optimiser after this, too. They
    start in stage 2 with alpha at 0.95; then call `initialize_alpha(model, ...)`, and `stage(model, 1)` to train them.
    A second call on one model installs those that are not SLA2 yet; the others keep their options. `model.config.sla2`
    keeps the options for `with_sla2`; if a model already has it, it was saved with SLA2, and a warning says that this
    starts anew. A processor that is set later computes projections and positions; SLA2 stays the layer's attention.
    Where diffusers' enable_parallelism divides the tokens, before this or after, SLA2 exchanges heads for them
    (`sage_ref.parallel`). Router and alpha are float32. FSDP2 wants one dtype: train a model in float32 with its
    MixedPrecisionPolicy.

    Args:
        model: A model of diffusers itself: torch.compile, PEFT's and others' wrappers come after this.
        names: Keys of `model.attn_processors`, or one; None means all that don't say that they are cross-attention. If
            one of these attends to more or fewer keys than it has queries, it is an error when it runs: give the names.
        sparsity, block_q, block_kv, quantize, backward, query_blocks, backend: As in `sage_ref.SLA2`.

    Raises:
        TypeError, ValueError: An argument does not fit; the message names it.
    """
    check_module("model", model)  # and no pipeline
    inner = next((x for x in model.modules() if hasattr(type(x), "register_to_config")), model)
    if inner is not model:  # its names would be saved with the wrapper's, and found by nobody
        raise ValueError(f"model: expected one of diffusers itself, got one inside {type(model).__name__}")
    layers = {f"{name}.processor": layer for name, layer in model.named_modules() if hasattr(layer, "get_processor")}
    if names is None:
        chosen = [name for name, layer in layers.items() if not getattr(layer, "is_cross_attention", False)]
    else:
        chosen = [names] if isinstance(names, str) else list(names)
    for name in chosen:
        if name not in layers:
            raise ValueError(f"names: expected keys of attn_processors, {shown(list(layers))}, got {shown(name)}")
    if not chosen:
        raise ValueError("model: expected attention processors of diffusers, got a model without any")
    options = {"sparsity": sparsity, "block_q": block_q, "block_kv": block_kv}
    options |= {"quantize": quantize, "backward": backward, "query_blocks": query_blocks}
    chosen = [name for name in chosen if not isinstance(layers[name].processor, SLA2Processor)]
    if any(name in _saved_options(model) for name in chosen):
        warn_once("the model was saved with SLA2. install_sla2 gives it a new router; with_sla2 loads its own.", 1)
    _install(model, {name: (_made(layers[name], options, backend), options) for name in chosen})
    for name in chosen:
        layers[name].processor.self_attention = names is None
    return list(sla2_modules(model))


def _made(layer: nn.Module, options: dict, backend: str) -> SLA2:
    """Return a new SLA2 for a layer, on its device."""
    if not (hasattr(layer, "inner_dim") and hasattr(layer, "heads")):
        raise ValueError(f"model: expected attention layers with inner_dim and heads, got {type(layer).__name__}")
    attention = SLA2(layer.inner_dim // layer.heads, layer.heads, **options, backend=backend)
    return attention.to(next(layer.parameters()).device)


def _install(model: nn.Module, made: dict[str, tuple[SLA2, dict]]) -> None:
    """Install modules, given with their options for the config by the processor's name in `model.attn_processors`."""
    for name, (attention, _) in made.items():
        layer = model.get_submodule(name.removesuffix(".processor"))
        layer.set_processor(SLA2Processor(layer.processor, attention))
        layer.set_processor = partial(_set_processor, layer)
    if made and hasattr(model, "register_to_config"):
        model.register_to_config(sla2=_saved_options(model) | {name: options for name, (_, options) in made.items()})


def _saved_options(model: nn.Module) -> dict[str, dict]:
    """Return the options that `install_sla2` or from_pretrained put into the config, by the processor's name."""
    return dict(getattr(model, "config", {}).get("sla2", {}))


def with_sla2(model_class: type, *, backend: str = "auto") -> type:
    """Return a class like `model_class` whose from_pretrained and from_config make the SLA2 that a config describes.

    Each returns a `model_class`. from_pretrained takes diffusers' arguments (subfolder, variant, torch_dtype, ...) and
    loads router and alpha with the other weights.

    Args:
        model_class: A class of diffusers' models.
        backend: As in `sage_ref.SLA2`.

    Raises:
        TypeError: `model_class` is no class of models.
        ValueError: A model was saved without SLA2; it needs no more than `model_class` itself.
    """
    if not (isinstance(model_class, type) and hasattr(model_class, "from_config")):
        raise TypeError(f"model_class: expected a class of diffusers' models, got {shown(model_class)}")

    class WithSLA2(model_class):
        @classmethod
        def from_config(cls, config, return_unused_kwargs: bool = False, **options):
            config = dict(config if isinstance(config, dict) else cls.load_config(config))
            if not (saved := config.pop("sla2", None)):
                raise ValueError("config: expected one with sla2, as install_sla2 leaves it, got one without")
            model, unused = super().from_config(config, return_unused_kwargs=True, **options)
            model.__class__ = model_class
            layers = {name: model.get_submodule(name.removesuffix(".processor")) for name in saved}
            _install(model, {name: (_made(layers[name], own, backend), own) for name, own in saved.items()})
            return (model, unused) if return_unused_kwargs else model

        @classmethod
        def from_pretrained(cls, *arguments, output_loading_info: bool = False, **options):
            model, info = super().from_pretrained(*arguments, output_loading_info=True, **options)
            missing = [name for name in info["missing_keys"] if ".processor.attention." in name]
            if missing:
                raise ValueError(f"weights: expected those of SLA2's routers and alphas, got none of {shown(missing)}")
            return (model, info) if output_loading_info else model

    WithSLA2.__name__ = model_class.__name__  # which diffusers writes into configs
    return WithSLA2


def sla2_modules(model: nn.Module) -> Iterator[SLA2]:
    """Return every SLA2 in a model, in its order."""
    check_module("model", model)
    return (module for module in model.modules() if isinstance(module, SLA2))


def stage(model: nn.Module, number: int) -> None:
    """Set the stage of every SLA2 in a model: 1 trains router and alpha, 2 the model with alpha.

    Make the optimiser and DistributedDataParallel after this: they keep to what trained when they were made. A saved
    model doesn't say in which stage it was: it loads in stage 2.

    Raises:
        TypeError, ValueError: The model is no module, or has no SLA2.
    """
    for module in _some_sla2(model):
        module.stage(number)


def _some_sla2(model: nn.Module) -> list[SLA2]:
    if found := list(sla2_modules(model)):
        return found
    raise ValueError("model: expected one with SLA2 (install_sla2, with_sla2), got one without")


@torch.no_grad()
def initialize_alpha(model: nn.Module, *inputs, **options) -> None:
    """Run `SLA2.initialize_alpha` of every SLA2 in a model on the inputs that it gets in model(*inputs, **options).

    With a model inside DistributedDataParallel, or sharded by FSDP2, every process calls this, and alpha becomes that
    of the mean of the processes' masses. Before weights are offloaded: their places hold nothing that could be set.
    Where a model calls one SLA2 several times, the mean over its calls counts.

    Raises:
        TypeError, ValueError: The model is no module, or has no SLA2, or its weights are offloaded.
    """
    modules = _some_sla2(model)
    if any(module.alpha_logit.is_meta for module in modules):
        raise ValueError("model: expected weights in their places, got offloaded ones: initialise alpha before")
    _reshard(model)
    groups = {module: _groups(model, module) for module in modules}
    masses: dict[SLA2, list[Tensor]] = {}

    def measure(module: SLA2, qkv: tuple[Tensor, ...]) -> None:
        mass = module.selected_mass(*qkv[:2])
        for group in groups[module]:
            dist.all_reduce(mass, group=group)
            mass /= group.size()
        masses.setdefault(module, []).append(mass)
        module.set_alpha(masses[module])  # the layers behind it see what it then computes

    hooks = [module.register_forward_pre_hook(measure) for module in modules]
    try:
        model(*inputs, **options)
    finally:
        for hook in hooks:
            hook.remove()
    _reshard(model)
    for module, of_calls in masses.items():
        module.set_alpha(of_calls)


def _reshard(model: nn.Module) -> None:
    """Give up the weights that FSDP2 has gathered, and its root keeps: what is written there is lost."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def _groups(model: nn.Module, module: SLA2) -> list[dist.ProcessGroup]:
    """Return the groups of processes that train one model."""
    if isinstance(model, DistributedDataParallel):
        return [model.process_group]
    mesh = getattr(module.alpha_logit, "device_mesh", None)  # of FSDP2
    return [] if mesh is None else mesh.get_all_groups()
