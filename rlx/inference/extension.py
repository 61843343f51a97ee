"""The code of rlx that runs inside vLLM: a worker extension that checks a version of the weights, loads it, and compares what is served.

    vllm serve … --worker-extension-cls rlx.inference.extension.Policy
    POST /collective_rpc {"method": "rlx_load", "args": ["/run/weights/step_7", "7@1a2b3c4d"]}      one record for each rank

vLLM's own `reload_weights` does the loading, so rlx has no mapping of names. A method never raises: with tensor parallelism vLLM reads the
first rank's error and leaves the other answers in their queues, so that every later call gets the answers of an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.inference.middleware import SECRET
from rlx.paths import COMPLETE
from rlx.process import die_with_parent, peak_memory
from rlx.weights.files import identity
from rlx.weights.hub import fetch
from rlx.weights.shapes import ADAPTER_CONFIG, TIED_HEAD, Entry, check_layers, check_shapes, digest, digest_of, entries, manifest

LAST_WORDS = 1.0  # seconds in which the answer of a load that failed midway leaves the server, before it ends
UNFIT = 13  # exit code of a worker whose model is partly loaded
START = uuid.uuid4().hex  # of this process, so that a client notices a restart

if os.environ.get(SECRET) and os.getppid() > 1:  # in an engine's process, which would outlive a server that is killed
    die_with_parent()


class Compare(TorchDispatchMode):
    """While it is active, a write into a served parameter compares what would be written with what is there, and writes nothing."""

    def __init__(self, served: Mapping[int, str]) -> None:
        """`served`: the name of each served parameter by the address of its storage."""
        super().__init__()
        self.served = served
        self.equal, self.different = 0, dict[str, int]()

    def add(self, name: str, served: torch.Tensor, trained: torch.Tensor) -> None:
        """Compare two tensors of one shape."""
        wrong = served.numel() if served.shape != trained.shape else int((served != trained.to(served.dtype)).sum())
        self.equal += served.numel() - wrong
        if wrong:
            self.different[name] = self.different.get(name, 0) + wrong

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self.served.get(args[0].untyped_storage().data_ptr())):
            self.add(name, args[0], args[1].to(args[0].device))
            return args[0]
        return func(*args, **(kwargs or {}))


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> dict[str, Any]:
        try:
            return {"rank": self.rank, **method(self, *arguments)}
        except Exception as error:
            broken = self.rlx.loading
            if broken:  # the model is partly old and partly new: the server ends rather than serve it
                threading.Timer(LAST_WORDS, os._exit, (UNFIT,)).start()
            return {"rank": self.rank, "error": f"{type(error).__name__}: {error}"[:2000], "broken": broken}

    return call


class _State:
    """What the extension knows of its worker: one per process."""

    label: str | None = None  # of the version that was loaded last; None: the model is still the one that the server started with
    identity = ""  # of the initial model
    loading = False  # a load has begun and not ended
    checked: tuple[str, Any] | None = None  # the folder of the latest check, and its result: Entries, an error, or None while it runs


class Policy:
    """Methods for `POST /collective_rpc`. vLLM mixes this class into its worker class."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]
    rlx = _State()

    @_answers
    def rlx_state(self) -> dict[str, Any]:
        """Report the served model, the device, and which start of the server this is."""
        cuda = self.device.type == "cuda"
        folder = self._rlx_initial()
        return {
            "start": START,
            "label": self.rlx.label,
            "model": str(folder),
            "identity": self._rlx_identity(),
            "context": self.model_config.max_model_len,
            "lora": self.vllm_config.lora_config is not None,
            "device": torch.cuda.get_device_name() if cuda else "",
            "peak_memory": torch.cuda.max_memory_reserved() if cuda else peak_memory(),
            "memory": torch.cuda.get_device_properties(self.device).total_memory if cuda else 0,
        }

    @_answers
    def rlx_check(self, folder: str, expected: str) -> dict[str, Any]:
        """Check names, shapes, lengths and checksums of a folder in a thread, while the engine goes on. Call it until `ready` is true.

        `expected`: the digest of its manifest, as the client read it; "": the folder has none (an initial model).
        """
        if self.rlx.checked is None or self.rlx.checked[0] != folder + expected:
            self.rlx.checked = (folder + expected, None)
            threading.Thread(target=self._rlx_check, args=(Path(folder), expected), daemon=True).start()
        for _ in range(10):
            if self.rlx.checked[1] is not None:
                break
            time.sleep(0.001)
        result = self.rlx.checked[1]
        if isinstance(result, Exception):
            self.rlx.checked = None  # another attempt reads it anew
            raise result
        return {"ready": result is not None}

    @_answers
    def rlx_load(self, folder: str, label: str) -> dict[str, Any]:
        """Load a folder that every rank has checked. The engine must be paused. After an error midway the process ends."""
        began = time.perf_counter()
        if self.rlx.checked is None or not self.rlx.checked[0].startswith(folder) or not isinstance(self.rlx.checked[1], dict):
            raise ValueError(f"{folder} was not checked before")
        self._rlx_reload(self.rlx.checked[1])
        self.rlx.label = label
        return {"seconds": time.perf_counter() - began}

    @_answers
    def rlx_compare(self, folder: str) -> dict[str, Any]:
        """Compare what is served with a folder: vLLM's own reload runs, but where it would write, it compares. Changes nothing.

        On a CPU, linear layers compute with packed copies of their weights: these are read as their product with the identity.
        """
        began, model = time.perf_counter(), self.model_runner.get_model()
        compare = Compare({weight.untyped_storage().data_ptr(): name for name, weight in model.named_parameters() if weight.numel()})
        packed = [(name, layer, layer.cpu_linear) for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")]
        with compare:
            self._rlx_reload(entries(Path(folder)))
        for name, layer, product in packed:
            compare.add(name, _unpacked(layer, product), _unpacked(layer, layer.cpu_linear))
            layer.cpu_linear = product
        names = sorted(compare.different, key=lambda name: -compare.different[name])
        served = sum(weight.numel() for weight in model.parameters()) + sum(_size(layer) for _, layer, _ in packed)
        wrong = sum(compare.different.values())
        result = {"equal": compare.equal, "different": wrong, "served": max(served, compare.equal + wrong), "names": names[:5]}
        return result | {"seconds": time.perf_counter() - began}

    def _rlx_check(self, folder: Path, expected: str) -> None:
        key = str(folder) + expected
        try:
            found = entries(folder)
            if expected and digest_of(folder / COMPLETE) != expected:
                raise ValueError(f"{folder / COMPLETE} is not the manifest that the client read")
            known = manifest(folder) if expected else {"tensors": {}}
            untied = getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False)
            tied = untied or getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            initial = {name: entry.shape for name, entry in entries(self._rlx_initial()).items()}
            shapes = {name: entry.shape for name, entry in found.items()}
            if (folder / ADAPTER_CONFIG).is_file():
                if known["base"]["identity"] != self._rlx_identity():
                    raise ValueError(f"{folder} holds adapters of another model ({known['base']['name']}) than {self.model_config.model}")
                check_layers(str(folder), shapes, initial, json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
            else:
                check_shapes(str(folder), shapes, initial, tied, known.get("untrained", ()))
            sums = known["tensors"]
            if wrong := [name for name, entry in found.items() if name in sums and digest(entry) != sums[name]["xxh3"]]:
                raise ValueError(f"{len(wrong)} tensors of {folder} are not what the trainer wrote, for example {wrong[0]}")
            result: Any = found
        except Exception as error:
            result = error
        if self.rlx.checked is not None and self.rlx.checked[0] == key:
            self.rlx.checked = (key, result)

    def _rlx_initial(self) -> Path:
        """The folder of the model that the server started with."""
        return fetch(self.model_config.model, None)

    def _rlx_identity(self) -> str:
        if not self.rlx.identity:
            self.rlx.identity = identity(self._rlx_initial())
        return self.rlx.identity

    def _rlx_tensors(self, found: dict[str, Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted({entry.path for entry in found.values()}):
            with safe_open(path, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118  (not a dict)
        if TIED_HEAD not in found and getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False):
            # vLLM untied the head because the initial model stores it twice; the trainer publishes it once.
            initial = entries(self._rlx_initial())
            (twin, *_) = [name for name, entry in initial.items() if name != TIED_HEAD and digest(entry) == digest(initial[TIED_HEAD])]
            with safe_open(found[twin].path, "pt") as file:
                yield TIED_HEAD, file.get_tensor(twin)

    def _rlx_reload(self, found: dict[str, Entry]) -> None:
        """Run vLLM's reload, and mend the two packed copies that it leaves as they were on a CPU: those of experts and of tied heads."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        layers = [layer for layer in model.modules() if self.device.type == "cpu" and hasattr(layer, "quant_method")]
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.rlx.loading:  # layers that already have some of their tensors would count them twice
                finalize_layerwise_reload(model, self.model_config)
            for layer in layers:
                with contextlib.suppress(AttributeError):
                    layer.quant_method.moe_kernel = layer.quant_method.moe_kernel and None
            self.rlx.loading = True
            self.reload_weights(weights_iterator=self._rlx_tensors(found))
            for layer in layers:
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
            self.rlx.loading = False


def _size(layer: Any) -> int:
    """Numbers in a packed layer's weight."""
    return int(layer.weight.numel()) if layer.weight.numel() else int(layer.output_size_per_partition * _inputs(layer))


def _inputs(layer: Any) -> int:
    return int(next(getattr(layer, name) for name in ("input_size_per_partition", "input_size", "embedding_dim") if hasattr(layer, name)))


def _unpacked(layer: Any, product: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The weight of a packed layer [outputs, inputs]: its product with the identity, which is exact."""
    dtype = next(layer.parameters()).dtype
    return product(torch.eye(_inputs(layer), dtype=dtype), layer.weight, None).t()
