"""Everything that rlx uses of vLLM is in the source of the installed vLLM: routes, fields, options, variables, metrics, names in Python.

vLLM is not imported. `make test-engines` runs this with each version of the range: `PYTHONPATH` names the unpacked wheel of another one.
Uses are read from rlx's own code; others are in two tables.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from test_config_engine import options_of

from rlx.config.load import compose
from rlx.inference import arguments, wire

ROOT = Path(__file__).resolve().parent.parent
TOKENS = "entrypoints/scale_out/token_in_token_out/protocol.py"
CONFIGS = (
    ["hardware=cpu", "lora.rank=8"],
    ["hardware=gpu2", "weight_broadcast.type=nccl", "model.dtype=bfloat16"],
    ["hardware=gpu1_shared", "weight_broadcast.type=ipc"],
)


class Use(NamedTuple):
    """Something that rlx uses of vLLM."""

    kind: str  # "route", "option", "variable", "metric", "name" (FILE:NAME or FILE:CLASS.ATTRIBUTE or FILE:FUNCTION(PARAMETER)) or "text"
    name: str
    why: str


# What no code of rlx lists. FILE:NAME, FILE:CLASS.ATTRIBUTE or FILE:FUNCTION(PARAMETER), and what rlx does with it.
NAMES = """
entrypoints/rl/online/api_router.py:pause_generation(mode)                        keeps requests in flight during an update
entrypoints/rl/online/api_router.py:update_weight_version(new_version)            labels a server's weights
entrypoints/rl/online/api_router.py:init_weight_transfer_engine(init_info)        forms the group of a transfer
entrypoints/rl/online/api_router.py:update_weights(update_info)                   announces the tensors of a transfer
entrypoints/serve/engine/protocol.py:ModelList.data                               knows the served model and the adapters
entrypoints/serve/engine/protocol.py:ModelCard.id                                 knows the served model and the adapters
entrypoints/serve/engine/protocol.py:ModelCard.root                               knows the served model
entrypoints/serve/engine/protocol.py:ModelCard.max_model_len                      knows the context
entrypoints/serve/lora/protocol.py:LoadLoRAAdapterRequest.lora_name               loads an adapter
entrypoints/serve/lora/protocol.py:LoadLoRAAdapterRequest.lora_path               loads an adapter
entrypoints/serve/lora/protocol.py:UnloadLoRAAdapterRequest.lora_name             unloads an adapter
config/weight_transfer.py:WeightTransferConfig.backend                            chooses how weights are sent
config/model.py:ModelConfig.model                                                 finds the files of the initial model
config/model.py:ModelConfig.max_model_len                                         reports the context
config/model.py:ModelConfig.hf_text_config                                        knows whether the head is tied
config/model.py:ModelConfig.word_embeddings_untied_by_checkpoint                  knows whether the head is tied
v1/worker/worker_base.py:WorkerBase.rank                                          reports which worker failed
v1/worker/worker_base.py:WorkerBase.device                                        reports memory
v1/worker/worker_base.py:WorkerBase.vllm_config                                   mends packed layers after a reload
v1/worker/worker_base.py:WorkerBase.model_config                                  knows the initial model
v1/worker/worker_base.py:WorkerBase.model_runner                                  compares what is served
v1/worker/gpu_worker.py:Worker.reload_weights                                     loads a version
v1/worker/gpu_model_runner.py:GPUModelRunner.reload_weights(weights_iterator)     loads a version
v1/worker/gpu_model_runner.py:GPUModelRunner.get_model                            compares what is served
v1/worker/gpu/model_runner.py:GPUModelRunner.reload_weights(weights_iterator)     loads a version
v1/worker/gpu/model_runner.py:GPUModelRunner.get_model                            compares what is served
model_executor/layers/vocab_parallel_embedding.py:UnquantizedEmbeddingMethod.process_weights_after_loading   packs a tied head again
distributed/weight_transfer/base.py:ParamMeta.name                                describes a tensor
distributed/weight_transfer/base.py:ParamMeta.dtype                               describes a tensor
distributed/weight_transfer/base.py:ParamMeta.shape                               describes a tensor
distributed/weight_transfer/base.py:WeightSource.metadata                         describes the tensors
distributed/weight_transfer/base.py:TrainerInitInfo.rank                          names the sender
distributed/weight_transfer/base.py:TrainerWeightTransferEngine.send_weights      sends a version
distributed/weight_transfer/base.py:TrainerWeightTransferEngine.shutdown          leaves a group that broke
distributed/weight_transfer/base.py:VLLMWeightSyncClient.init_weight_transfer_engine(init_info)   speaks to the servers
distributed/weight_transfer/base.py:VLLMWeightSyncClient.start_weight_update      speaks to the servers
distributed/weight_transfer/base.py:VLLMWeightSyncClient.update_weights(update_info)              speaks to the servers
distributed/weight_transfer/base.py:VLLMWeightSyncClient.finish_weight_update     speaks to the servers
distributed/weight_transfer/factory.py:WeightTransferTrainerFactory.trainer_init(client)          speaks to the servers
distributed/weight_transfer/factory.py:WeightTransferTrainerFactory.trainer_init(source)          sends the trainer's tensors
distributed/weight_transfer/nccl_common.py:NCCLWeightTransferInitInfo.rank_offset                 numbers the workers of all servers
distributed/weight_transfer/nccl_engine.py:NCCLTrainerInitInfo.master_address     forms the group of a transfer
distributed/weight_transfer/nccl_engine.py:NCCLTrainerInitInfo.master_port        forms the group of a transfer
distributed/weight_transfer/nccl_engine.py:NCCLTrainerInitInfo.world_size         forms the group of a transfer
distributed/weight_transfer/ipc_engine.py:IPCTrainerInitInfo.packed               bounds the memory of a transfer
distributed/weight_transfer/ipc_engine.py:IPCTrainerInitInfo.packed_buffer_size_bytes             makes room for the largest tensor
distributed/weight_transfer/ipc_engine.py:IPCWeightTransferUpdateInfo.ipc_handles                 sends handles of GPU memory
distributed/weight_transfer/ipc_engine.py:IPCWeightTransferUpdateInfo.ipc_handles_pickled         sends handles of GPU memory
"""
TEXTS = """
v1/engine/__init__.py:PauseMode = Literal["abort", "wait", "keep"]                keeps requests in flight during an update
entrypoints/rl/online/api_router.py:content={"weight_version": weight_version}    reads a server's label
entrypoints/rl/online/api_router.py:content={"is_paused": paused}                 resumes a server that was left paused
entrypoints/rl/online/api_router.py:content={"world_size": world_size}            counts the members of a transfer's group
entrypoints/serve/dev/rpc/api_router.py:body.get("method")                        calls the worker extension
entrypoints/serve/dev/rpc/api_router.py:body.get("args", [])                      calls the worker extension
entrypoints/serve/dev/rpc/api_router.py:content={"results": response}             calls the worker extension
entrypoints/launchers/api_server/entry.py:if __name__ == "__main__":              starts a server
entrypoints/serve/middleware/register.py:for middleware in args.middleware:        asks for the run's secret on every route
entrypoints/launchers/api_server/routers.py:if envs.VLLM_SERVER_DEV_MODE:         has the routes that change weights
config/model.py:"processed_logprobs"                                              gets log-probabilities at the sampling temperature
v1/worker/worker_base.py:parallel_config.worker_extension_cls                     mixes its extension into the worker
model_executor/model_loader/reload/layerwise.py:.copy_(                           compares what a reload would write
model_executor/layers/utils.py:layer.cpu_linear =                                 compares packed layers
model_executor/layers/linear.py:self.input_size_per_partition =                   compares packed layers
model_executor/layers/vocab_parallel_embedding.py:self.embedding_dim =            compares packed layers
model_executor/layers/fused_moe/unquantized_fused_moe_method.py:is_weight_update = self.moe_kernel is not None   packs experts again
distributed/weight_transfer/factory.py:    "nccl",                                sends weights between GPUs
distributed/weight_transfer/factory.py:    "ipc",                                 sends weights on one GPU
"""


def by_hand(kind: str, table: str) -> list[Use]:
    return [Use(kind, *re.split(r"(?<=\S) {3,}", line, maxsplit=1)) for line in table.strip().splitlines()]


def uses() -> Iterator[Use]:
    """Everything that rlx uses of vLLM."""
    yield from (
        Use("route", value.partition("?")[0], name) for name, value in vars(wire).items() if name.isupper() and str(value)[:1] == "/"
    )
    for node in ast.walk(ast.parse((ROOT / "rlx/weights/transfer.py").read_text())):
        told = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("_tell", "_ask")
        if told and isinstance(node.args[0], ast.Constant):
            yield Use("route", f"/{node.args[0].value}", "sends a version from memory")
    body = wire.generate_body(np.array([1], "<i4"), wire.Sampling(max_tokens=1, seed=1), "id", "adapter")
    request = msgspec.json.decode(body)
    yield from (Use("name", f"{TOKENS}:GenerateRequest.{name}", "is a field of a request") for name in request)
    parameters = request["sampling_params"].keys() | set(wire.Sampling.__struct_fields__)
    yield from (Use("name", f"sampling_params.py:SamplingParams.{name}", "is a sampling parameter") for name in sorted(parameters))
    for record, place in [
        (wire._Answer, f"{TOKENS}:GenerateTokensResponse"),
        (wire._Choice, f"{TOKENS}:GenerateTokensChoice"),
        (wire._Logprobs, f"{TOKENS}:GenerateLogProbs"),
        (wire._Logprob, f"{TOKENS}:GenerateLogProbsContent"),
        (wire._Span, "outputs.py:WeightVersionSpan"),
    ]:
        yield from (Use("name", f"{place}.{name}", "is read in an answer") for name in record.__struct_fields__)
    yield from (Use("metric", name, "is a metric of the run") for name in wire.COUNTED)
    for overrides in CONFIGS:
        config = compose([*overrides, "dry_run=true"], {}).cfg
        names = ["host", "port", "lora_target_modules", *arguments.options(config, "model", 0)]
        yield from (Use("option", name, "is an option of every server") for name in names)
        yield from (Use("variable", name, "is set for servers") for name in arguments.environment(config, {}) if name.startswith("VLLM_"))
    for path in (ROOT / "rlx/inference/extension.py", ROOT / "rlx/weights/transfer.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                module = (node.module or "").partition(".")[2].replace(".", "/")
                yield from (Use("name", f"{module}:{each.name}", f"is imported by {path.name}") for each in node.names)
    yield from (*by_hand("name", NAMES), *by_hand("text", TEXTS))


class Source:
    """The source of one version of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def text(self, file: str) -> str:
        """The text of a file, or of a package's `__init__.py`; empty if there is none."""
        paths = [self.folder / file, self.folder / f"{file}.py", self.folder / file / "__init__.py"]
        return next((path.read_text() for path in paths if path.is_file()), "")

    def has(self, use: Use) -> bool:
        """Whether something is in the source."""
        file, _, rest = use.name.partition(":")
        match use.kind:
            case "route":
                return any(re.search(rf'(router\.\w+|add_api_route|Mount)\(\s*"{use.name}"', text) for text in self._routers)
            case "option":
                return use.name in self._options
            case "variable":
                return f'"{use.name}": ' in self.text("envs.py")
            case "metric":
                plain = use.name.removesuffix("_total")  # Prometheus appends it to the name of a counter
                return f'name="vllm:{plain}"' in self.text("v1/metrics/loggers.py")
            case "text":
                return rest in self.text(file)
            case _:
                return defines(ast.parse(self.text(file)), rest)

    @functools.cached_property
    def _routers(self) -> list[str]:
        return [path.read_text() for path in (self.folder / "entrypoints").rglob("*.py")]

    @functools.cached_property
    def _options(self) -> dict[str, bool]:
        return options_of(self.folder)


def defines(tree: ast.Module, name: str) -> bool:
    """Whether a module defines or imports `NAME`, `CLASS.ATTRIBUTE`, `FUNCTION(PARAMETER)` or `CLASS.METHOD(PARAMETER)`."""
    path, _, parameter = name.removesuffix(")").partition("(")
    found: list[ast.AST] = [tree]
    for part in path.split("."):
        found = [each for node in found for each in _named(tree, node, part)]
    return bool(found) and (
        not parameter or parameter in {each.arg for node in found for each in ast.walk(node) if isinstance(each, ast.arg)}
    )


def _named(tree: ast.Module, parent: ast.AST, name: str) -> Iterator[ast.AST]:
    """What a module, or a class with its bases in the same module, has under a name."""
    for node in ast.walk(parent) if isinstance(parent, ast.ClassDef) else ast.iter_child_nodes(parent):
        if isinstance(node, ast.ImportFrom):
            yield from (each for each in node.names if (each.asname or each.name) == name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from [node] if node.name == name else []
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (node for each in targets if ast.unparse(each) in (name, f"self.{name}"))
    for base in parent.bases if isinstance(parent, ast.ClassDef) else ():
        yield from (
            each for node in _named(tree, tree, ast.unparse(base)) if isinstance(node, ast.ClassDef) for each in _named(tree, node, name)
        )


@functools.cache
def installed() -> Source:
    spec = importlib.util.find_spec("vllm")
    return Source(Path(spec.origin).parent)


def test_everything_that_rlx_uses_of_vllm_is_there() -> None:
    found = dict.fromkeys(uses())
    assert len(found) > 100
    missing = [f"{use.kind} {use.name}: {use.why}" for use in found if not installed().has(use)]
    assert missing == [], f"{installed().folder} has it no longer: change rlx, or the range of versions in pyproject.toml"


@pytest.mark.parametrize(
    "use",
    [
        Use("route", "/pause_all", ""),
        Use("option", "enable_scale_inwards", ""),
        Use("variable", "VLLM_DEVELOPER_MODE", ""),
        Use("metric", "num_requests_sleeping", ""),
        Use("text", "v1/worker/worker_base.py:worker_mixin_cls", ""),
        Use("text", "v1/worker/no_such_file.py:class", ""),
        Use("name", "outputs.py:WeightVersionSpan.middle", ""),
        Use("name", "sampling_params.py:SamplingParameters.seed", ""),
        Use("name", "no/such/module:Name", ""),
        Use("name", "entrypoints/rl/online/api_router.py:pause_generation(manner)", ""),
        Use("name", "distributed/weight_transfer:WeightSink", ""),
    ],
    ids=lambda use: use.name,
)
def test_what_vllm_does_not_have_is_found(use: Use) -> None:
    assert not installed().has(use)


def test_every_name_that_is_listed_by_hand_is_still_used() -> None:
    code = "".join(path.read_text() for room in ("inference", "weights", "config") for path in (ROOT / "rlx" / room).glob("*.py"))
    names = [re.findall(r"\w+", use.name)[-1] for use in by_hand("name", NAMES)]
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
