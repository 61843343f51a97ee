"""The plan of inference servers: where they are, and vLLM's command line of each."""

from __future__ import annotations

import shlex
from pathlib import Path

from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT
from rlx.plan.explain import explain
from rlx.plan.make import make_plan


def servers_of(*argv: str) -> dict[str, list[str]]:
    """The words of each server's line in the explanation of a plan."""
    cfg = compose([*argv, "dry_run=true"], {}).cfg
    text = explain(cfg, make_plan(cfg, Path("/run"), "/bin/python"), {"loss": "grpo"}, [], "/run")
    lines = [line.strip().split(": ", 1) for line in text.splitlines() if " -m vllm." in line]
    return {name: shlex.split(words.replace("<secret>", "'<secret>'")) for name, words in lines}


def follows(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_plan_shows_the_command_line_of_each_server_with_its_variables() -> None:
    servers = servers_of(
        "hardware.inference_replicas=2", "inference.port=8000", "inference.vllm={block_size:16,enable_prefix_caching:false}"
    )
    assert list(servers) == ["inference_0", "inference_1"]
    for replica, words in enumerate(servers.values()):
        before, after = words[: words.index("/bin/python")], words[words.index("/bin/python") :]
        assert {"VLLM_SERVER_DEV_MODE=1", "RLX_SECRET=<secret>", "VLLM_PLUGINS="} <= set(before)
        assert all("=" in word for word in before)
        assert after[1:3] == ["-m", "vllm.entrypoints.launchers.api_server.entry"]
        assert (follows(after, "--host"), follows(after, "--port")) == ("127.0.0.1", str(8000 + replica))
        assert (follows(after, "--model"), follows(after, "--block-size")) == ("<initial model>", "16")
        assert "--no-enable-prefix-caching" in after


def test_the_command_line_of_a_server_on_gpus_names_them_and_a_port_that_is_chosen_later() -> None:
    servers = servers_of("model=qwen3_0_6b", "hardware=node8", "hardware.inference_replicas=2", "hardware.tensor_parallel=2")
    assert [next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")) for words in servers.values()] == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "CUDA_VISIBLE_DEVICES=2,3",
    ]
    words = servers["inference_1"]
    assert (follows(words, "--model"), follows(words, "--port")) == ("Qwen/Qwen3-0.6B", "<a free port>")
    assert follows(words, "--tensor-parallel-size") == "2"


def test_servers_on_other_hosts_listen_on_every_address() -> None:
    words = servers_of("hardware=cpu_3nodes")["inference_0"]
    assert follows(words, "--host") == "0.0.0.0"


def test_without_servers_of_its_own_a_run_shows_no_command_line() -> None:
    assert servers_of("inference.base_url=[http://other:8000]") == {}


def test_hosts_without_servers_are_all_the_trainers_or_free() -> None:
    cfg = compose(["data=fake", "hardware=cpu_3nodes", "hardware.trainer_processes=3", "dry_run=true"], {}, SFT).cfg
    assert [spec.node for spec in make_plan(cfg, Path("/run")) if spec.role == "trainer"] == [0, 1, 2]
    asks = ["env=reverse_text", "client.base_url=http://other/v1", "model.name=other"]
    cfg = compose([*asks, "hardware=cpu_3nodes", "dry_run=true"], {}, EVAL).cfg
    assert [(spec.role, spec.node) for spec in make_plan(cfg, Path("/run"))] == [("evaluator", 0)]
