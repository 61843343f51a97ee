"""Loads a trainable policy from a folder or hub name, in one process or sharded over many.

The model is built on the meta device and sharded there, then every rank reads its own shards (`rlx.models.read`), so no process holds more
than its share. All ranks then check the model on a few tokens, on its device, with the attention, kernels and dtype of training.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from rlx.config.schema import AcConfig, LoraConfig
from rlx.kernels.logprob import choose_backend
from rlx.kernels.toolchain import check_triton
from rlx.models.attention import watched
from rlx.models.families import keep_exact
from rlx.models.flash import LONG, cudnn_agrees, install_flash_attention_3, remove_flash_attention_3
from rlx.models.layout import build_layout
from rlx.models.liger import apply_liger, may_patch
from rlx.models.lora import PARAMETERS, add_adapters, digest, draw_adapters
from rlx.models.policy import PolicyModel, head_widths
from rlx.models.read import different_from_first, empty_weights, read_weights, unties
from rlx.models.shard import checkpoint_activations, compile_layers, free_gathered, shard
from rlx.models.split import apply_expert_parallel, apply_tensor_parallel
from rlx.parallel.mesh import Mesh
from rlx.process import freed_memory_returned

log = logging.getLogger("rlx.trainer")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Largest difference of log-probabilities between packed and plain forward, as a share of their standard deviation.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.2}


@freed_memory_returned()
def load_policy(
    source: str,
    mesh: Mesh,
    *,
    dtype: str,
    optimization_dtype: str = "float32",
    reduce_dtype: str = "float32",
    attention: str = "auto",
    logprob_backend: str = "auto",
    liger: bool | str = "auto",
    ac: AcConfig | None = None,
    ac_offloading: bool = False,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    compile: bool = False,
    trust_remote_code: bool = False,
    lora: LoraConfig | None = None,
    slots: int | None = None,
    seed: int = 0,
    trained: bool = True,
    read: bool = True,
    context: int | None = None,
    served: int | None = None,
) -> PolicyModel:
    """Load `source`: parameters in `optimization_dtype`, computing in `dtype`, gradients reduced in `reduce_dtype`.

    With `lora`, only adapters are trained, drawn from `seed`; they have the dtype `optimization_dtype`, the frozen parameters `dtype`.
    `slots`: several adapters, for the runs of a shared trainer (`rlx.models.slots`).
    A model that is not `trained` (a reference) may have no experts to divide (`trainer.ep`).
    `read=False` may leave the parameters uninitialised, if there are no adapters: a checkpoint of the training follows.
    Shards over the mesh's `fsdp` axis.
    `context`: tokens of the longest sample, if it is known. `served`: the context of the servers that the run starts, if any.
    Raises ValueError for positions that depend on the packing or differ from the servers' (`check_rotary`), for a
    `logprob_backend` or `liger` that cannot be used, for targets of `lora` that the model does not have, or for a model whose packed
    forward differs from its own (`check_packed_forward`).
    """
    device, sharded = mesh.device, mesh.is_distributed
    master, compute = DTYPES[optimization_dtype], DTYPES[dtype]
    assert sharded or master == compute or lora is not None, (
        "only FSDP casts parameters; a single process has it by `TrainingRoot.fsdp_single_rank`"
    )
    whole = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    config = whole.get_text_config()
    check_rotary(source, config, context, served)
    backend = choose_backend(logprob_backend, device, compute, getattr(config, "vocab_size", None))  # fails before the slow load
    if device.type == "cuda" and (backend == "triton" or may_patch(liger)):
        check_triton()

    place = torch.device("cpu") if cpu_offload and device.type == "cuda" else device
    if getattr(config, "tie_word_embeddings", False):
        with torch.device("meta"):
            tied = AutoModelForCausalLM.from_config(whole, trust_remote_code=trust_remote_code)
        if mesh.any(unties(tied, source)):
            # The configuration is corrected for everything made from it: the shards, and every written version.
            whole.tie_word_embeddings = config.tie_word_embeddings = False
    frozen = master if lora is None else compute  # the dtype of what is read; frozen parameters never collect small changes
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(whole, dtype=frozen, trust_remote_code=trust_remote_code)
        keep_exact(hf)
        here = None if lora is None else add_adapters(hf, lora, master, slots)
    model = PolicyModel(hf, attention=attention, compute_dtype=compute, row=mesh.row)
    model.slots, model.context = here, context
    head = model.head[0]
    has_bias = getattr(head, "bias", None) is not None
    model.logprob_backend = choose_backend(logprob_backend, device, compute, len(head.weight), has_bias=has_bias, softcap=model.softcap)
    in_place = not compile and (ac is None or ac.freq == 0 or ac.mode == "full")
    model.liger = apply_liger(hf, liger, device, rope=in_place)
    if not trained:
        hf.requires_grad_(False)  # before it is sharded: FSDP takes parameters of several dtypes only where none is trained
    if mesh.tensor is not None and mesh.row is not None:
        apply_tensor_parallel(hf, mesh.row, mesh.tensor)
    if mesh.expert is not None and mesh.self_mesh is not None:
        apply_expert_parallel(hf, mesh.expert, mesh.self_mesh, dense=not trained)
    if ac is not None:
        checkpoint_activations(model, ac, offload=ac_offloading, random=lora is not None and (lora.dropout > 0 or slots is not None))
    if compile:
        compile_layers(model, device)
    if sharded:
        shard(
            model,
            mesh,
            compute_dtype=compute,
            reduce_dtype=DTYPES[reduce_dtype],
            cpu_offload=cpu_offload,
            reshard_after_forward=reshard_after_forward,
        )
    read = read or lora is not None
    if read:
        read_weights(model.hf, source, mesh, place)
    else:
        empty_weights(model.hf, place)
    for module in model.modules() if place != device else ():  # only parameters stay in host memory
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if lora is not None:
        model.base = {"name": source, "digest": digest(model.hf, mesh), "dtype": dtype}
        if others := different_from_first(model.base["digest"], mesh):
            raise ValueError(
                f"the frozen weights of rank {', '.join(map(str, others))} are not those of rank 0: the files of {source} differ between "
                "hosts. Give every host the same: a folder on a shared file system, or the same revision in its cache"
            )
        for name, parameter in model.hf.named_parameters():  # reading makes new ones
            parameter.requires_grad_(name.endswith(PARAMETERS))
        draw_adapters(model.hf, seed)
    if cached_file(source, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False) is not None:
        model.hf.generation_config = GenerationConfig.from_pretrained(source)
    if device.type == "cuda" and attention == "auto" and not compile and model.layout_kind(device) == "varlen":
        choose_attention(model, mesh)
    if read:
        check_packed_forward(model, device)
    return model


def choose_attention(model: PolicyModel, mesh: Mesh) -> None:
    """Choose the kernels of attention in packed rows (`rlx.models.flash`), the same on every rank. Every rank calls this."""
    config = model.hf.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    shapes = [(heads, keys, width) for width in head_widths(model.hf)] if isinstance(heads, int) and isinstance(keys, int) else []
    here = install_flash_attention_3(mesh.device, shapes)
    third = not mesh.any(not here)
    if here and not third:
        remove_flash_attention_3()
    model.long_apart = not third and not mesh.any(not cudnn_agrees(mesh.device, shapes))
    apart = f"; of samples of {LONG:,} tokens and more cuDNN" if model.long_apart else ""
    log.info("attention: FlashAttention %d%s", 3 if third else 2, apart)


def check_rotary(source: str, config: Any, context: int | None, served: int | None = None) -> None:
    """Raise ValueError for a model whose rotary frequencies would change with the longest sample of a row, at `context` tokens.

    LongRoPE (2402.13753) and dynamic scaling have other frequencies beyond the length of the first training. transformers chooses them by
    the longest position of a forward pass. vLLM chooses those of LongRoPE once for all requests, by the engine's context (`served`), and
    keeps those of dynamic scaling as they were.
    """
    if context is None:
        return
    for kind, most in _first_trained(config):
        if context > most:
            raise ValueError(
                f"{source} has other rotary frequencies beyond {most} tokens ({kind}), and a row of samples can have only one kind, "
                "so log-probabilities would depend on the packing and differ from those of the servers. "
                f"Set seq_len={most} or less, not {context}"
            )
        if kind == "longrope" and served is not None and served > most:
            raise ValueError(
                f"{source} has other rotary frequencies beyond {most} tokens ({kind}). Servers choose them once for all requests, by their "
                f"context: at {served} tokens (inference.max_model_len) they would take those of long texts, and the trainer takes those "
                f"of short ones (seq_len={context}). Set inference.max_model_len={most} or less, or null, which means seq_len"
            )


@torch.no_grad()
def check_packed_forward(model: PolicyModel, device: torch.device | str = "cpu") -> None:
    """Raise ValueError unless log-probabilities of two packed sequences equal those of the model's own forward, one at a time.

    For a sharded model every rank calls this. `device` is where the model computes. The check catches what no list of architectures could:
    factors on the logits, layers that ignore segment boundaries, masks of their own, windows that are longer than the check's sequences.
    In 16 bits rounding may choose another expert for some tokens, so of a mixture of experts 70 % of each sequence must agree.
    """
    vocabulary = model.hf.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    prompt, one, two = (torch.randint(0, vocabulary, (n,), generator=generator) for n in (5, 4, 3))
    sequences = [torch.cat([prompt, one]), torch.cat([prompt, two])]
    ids = torch.cat(sequences)
    boundaries = [0, *itertools.accumulate(map(len, sequences))]
    trainable = torch.ones(len(ids), dtype=torch.bool)
    trainable[[end - 1 for end in boundaries[1:]]] = False  # nothing follows a sequence's last token
    device, kind = torch.device(device), model.layout_kind(torch.device(device))

    def log_probabilities() -> Tensor:
        layout = build_layout(ids.numpy(), torch.tensor(boundaries).numpy(), trainable.numpy(), kind, device)
        labels = torch.cat([ids[1:], ids[:1]])[trainable].to(device)
        index = torch.from_numpy(layout.token_index)[trainable].to(device)
        logp: Tensor = model(layout, index, labels, torch.ones(len(labels), device=device))[0]
        return logp

    with torch.compiler.set_stance("force_eager"):  # compiling is not worth it for a few tokens
        with watched() as calls:
            packed = log_probabilities()
        model.window = min((call.masked for call in calls if call.masked is not None and call.masked != call.window), default=None)
        _check_window(model, model.context)
        # From here on a sharded model's root keeps its parameters gathered; its layers gather theirs themselves.
        with nullcontext() if model.row is None else model.row.kept_whole():
            own = torch.cat([_own_log_probabilities(model.hf, sequence.to(device)) for sequence in sequences])
    free_gathered(model)
    differences, spread = (packed - own).abs().split([len(sequence) - 1 for sequence in sequences]), float(own.std())
    rounds = model.compute_dtype != torch.float32 and any(name.endswith("experts") for name, _ in model.hf.named_modules())
    difference = max(float(part.quantile(0.7 if rounds else 1.0)) for part in differences)
    limit = TOLERANCE[model.compute_dtype] * spread
    if not difference <= limit:
        raise ValueError(
            f"{type(model.hf).__name__} cannot be trained like this: on {device.type} its packed forward differs from its own by "
            f"{difference:.3g} nats, while log-probabilities spread by {spread:.3g}. Set model.attention=rows; if it is set already, the "
            "model's head is not supported"
        )


def _first_trained(config: Any) -> Iterator[tuple[str, int]]:
    """The kind of rotary frequencies, and the length up to which they are those of the first training, where longer texts have others."""
    found = getattr(config, "rope_parameters", None) or {}
    for rope in [found] if "rope_type" in found else [each for each in found.values() if isinstance(each, dict)]:
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):  # a family with other positions may have no limit
            most = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            yield kind, most or config.max_position_embeddings


def longest_served(source: str, *, trust_remote_code: bool = False) -> int | None:
    """The longest context of a server that has the rotary frequencies of the trainer (`check_rotary`); None: any."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    return min((most for kind, most in _first_trained(config) if kind == "longrope"), default=None)


