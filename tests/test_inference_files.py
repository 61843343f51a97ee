"""The parts of `rlx.inference` that need only files and the configuration: checks of weights, addresses, engine arguments."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import save_file

from rlx.config.schema import Config, HardwareConfig, InferenceConfig, ModelConfig
from rlx.inference.endpoints import bind, endpoint_file, publish_endpoint, read_endpoints
from rlx.inference.server.arguments import engine_arguments, environment, runs_in_process
from rlx.inference.server.policy_files import check_policy, tensor_shapes, tensors, twin_of_head, with_head
from rlx.paths import RunPaths
from rlx.waiting import WaitTimeout
from rlx.weights.saving import save

MODEL = {"embed.weight": (7, 4), "norm.weight": (4,)}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], version: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    files = {
        path.name: {"size": path.stat().st_size, "xxh3": xxhash.xxh3_64_hexdigest(path.read_bytes())}
        for path in folder.glob("*.safetensors")
    }
    (folder / "COMPLETE").write_text(json.dumps({"version": version, "files": files}))
    return folder


def test_shapes_come_from_all_files_of_a_folder(tmp_path: Path):
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(5, np.float16)}, tmp_path / "model-2.safetensors")
    assert tensor_shapes(tmp_path) == {"a": (2, 3), "b": (5,)}
    save_file({"b": np.zeros(5, np.float16)}, tmp_path / "model-3.safetensors")
    with pytest.raises(ValueError, match="holds b twice"):
        tensor_shapes(tmp_path)


def test_the_same_weights_under_other_names_beside_the_model_are_not_part_of_it(tmp_path: Path):
    def put(name: str, *tensors: str) -> None:
        save_file({tensor: np.zeros(3, np.float32) for tensor in tensors}, tmp_path / name)

    put("consolidated.safetensors", "layers.0.wq", "a", "b")
    with pytest.raises(ValueError, match=r"holds no model\*\.safetensors .*consolidated\.safetensors"):
        tensor_shapes(tmp_path)
    put("model-00001-of-00002.safetensors", "a")
    put("model-00002-of-00002.safetensors", "b")
    put("model-of-somebody.safetensors", "c")
    index = tmp_path / "model.safetensors.index.json"
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert tensor_shapes(tmp_path).keys() == {"a", "b"}
    assert [name for name, _ in tensors(tmp_path)] == ["a", "b"], "the engine loads these tensors"
    index.unlink()
    assert tensor_shapes(tmp_path).keys() == {"a", "b", "c"}
    index.write_text(json.dumps({"weight_map": files | {"d": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"missing files: gone\.safetensors"):
        tensor_shapes(tmp_path)
    index.write_text('{"weight_map": []}')
    with pytest.raises(ValueError, match="not an index of weights"):
        tensor_shapes(tmp_path)
    put("model.safetensors", "e")
    assert tensor_shapes(tmp_path).keys() == {"e"}


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 8 + b"{}", b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7 + b"{nope"])
def test_what_is_no_safetensors_file_is_said_so(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        tensor_shapes(tmp_path)


def test_a_file_shorter_or_longer_than_its_header_says_is_refused(tmp_path: Path):
    write(tmp_path, MODEL)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-1], whole + b"\0"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="its header says"):
            tensor_shapes(tmp_path)


def test_a_folder_of_the_same_model_is_accepted_with_or_without_a_tied_head(tmp_path: Path):
    head = {"lm_head.weight": (7, 4)}
    check_policy(write(tmp_path, MODEL), 1, MODEL, tied=False)
    check_policy(tmp_path, 1, MODEL | head, tied=True)
    check_policy(write(tmp_path, MODEL | head), 1, MODEL, tied=True)
    with pytest.raises(ValueError, match=r"unknown: lm_head\.weight"):
        check_policy(tmp_path, 1, MODEL, tied=False)


def test_a_head_that_is_stored_a_second_time_has_a_twin_and_one_of_its_own_has_none(tmp_path: Path):
    embedding = np.arange(28, dtype=np.float32).reshape(7, 4)
    other = {"up.weight": -embedding, "norm.weight": np.ones(4, np.float32)}

    def stored(head: np.ndarray | None) -> str | None:
        save_file({"model.embed_tokens.weight": embedding, **other}, tmp_path / "model-1.safetensors")
        last = {"last": np.zeros(1, np.float32)} | ({} if head is None else {"lm_head.weight": head})
        save_file(last, tmp_path / "model-2.safetensors")
        return twin_of_head(tmp_path)

    assert stored(embedding) == "model.embed_tokens.weight"
    changed = embedding.copy()
    changed[6, 3] += 1
    assert stored(changed) is None
    assert stored(embedding.astype(np.float16)) is None
    assert stored(None) is None


def test_a_version_without_a_head_is_given_one_where_the_engine_wants_it():
    embedding, norm = torch.ones(3), torch.zeros(2)
    without = [("embed", embedding), ("norm", norm)]
    assert list(with_head(iter(without), None)) == without
    assert list(with_head(iter(without), "embed")) == [*without, ("lm_head.weight", embedding)]
    own = [("lm_head.weight", norm), *without]
    assert list(with_head(iter(own), "embed")) == own


def test_the_values_of_tensors_are_left_to_the_workers_which_read_each_once(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    record, facts = save({name: torch.randn(shape) for name, shape in MODEL.items()}, file)
    (tmp_path / "COMPLETE").write_text(json.dumps({"version": 1, "files": {file.name: record}, "tensors": facts}))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    check_policy(tmp_path, 1, MODEL, tied=False)


def test_every_difference_is_named(tmp_path: Path):
    write(tmp_path, {"embed.weight": (7, 5), "other": (1,)})
    with pytest.raises(ValueError, match=r"missing: norm\.weight; unknown: other; wrong shape: embed\.weight \[7, 5\] instead of \[7, 4\]"):
        check_policy(tmp_path, 1, MODEL, tied=False)


def test_a_file_beside_the_manifest_is_refused(tmp_path: Path):
    write(tmp_path, MODEL)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"more\.safetensors is not in the manifest"):
        check_policy(tmp_path, 1, MODEL, tied=False)


def test_a_published_endpoint_is_private_and_read_back(tmp_path: Path):
    paths = RunPaths(tmp_path)
    with bind("127.0.0.1", 0) as sock:
        url = publish_endpoint(endpoint_file(paths, 1), sock, "secret")
        assert url == f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", sock.getsockname()[1])
    assert stat.S_IMODE(endpoint_file(paths, 1).stat().st_mode) == 0o600
    with pytest.raises(WaitTimeout, match="inference server 0"):
        read_endpoints(paths, 2)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        publish_endpoint(endpoint_file(paths, 0), sock, "other")
    assert [endpoint.api_key for endpoint in read_endpoints(paths, 2)] == ["other", "secret"]


def config(device: str, tensor_parallel: int = 1, **inference: object) -> Config:
    made = Config(max_steps=1, seq_len=128, seed=3)
    made.model = ModelConfig(name="qwen", dtype="bfloat16", num_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    made.hardware = HardwareConfig(name="x", device=device, tensor_parallel=tensor_parallel)
    made.inference = InferenceConfig(**inference)  # type: ignore[arg-type]
    return made


def test_on_cpu_the_engine_is_eager_in_this_process_and_never_splits_a_prefill():
    cpu = config("cpu", kv_cache_gb=0.5)
    arguments = engine_arguments(cpu, "folder", 2)
    assert runs_in_process(cpu)
    assert not runs_in_process(config("cpu", 2))
    assert arguments["enforce_eager"] is True
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["max_model_len"] == 128
    assert "gpu_memory_utilization" not in arguments
    assert environment(cpu, {})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_the_engines_seed_fits_numpys_32_bits_and_differs_between_replicas():
    dated = config("cpu")
    dated.seed = 20250101
    seeds = [engine_arguments(dated, "folder", replica)["seed"] for replica in range(3)]
    assert len({*seeds}) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_on_cpu_the_cache_is_as_large_as_the_sequences_can_use_but_at_most_a_gibibyte_if_one_fits():
    tiny = config("cpu", max_num_seqs=4)
    token = 2 * 2 * 2 * 8 * 2  # keys and values of two layers, with two heads of eight numbers of 16 bits

    def cache(**keys: int) -> int:
        for name, value in keys.items():
            setattr(tiny if name == "seq_len" else tiny.inference, name, value)
        return engine_arguments(tiny, "folder", 0)["kv_cache_memory_bytes"]

    assert cache() == 2 * 4 * 128 * token
    assert cache(seq_len=129) == 2 * 4 * 160 * token  # whole blocks of 32
    assert cache(max_model_len=64) == 2 * 4 * 64 * token
    assert cache(max_num_seqs=10**6) == 2**30
    assert cache(max_model_len=2**23) == 2 * 2**23 * token > 2**30
    assert cache(kv_cache_gb=2) == 2**31


def test_on_gpu_the_engine_has_its_own_process_and_cuda_graphs():
    gpu = config("cuda", 4, gpu_memory_utilization=0.5)
    arguments = engine_arguments(gpu, "folder", 0)
    assert not runs_in_process(gpu)
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"], arguments["dtype"]) == (4, 0.5, "bfloat16")
    assert arguments["enforce_eager"] is False
    assert "enable_chunked_prefill" not in arguments
    assert "TORCHDYNAMO_DISABLE" not in environment(gpu, {})


def test_the_head_of_a_16_bit_model_is_float32_unless_the_user_says_otherwise():
    assert engine_arguments(config("cuda"), "folder", 0)["hf_overrides"] == {"head_dtype": "float32"}
    own = config("cuda", vllm={"hf_overrides": {"rope_theta": 1e6}})
    assert engine_arguments(own, "folder", 0)["hf_overrides"] == {"head_dtype": "float32", "rope_theta": 1e6}
    model = config("cpu", vllm={"hf_overrides": {"head_dtype": "model"}})
    assert engine_arguments(model, "folder", 0)["hf_overrides"] == {"head_dtype": "model"}
    exact = config("cpu")
    exact.model.dtype = "float32"
    assert "hf_overrides" not in engine_arguments(exact, "folder", 0)


def test_on_gpu_the_engines_process_is_spawned_and_has_as_long_to_start_as_the_run_gives_it():
    gpu, cpu = config("cuda", startup_timeout=1234.5), config("cpu")
    assert environment(gpu, {})["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environment(gpu, {})["VLLM_ENGINE_READY_TIMEOUT_S"] == "1235"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(cpu, {}), "`PolicyEngine.start` sets it to fork after vLLM's own choice"
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in environment(gpu, {"VLLM_ENGINE_READY_TIMEOUT_S": "60"})


def test_on_gpu_vllm_needs_no_flashinfer_and_multiplies_float32_in_float32():
    gpu = config("cuda")
    assert environment(gpu, {})["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "TRITON_F32_DEFAULT" not in environment(gpu, {})
    gpu.model.dtype = "float32"
    assert environment(gpu, {})["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in environment(gpu, {"TRITON_F32_DEFAULT": "tf32"}), "the user's"


def test_the_user_has_the_last_word_on_arguments_and_variables_and_replicas_differ_in_seed():
    cpu = config("cpu", vllm={"block_size": 64}, enforce_eager=False)
    assert engine_arguments(cpu, "folder", 0)["block_size"] == 64
    assert engine_arguments(cpu, "folder", 0)["enforce_eager"] is False
    assert engine_arguments(cpu, "folder", 0)["seed"] != engine_arguments(cpu, "folder", 1)["seed"]
    assert "OMP_NUM_THREADS" not in environment(cpu, {"OMP_NUM_THREADS": "4"})
