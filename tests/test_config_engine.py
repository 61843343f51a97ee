"""Which of vLLM's options `inference.vllm` may set, and how they are written on its command line."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from rlx.config.checks.engine import HARMLESS, ON_CPU, OWNED, PARTS, REFUSED, SAME
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.schema_rollout import EnvSampling, SamplingConfig
from rlx.config.vllm_flags import SWITCHES, flags
from rlx.inference.wire import Sampling

LATER = {"monokernel", "reasoning_effort_map", "sleep_mode_backend", "watchdog_config"}  # options that vLLM 0.33 adds
GPU = "hardware=gpu1_shared"


def options_of(vllm: Path) -> dict[str, bool]:
    """The options of `vllm serve` in a folder with vLLM's source, without an import: name → whether it has no `--no-` form."""
    files = [*vllm.glob("entrypoints/*/cli_args.py"), vllm / "engine" / "arg_utils.py"]
    found: dict[str, bool] = {}
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            found |= {each.target.id: False for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            action = next((ast.literal_eval(each.value) for each in node.keywords if each.arg == "action" and _is_text(each.value)), "")
            names = [str(ast.literal_eval(each)) for each in node.args if _is_text(each)]
            found |= {name[2:].replace("-", "_"): action == "store_true" for name in names if name.startswith("--")}
    return found


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def installed() -> Path:
    """The folder of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent


def test_every_option_of_the_installed_vllm_is_of_one_kind() -> None:
    kinds = [*OWNED, *REFUSED, *HARMLESS]
    assert len(kinds) == len(set(kinds))
    found = options_of(installed())
    assert set(found) - set(kinds) == set(), "new options: decide in rlx/config/checks/engine.py"
    assert set(kinds) - set(found) <= LATER, "options that vLLM no longer has"


def test_exceptions_are_of_options_that_are_refused() -> None:
    assert set(ON_CPU) <= set(HARMLESS)
    assert {*SAME, *PARTS} <= {*REFUSED, *ON_CPU}


@pytest.mark.parametrize(
    "options",
    [
        "{max_num_batched_tokens:4096,block_size:16,enable_prefix_caching:false}",
        "{logprobs_mode:processed_logprobs,generation_config:vllm,kv_cache_dtype:auto,pipeline_parallel_size:1}",
        "{hf_overrides:{head_dtype:model},attention_config:{backend:FLASH_ATTN}}",
        "{enable_chunked_prefill:true,enable_expert_parallel:true,kv_cache_memory_bytes:1000000}",
    ],
)
def test_harmless_options_and_values_pass(options: str) -> None:
    compose([f"inference.vllm={options}", GPU, "dry_run=true"], {})


@pytest.mark.parametrize("name", ["quantization", "cpu_offload_gb", "api_server_count", "middleware", "override_generation_config"])
def test_an_option_that_is_refused_cannot_be_removed_from_the_command_line_by_null_either(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=null"):
        compose([f"+inference.vllm.{name}=null", GPU, "dry_run=true"], {})


def test_options_are_written_as_vllm_reads_them() -> None:
    written = flags(
        {
            "max_num_batched_tokens": 4096,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "hf_overrides": {"head_dtype": "float32", "nested": {"on": True}},
            "cudagraph_capture_sizes": [1, 2],
            "download_dir": None,
            "aggregate_engine_logging": False,
            "performance_mode": "throughput",
        }
    )
    assert written == [
        *("--max-num-batched-tokens", "4096", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"head_dtype": "float32", "nested": {"on": true}}', "--cudagraph-capture-sizes", "1", "2"),
        *("--performance-mode", "throughput"),
    ]


def test_options_without_a_negative_form_are_left_out() -> None:
    assert {name for name, switch in options_of(installed()).items() if switch} & set(HARMLESS) == set(SWITCHES)


def test_the_sampling_parameters_that_a_run_may_set_are_those_that_are_sent_and_vllm_knows_them() -> None:
    """vLLM ignores a name that it does not know, so nothing on the way would notice one."""
    own = {"allow_biased_ratio"}  # rlx's own, which no request carries
    sent = set(Sampling.__struct_fields__)
    assert {each.name for section in (SamplingConfig, EnvSampling) for each in fields(section)} - own <= sent
    tree = ast.parse((installed() / "sampling_params.py").read_text())
    (known,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams")
    assert sent <= {each.target.id for each in known.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