def check_length(model: PolicyModel, context: int, served: int | None) -> None:
    """Raise ValueError if a loaded model cannot be trained on samples of `context` tokens, or not with servers of the context `served`.

    For a run that joins a shared trainer: the model was checked for the trainer's own `seq_len` when it was loaded.
    """
    check_rotary(model.base["name"], model.hf.config.get_text_config(), context, served)
    _check_window(model, context)


def _check_window(model: PolicyModel, context: int | None) -> None:
    """Raise ValueError if samples may be longer than `model.window`."""
    if model.window is not None and (context is None or context > model.window):
        raise ValueError(
            f"{type(model.hf).__name__} has layers with a window of {model.window} tokens, but does not pass it on to its attention: "
            f"packed samples would attend beyond it. Set seq_len={model.window} or less"
            + ("" if context is None else f", not {context}")
            + "; or model.attention=rows, if the servers apply the window (vLLM does not for Qwen2-MoE)"
        )


def _own_log_probabilities(hf: Any, sequence: Tensor) -> Tensor:
    """[L-1] log-probability of each next token, by the model's own forward with plain attention."""
    implementation = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    logits = hf(input_ids=sequence[None], use_cache=False).logits[0, :-1].float()
    hf.set_attn_implementation(implementation)
    return logits.log_softmax(-1).gather(1, sequence[1:, None])[:, 0]
