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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from rlx.inference.compare import Compare
from rlx.inference.middleware import SECRET
from rlx.process import die_with_parent, peak_memory
from rlx.weights.files import check_folder, identity, read_tensors
from rlx.weights.hub import fetch
from rlx.weights.shapes import Entry, entries

if os.environ.get(SECRET) and os.getppid() > 1:  # in an engine's process, which would outlive a server that is killed
    die_with_parent()


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> dict[str, Any]:
        try:
            return {"rank": self.rank, **method(self, *arguments)}
        except Exception as error:
            if self.rlx_loading:  # the model is partly old and partly new: the server ends, once this answer has left it
                threading.Timer(1.0, os._exit, (1,)).start()
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
    rlx_checked: tuple[str, str, Future[dict[str, Entry]]] = ("", "", Future())  # the latest check: its arguments, and the tensors found
    rlx_threads = ThreadPoolExecutor(4, "check")

    @_answers
    def rlx_state(self) -> dict[str, Any]:
        """Report the served model, the device, and which start of the server this is."""
        cuda = self.device.type == "cuda"
        memory = torch.cuda.get_device_properties(self.device).total_memory if cuda else 0
        device, peak = (torch.cuda.get_device_name(), torch.cuda.max_memory_reserved()) if cuda else ("", peak_memory())
        model = {"model": str(self.rlx_initial[0]), "identity": self.rlx_initial[1], "context": self.model_config.max_model_len}
        return model | {"start": self.rlx_start, "label": self.rlx_label, "device": device, "peak_memory": peak, "memory": memory}

    @_answers
    def rlx_check(self, folder: str, expected: str) -> dict[str, Any]:
        """Check names, shapes, lengths and checksums of a folder in a thread, while the engine goes on. Call it until `ready` is true.

        `expected`: the digest of its manifest, as the client read it; "": the folder has none, because it is an initial model.
        """
        if self.rlx_checked[:2] != (folder, expected):
            tied = self._rlx_untied or getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            check = self.rlx_threads.submit(check_folder, Path(folder), expected, self.rlx_initial[0], tied)
            self.rlx_checked = folder, expected, check
        *_, check = self.rlx_checked
        wait([check], 0.02)
        if check.done() and check.exception():
            self.rlx_checked = Policy.rlx_checked  # another attempt reads the folder anew
        return {"ready": check.done() and bool(check.result())}

    @_answers
    def rlx_load(self, folder: str, label: str) -> dict[str, Any]:
        """Load a folder that every rank has checked. The engine must be paused. After an error midway the process ends."""
        (checked, _, check), began = self.rlx_checked, time.perf_counter()
        if self.rlx_loading or checked != folder or not check.done():
            raise ValueError("an earlier load failed midway" if self.rlx_loading else f"{folder} was not checked before")
        self.rlx_checked = Policy.rlx_checked
        self._rlx_reload(check.result())
        self.rlx_label = label
        if label.startswith("0@"):  # version 0: the model that the run begins with
            self.rlx_initial = Path(folder), identity(Path(folder))
        return {"seconds": time.perf_counter() - began}

    @_answers
    def rlx_compare(self, folder: str) -> dict[str, Any]:
        """Compare what is served with a folder: vLLM's own reload runs, but where it would write, it compares. Changes nothing.

        On a CPU linear layers compute with packed copies of their weights, which are read as their products with the identity.
        """
        began, modules = time.perf_counter(), dict(self.model_runner.get_model().named_modules())
        packed = {name: (layer, layer.cpu_linear) for name, layer in modules.items() if hasattr(layer, "cpu_linear")}
        with Compare(modules[""]) as compare:
            self._rlx_reload(entries(Path(folder)))
        for name, (layer, product) in packed.items():
            compare.add(name, _unpacked(layer, product), _unpacked(layer, layer.cpu_linear))
            layer.cpu_linear = product
        if compare.different:
            self.rlx_label = "other weights than loaded"
        return compare.report() | {"seconds": time.perf_counter() - began}

    @functools.cached_property
    def rlx_initial(self) -> tuple[Path, str]:
        """The folder and the identity of the model that the server started with, or of a run's version 0."""
        return (folder := fetch(self.model_config.model, None)), identity(folder)

    @functools.cached_property
    def _rlx_untied(self) -> bool:
        """Whether vLLM gave a tied model a head of its own, because the files of the initial model store it twice."""
        return bool(getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False))

    def _rlx_reload(self, found: dict[str, Entry]) -> None:
        """Run vLLM's reload, and mend the packed copies that it leaves as they were on a CPU: those of experts and of tied heads."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        modules = self.model_runner.get_model().modules() if self.device.type == "cpu" else ()
        layers = [layer for layer in modules if hasattr(layer, "quant_method")]
        for layer in (each for each in layers if getattr(each.quant_method, "moe_kernel", None) is not None):
            layer.quant_method.moe_kernel = None
        self.rlx_loading = True
        self.reload_weights(weights_iterator=read_tensors(found, self.rlx_initial[0] if self._rlx_untied else None))
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            for layer in layers:
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
        self.rlx_loading = False


def _unpacked(layer: Any, product: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The weight of a packed layer [outputs, inputs]: its product with the identity, which is exact."""
    size = next(getattr(layer, name) for name in ("input_size_per_partition", "input_size", "embedding_dim") if hasattr(layer, name))
    return product(torch.eye(size, dtype=next(layer.parameters()).dtype), layer.weight, None).t()
