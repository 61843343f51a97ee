"""The code of rlx inside vLLM: a worker extension that checks a version of the weights, loads it, and compares what is served with it.

    vllm serve … --worker-extension-cls rlx.inference.extension.Policy
    POST /collective_rpc {"method": "rlx_load", "args": ["/run/weights/step_7", "7@1a2b3c4d"]}      one record for each rank

vLLM's own `reload_weights` loads, so rlx has no mapping of names. A method never raises: with tensor parallelism vLLM reads the first
rank's error and leaves the other answers in their queues, so that every later call gets the answers of an earlier one.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.inference.middleware import SECRET
from rlx.process import die_with_parent, peak_memory
from rlx.weights.check import check_folder
from rlx.weights.files import identity
from rlx.weights.hub import fetch
from rlx.weights.shapes import TIED_HEAD, Entry, digest, entries

LAST_WORDS = 1.0  # seconds in which the answer of a load that failed midway leaves the server, before it ends

if os.environ.get(SECRET) and os.getppid() > 1:  # in an engine's process, which would outlive a server that is killed
    die_with_parent()


class Compare(TorchDispatchMode):
    """While it is active, a write into a served parameter compares what would be written with what is there, and writes nothing."""

    def __init__(self, served: dict[int, str]) -> None:
        """`served`: the name of each served parameter by the address of its storage."""
        super().__init__()
        self.served, self.equal, self.different = served, 0, dict[str, int]()

    def add(self, name: str, served: torch.Tensor, trained: torch.Tensor) -> None:
        wrong = served.numel() if served.shape != trained.shape else int((served != trained.to(served)).sum())
        self.equal += served.numel() - wrong
        self.different[name] = self.different.get(name, 0) + wrong

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self.served.get(args[0].untyped_storage().data_ptr())):
            self.add(name, args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> dict[str, Any]:
        try:
            return {"rank": self.rank, **method(self, *arguments)}
        except Exception as error:
            if self.rlx_loading:  # the model is partly old and partly new: the server ends rather than serve it
                threading.Timer(LAST_WORDS, os._exit, (1,)).start()
            return {"rank": self.rank, "error": f"{type(error).__name__}: {error}"[:2000], "broken": self.rlx_loading}

    return call


class Policy:
    """Methods for `POST /collective_rpc`, which vLLM mixes into its worker class, and what they know of their worker."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    model_runner: Any
    reload_weights: Callable[..., None]
    rlx_start = uuid.uuid4().hex  # of this process, so that clients notice a restart
    rlx_label: str | None = None  # of the version that was loaded last; None: the model is the one that the server started with
    rlx_loading = False  # a load has begun and not ended
    rlx_checked: tuple[str, Any] = ("", None)  # the folder of the latest check, and its result: its tensors, an error, or None meanwhile

    @_answers
    def rlx_state(self) -> dict[str, Any]:
        """Report the served model, the device, and which start of the server this is."""
        cuda = self.device.type == "cuda"
        memory = torch.cuda.get_device_properties(self.device).total_memory if cuda else 0
        device, peak = (torch.cuda.get_device_name(), torch.cuda.max_memory_reserved()) if cuda else ("", peak_memory())
        model = {"model": str(self.rlx_initial), "identity": self.rlx_identity, "context": self.model_config.max_model_len}
        return model | {"start": self.rlx_start, "label": self.rlx_label, "device": device, "peak_memory": peak, "memory": memory}

    @_answers
    def rlx_check(self, folder: str, expected: str) -> dict[str, Any]:
        """Check names, shapes, lengths and checksums of a folder in a thread, while the engine goes on. Call it until `ready` is true.

        `expected`: the digest of its manifest, as the client read it; "": the folder has none, because it is an initial model.
        """
        if self.rlx_checked[0] != folder + expected:
            self.rlx_checked = (folder + expected, None)
            (thread := threading.Thread(target=self._rlx_check, args=(Path(folder), expected), daemon=True)).start()
            thread.join(0.02)
        result = self.rlx_checked[1]
        if isinstance(result, Exception):
            self.rlx_checked = ("", None)  # another attempt reads it anew
            raise result
        return {"ready": result is not None}

    @_answers
    def rlx_load(self, folder: str, label: str) -> dict[str, Any]:
        """Load a folder that every rank has checked. The engine must be paused. After an error midway the process ends."""
        checked, found = self.rlx_checked
        if not checked.startswith(folder) or not isinstance(found, dict):
            raise ValueError(f"{folder} was not checked before")
        began, self.rlx_checked = time.perf_counter(), ("", None)
        self._rlx_reload(found)
        self.rlx_label = label
        if label.startswith("0@"):  # version 0: the model that the run begins with
            self.rlx_initial, self.rlx_identity = Path(folder), identity(Path(folder))
        return {"seconds": time.perf_counter() - began}

    @_answers
    def rlx_compare(self, folder: str) -> dict[str, Any]:
        """Compare what is served with a folder: vLLM's own reload runs, but where it would write, it compares. Changes nothing.

        On a CPU linear layers compute with packed copies of their weights, which are read as their products with the identity.
        """
        began, model = time.perf_counter(), self.model_runner.get_model()
        compare = Compare({weight.untyped_storage().data_ptr(): name for name, weight in model.named_parameters() if weight.numel()})
        packed = {name: (layer, layer.cpu_linear) for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")}
        served = sum(weight.numel() for weight in model.parameters())
        with compare:
            self._rlx_reload(entries(Path(folder)))
        for name, (layer, product) in packed.items():
            compare.add(name, mine := _unpacked(layer, product), _unpacked(layer, layer.cpu_linear))
            served, layer.cpu_linear = served + mine.numel(), product
        if wrong := {name: count for name, count in compare.different.items() if count}:
            self.rlx_label = "other weights than loaded"
        found = {"equal": compare.equal, "different": sum(wrong.values()), "served": served, "names": list(wrong)[:5]}
        return found | {"seconds": time.perf_counter() - began}

    @functools.cached_property
    def rlx_initial(self) -> Path:
        """The folder of the model that the server started with."""
        return fetch(self.model_config.model, None)

    @functools.cached_property
    def rlx_identity(self) -> str:
        return identity(self.rlx_initial)

    def _rlx_check(self, folder: Path, expected: str) -> None:
        try:
            tied = self._rlx_untied() or getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            result: Any = check_folder(folder, expected, self.rlx_initial, tied)
        except Exception as error:
            result = error
        if self.rlx_checked[0] == str(folder) + expected:
            self.rlx_checked = (self.rlx_checked[0], result)

    def _rlx_untied(self) -> bool:
        """Whether vLLM gave a tied model a head of its own, because the files of the initial model store it twice."""
        return bool(getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False))

    def _rlx_tensors(self, found: dict[str, Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        twin, initial = "", entries(self.rlx_initial) if self._rlx_untied() and TIED_HEAD not in found else {}
        if initial:  # the trainer publishes a tied head once
            twin = next(name for name in found if name in initial and digest(initial[name]) == digest(initial[TIED_HEAD]))
        for path in dict.fromkeys(entry.path for entry in found.values()):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    yield name, file.get_tensor(name)
                    if name == twin:
                        yield TIED_HEAD, file.get_tensor(name)

    def _rlx_reload(self, found: dict[str, Entry]) -> None:
        """Run vLLM's reload, and mend the two packed copies that it leaves as they were on a CPU: those of experts and of tied heads."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        layers = [layer for layer in self.model_runner.get_model().modules() if hasattr(layer, "quant_method")]
        layers = layers if self.device.type == "cpu" else []
        for layer in layers:
            if getattr(layer.quant_method, "moe_kernel", None) is not None:
                layer.quant_method.moe_kernel = None
        self.rlx_loading = True
        self.reload_weights(weights_iterator=self._rlx_tensors(found))
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            for layer in layers:
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
        self.rlx_loading = False


def _unpacked(layer: Any, product: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The weight of a packed layer [outputs, inputs]: its product with the identity, which is exact."""
    size = next(getattr(layer, name) for name in ("input_size_per_partition", "input_size", "embedding_dim") if hasattr(layer, name))
    return product(torch.eye(size, dtype=next(layer.parameters()).dtype), layer.weight, None).t()
