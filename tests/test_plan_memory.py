"""The memory, ranks and sizes that a plan tells before a run starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_configs import config
from toy_run import FOREVER, Run, starting, toy

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.memory import CONTEXT, kv_token_bytes, size, trainer_memory
from rlx.config.oom_hints import ran_out, savings, when_out_of_memory
from rlx.config.roots import EVAL, SFT, TRAIN, Root
from rlx.config.row_budget import kept_numbers, tokens_in_budget
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.plan.memory import fit_lines, memory_lines

ALONE = "hardware=gpu2"  # one rank
MANY = "hardware=node8 hardware.nodes=3 hardware.trainer_processes=16"


@pytest.mark.parametrize(
    ("keys", "peak"),
    [  # GiB. The first five are what torch had at its peak on an H200 (benchmarks/RESULTS.md), the last one is simulated
        (f"model=qwen3_0_6b seq_len=16384 trainer.ac.freq=0 {ALONE}", 29.9),
        (f"model=qwen3_8b seq_len=8192 trainer.optimization_dtype=bfloat16 {ALONE}", 65.3),
        (f"model=qwen3_8b seq_len=16384 trainer.optimization_dtype=bfloat16 {ALONE}", 68.3),
        (f"model=qwen3_4b seq_len=4096 trainer.ac.freq=0 lora.rank=16 {ALONE}", 23.6),
        (f"model=qwen3_4b seq_len=16384 trainer.ac.freq=0 lora.rank=16 {ALONE}", 70.0),
        (f"model=qwen3_30b_a3b seq_len=8192 trainer.ac.freq=0 trainer.ep=8 {MANY}", 89 - 1),
    ],
)
def test_the_estimate_is_close_to_the_peak(keys: str, peak: float) -> None:
    given = dict(word.split("=") for word in keys.split())
    words = [*keys.split(), f"trainer.micro_batch_tokens={given['seq_len']}", "env=math", "sampling.max_tokens=512", "dry_run=true"]
    cfg = compose(words, {}).cfg
    assert 0.9 <= peak / ((trainer_memory(cfg).device - CONTEXT) / 2**30) <= 1.15


@pytest.mark.parametrize(("experts", "inner"), [(None, 12288), (128, 96)])
def test_a_width_that_is_not_given_follows_from_the_number_of_parameters(experts: int | None, inner: int) -> None:
    sizes = {"num_experts": experts, "num_parameters": 151936 * 4096 + 36 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * inner * (experts or 1))}
    given, derived = (config("node8", model=sizes | more) for more in ({"intermediate_size": inner}, {}))
    assert trainer_memory(given).activations == pytest.approx(trainer_memory(derived).activations)


def test_the_plan_says_how_many_sequences_the_cache_holds_and_what_all_would_take() -> None:
    cfg = compose(["experiment=math_smollm2", "hardware=cpu"], {}).cfg
    token = 2 * 30 * 3 * 64 * 4  # keys and values of 30 layers with 3 heads of 64, float32
    assert kv_token_bytes(cfg) == token
    text = "\n".join(memory_lines(cfg, make_plan(cfg, Path("/run"))))
    assert f"KV cache 1.0 GiB (inference.kv_cache_gb): {2**30 / token:,.0f} tokens, 91 sequences of full length" in text, text
    assert f"{256 * 256 * token / 2**30:.1f} GiB would hold all concurrent sequences at full length; they need less" in text, text


def test_the_plan_says_what_does_not_fit_with_both_numbers_and_the_keys_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config("node8", hardware={"gpu_memory_gb": 16})
    trainer, *fixes, server, fix = fit_lines(small)
    assert trainer.startswith("does not fit: the trainer needs ")
    assert trainer.endswith(" of each GPU, and 16.0 GiB of 16.0 GiB are there for it")
    assert any("trainer.ac.freq=1" in line for line in fixes)
    assert server.startswith("does not fit: a server needs 16.4 GiB of each GPU, and 14.4 GiB of 16.0 GiB")
    assert "hardware.tensor_parallel" in fix
    large = config("node8", hardware={"gpu_memory_gb": 140})
    assert [line.partition(":")[0] for line in fit_lines(large)] == ["fits", "fits"]
    assert fit_lines(large, only_wrong=True) == []
    assert fit_lines(config("node8")) == ["each GPU must have at least 76.9 GiB; hardware.gpu_memory_gb=… says whether it has"]
    monkeypatch.setattr("rlx.plan.memory.gpu_memory", lambda: 16.0 * 2**30)
    for there, known in ((8, fit_lines(small)), (1, fit_lines(config("node8", launcher={"name": "slurm"})))):
        monkeypatch.setattr("rlx.plan.memory.visible_gpus", lambda there=there: there)
        assert fit_lines(config("node8")) == known, "of this machine, if it has them"
    assert fit_lines(config("cpu")) == []


def test_the_trainer_on_a_shared_gpu_has_what_the_engine_leaves() -> None:
    cfg = config("gpu1_shared", hardware={"gpu_memory_gb": 80}, inference={"gpu_memory_utilization": 0.4})
    assert "and 48.0 GiB of 80.0 GiB are there for it" in fit_lines(cfg)[0]


def test_the_plan_counts_the_tiles_that_the_head_op_has() -> None:
    from rlx.config.memory import TILE
    from rlx.kernels.tiles import TILE_CPU, TILE_CUDA

    assert {kind: (elements // columns, columns) for kind, (columns, elements) in {"cpu": TILE_CPU, "cuda": TILE_CUDA}.items()} == TILE


def test_a_context_group_shares_each_row() -> None:
    whole = config("node8", trainer={"micro_batch_tokens": 8192})
    cut = config("node8", trainer={"micro_batch_tokens": 8192, "cp": 2})
    assert (cut.trainer_ranks, cut.data_ranks) == (4, 2)
    before, after = trainer_memory(whole), trainer_memory(cut)
    assert after.activations == before.activations / 2
    assert after.states == before.states, "the shards are over all ranks"
    assert before.head - after.head == 4 * 4096 * (2 * 8192 + 4096), "tiles and the hidden states' gradient, of half a row"
    text = explain(cut, make_plan(cut, Path("/run")), {}, [], "/run")
    assert "FSDP2 over 4 ranks; each row on 2 of them" in text
    rows = 256 * 8192 // (8192 * 2)
    assert f"at most {rows} per group of 2 ranks and optimizer step, each one row of 8,192 tokens, on 2 of them" in text
    assert tokens_in_budget(cut) == pytest.approx(2 * tokens_in_budget(whole), abs=256), "the budget is that of a rank"


def test_a_tensor_group_shares_rows_and_gathered_layers() -> None:
    whole, divided = (config("node8", trainer={"micro_batch_tokens": 8192, "tp": tp}) for tp in (1, 2))
    before, after = trainer_memory(whole), trainer_memory(divided)
    assert after.states == before.states
    assert (after.layers, after.layer_gradients) == (before.layers / 2, before.layer_gradients / 2)
    twice = 2 * 4096 / kept_numbers(whole.model)[0]  # of a gathered span, the other rank's tokens are kept twice a layer
    assert after.activations == pytest.approx(before.activations * (1 + twice) / 2)
    text = explain(divided, make_plan(divided, Path("/run")), {}, [], "/run")
    assert "FSDP2 over 4 ranks; each row on 2 of them, matrices divided over 2" in text


def test_groups_that_lie_on_several_hosts_are_named() -> None:
    for keys, warned in (({"tp": 8}, False), ({"tp": 16}, True), ({"ep": 16}, True)):
        cfg = config("node8x4", trainer={"micro_batch_tokens": 8192, **keys}, model={"num_experts": 128, "num_attention_heads": 32})
        text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
        ((key, size),) = keys.items()
        assert (f"warning: trainer.{key}={size} does not divide the 8 trainer ranks of a host, so some groups exchange" in text) == warned


def test_an_expert_group_shares_gathered_layers_of_experts() -> None:
    model = {"num_experts": 128}
    whole, divided = (config("node8", model=model, trainer={"micro_batch_tokens": 8192, "ep": ep}) for ep in (1, 4))
    before, after = trainer_memory(whole), trainer_memory(divided)
    assert (after.states, after.activations) == (before.states, before.activations)
    assert after.layers == before.layers / 4
    assert divided.data_ranks == 4, "each rank has samples of its own"
    assert "FSDP2 over 4 ranks; experts divided over 4" in explain(divided, make_plan(divided, Path("/run")), {}, [], "/run")


def test_a_single_process_with_adapters_gathers_nothing_and_holds_them_once_more_in_16_bits() -> None:
    whole = config("gpu1_shared", trainer={"micro_batch_tokens": 4096})
    adapters = config("gpu1_shared", trainer={"micro_batch_tokens": 4096}, lora={"rank": 16})
    before, after = trainer_memory(whole), trainer_memory(adapters)
    assert before.layers > 0, "float32 parameters, gathered in 16 bits"
    assert after.layers == after.table == after.table_gradients == 0
    assert after.activations - before.activations == pytest.approx(after.gradients / 2)
    again = config("gpu1_shared", trainer={"micro_batch_tokens": 4096, "fsdp_cpu_offload": True}, lora={"rank": 16})
    assert trainer_memory(again).layers == before.layers


def test_threads_of_a_process_that_computes_alone_may_spin() -> None:
    plan = make_plan(config("cpu", hardware={"cpu_threads": 2}, bench=True), Path("/run"))
    assert [spec.role for spec in plan if spec.role != "prepare"] == ["trainer"]
    assert not any("OMP_WAIT_POLICY" in spec.env for spec in plan)
    several = make_plan(config("cpu", hardware={"cpu_threads": 2, "trainer_processes": 2}, bench=True), Path("/run"))
    waits = [spec.env.get("OMP_WAIT_POLICY") for spec in several if spec.role == "trainer"]
    assert waits == ["PASSIVE", "PASSIVE"], "its ranks share the cores"


@pytest.mark.parametrize(
    ("layout", "hardware", "says"),
    [
        ("node8", {"nodes": 2, "trainer_processes": 2}, "no process is on host 1 (hardware.nodes=2) and 10 of 16 GPUs (hardware.gpus_per_"),
        ("node8", {"trainer_processes": 2}, "no process is on 2 of 8 GPUs (hardware.gpus_per_node=8)"),
        ("node8", {}, None),
        ("cpu_3nodes", {}, None),
        ("gpu1_shared", {}, None),
    ],
)
def test_the_plan_says_which_hosts_and_gpus_have_no_process(layout: str, hardware: dict[str, int], says: str | None) -> None:
    cfg = config(layout, hardware=hardware)
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    assert says in text if says else "no process is on" not in text


def of(*overrides: str, root=None) -> list[str]:
    composed = compose(list(overrides), {}) if root is None else compose(list(overrides), {}, root)
    return [note for note in composed.notes if "warm-up" in note]


def test_a_warm_up_that_the_run_does_not_finish_is_said():
    updates = ("max_steps=10", "trainer.num_minibatches=2", "trainer.num_iterations=2")
    assert of("scheduler.warmup_steps=40", *updates) == [], "the last optimizer step has the whole rate"
    (note,) = of("scheduler.warmup_steps=41", *updates)
    assert "longer than the run's 40 optimizer steps" in note
    assert note.endswith("scheduler.warmup_steps=41 (command line)")


def test_supervised_training_says_it_too_and_a_benchmark_does_not():
    assert len(of("data.name=x/y", "max_steps=10", "scheduler.warmup_steps=11", "dry_run=true", root=SFT)) == 1
    assert of("bench=true", "max_steps=10", "scheduler.warmup_steps=11") == []


def test_it_is_said_where_a_run_is_described(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dry_run=true", "max_steps=10", "scheduler.warmup_steps=11"]) == 0
    assert "note: the warm-up is longer than the run" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["folder", "text_config", "cache"])
def test_the_plan_has_the_sizes_of_the_model_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    """Llama 3.3 70B under `model=llama3_1_8b` would get the plan, the row length and the rules of 8B."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    name, folder = str(tmp_path / "model"), tmp_path / "model"
    if where == "cache":
        name, folder = "someone/Llama-70B", tmp_path / "hub" / "models--someone--Llama-70B" / "snapshots" / "abc"
        (folder.parent.parent / "refs").mkdir(parents=True)
        (folder.parent.parent / "refs" / "main").write_text("abc")
    folder.mkdir(parents=True)
    argv = ["model=llama3_1_8b", f"model.name={name}", "env=math", "hardware=node8", "dry_run=true"]
    made = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    made |= {"intermediate_size": 28672, "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps({"text_config": made} if where == "text_config" else made))
    composed = compose(argv, {})
    assert (composed.cfg.model.hidden_size, composed.cfg.model.num_layers) == (8192, 80)
    assert composed.cfg.model.num_parameters == pytest.approx(70.55e9, rel=1e-3), "as many as Llama 3.3 70B has"
    assert [note for note in composed.notes if "its own sizes" in note and str(folder) in note]
    with pytest.raises(ConfigError, match=r"num_layers 80 in .*model\.num_layers=32 \(command line\)"):
        compose([*argv, "model.num_layers=32"], {})


@pytest.mark.parametrize(
    ("made", "experts", "parameters"),
    [
        (
            {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            128,
            30e9,
        ),  # an option of a dense model says none
        ({"num_local_experts": 0, "intermediate_size": 9728}, None, 4e9),
    ],
    ids=["mixture", "dense"],
)
def test_a_mixture_of_experts_is_counted_as_one(tmp_path: Path, made: dict, experts: int | None, parameters: float):
    made |= {"hidden_size": 2048 if experts else 2560, "num_hidden_layers": 48 if experts else 36, "num_attention_heads": 32}
    made |= {"num_key_value_heads": 4 if experts else 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(made))
    for option in ([], ["model=qwen3_8b"]):
        model = compose([*option, f"model.name={tmp_path}", "env=math", "hardware=node8", "dry_run=true"], {}).cfg.model
        assert (model.num_experts, model.num_parameters) == (experts, pytest.approx(parameters, rel=0.15))


def test_a_model_that_is_not_here_is_said_not_to_have_been_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    argv = ["model=llama3_1_8b", "env=math", "hardware=node8", "dry_run=true"]
    assert not [note for note in compose(argv, {}).notes if "were not compared" in note]
    (note,) = [note for note in compose([*argv, "model.name=meta-llama/Llama-3.3-70B-Instruct"], {}).notes if "were not compared" in note]
    assert "model.name=meta-llama/Llama-3.3-70B-Instruct (command line)" in note
    for content in ("{", '{"model_type": "new"}'):
        (tmp_path / "config.json").write_text(content)
        (note,) = [note for note in compose([*argv, f"model.name={tmp_path}"], {}).notes if "were not compared" in note]
        assert f"because {tmp_path}/config.json names none that rlx knows" in note


@pytest.mark.parametrize("inside", [["text_config"], ["llm_config"], ["thinker_config", "text_config"]])
def test_a_model_that_sees_or_hears_has_the_sizes_of_its_language_model(tmp_path: Path, inside: list[str]):
    made: dict = MADE
    for name in reversed(inside):
        made = {"model_type": "several", name: made}
    (tmp_path / "config.json").write_text(json.dumps(made))
    assert compose([f"model.name={tmp_path}", "env=math", "hardware=node8", "dry_run=true"], {}).cfg.model.hidden_size == 1024


MADE = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MADE |= {"vocab_size": 151936, "intermediate_size": 3072, "max_position_embeddings": 40960, "tie_word_embeddings": True}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize(
    ("made", "parameters", "width"), [(MADE, 596e6, 3072), (GPT2, 124e6, None)], ids=["of the names of today", "of GPT-2"]
)
@pytest.mark.parametrize("root", [TRAIN, SFT, EVAL], ids=lambda root: root.command)
def test_a_model_needs_no_option(tmp_path: Path, root: Root, made: dict[str, int], parameters: float, width: int | None):
    (tmp_path / "config.json").write_text(json.dumps(made))
    more = {"train": ["env=math"], "sft": [f"data.name={tmp_path}"], "eval": ["env=math"]}[root.command]
    line = [f"model.name={tmp_path}", "seq_len=512", "sampling.max_tokens=256", "dry_run=true", *more]
    composed = compose(line, {}, root)
    model = composed.cfg.model
    assert composed.choices["model"] == "named"
    assert (model.hidden_size, model.intermediate_size, model.warm_start) == (made.get("hidden_size", 768), width, None)
    assert model.num_parameters == pytest.approx(parameters, rel=0.01)
    assert str(tmp_path / "config.json") in composed.origins.show("model.hidden_size", 1)
    assert compose([*line, "model=named"], {}, root).cfg.model == model, "also by its name"


def test_a_name_that_the_hub_does_not_have_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"model\.name=no/such is no folder with a config\.json, and neither the hub nor its cache has one"
    ):
        compose(["model.name=no/such"], {})


GIB = 2**30


@pytest.mark.parametrize(
    "argv",
    [
        "model=qwen3_8b hardware=gpu2 env=math",
        "model=qwen3_8b hardware=node8 env=math trainer.ac.freq=2 trainer.reshard_after_forward=false",
        "model=qwen3_8b hardware=gpu2 env=math optim=muon",
        "model=qwen3_8b hardware=gpu2 env=math trainer.optim_cpu_offload=true trainer.ac.freq=1",
        "model=qwen3_1_7b hardware=gpu1_shared env=math trainer.ac.freq=1 trainer.ac.mode=selective seq_len=4096",
        "model=smollm2_135m hardware=cpu env=sums",
    ],
)
@pytest.mark.usefixtures("known_environments")
def test_each_override_is_accepted_and_lowers_the_estimate_by_what_is_said(argv: str) -> None:
    given = ["dry_run=true", *argv.split()]
    before = trainer_memory(compose(given).cfg).device
    found = savings(compose(given).cfg)
    assert found
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for override, saved in found.items():
        names = {part.partition("=")[0] for part in override.split()}
        kept = [part for part in given if part.partition("=")[0] not in names]
        after = trainer_memory(compose([*kept, *override.split()]).cfg).device
        assert before - after == pytest.approx(saved), override


def test_what_is_switched_on_already_or_does_nothing_is_not_named() -> None:
    plain = savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.ac.freq=0"]).cfg)
    assert {"trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true", "trainer.optim_cpu_offload=true"} <= set(plain)
    assert "trainer.ac_offloading=true" not in plain, "nothing is recomputed that could be kept in host memory"
    on = savings(
        compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true"]).cfg
    )
    assert not {"trainer.ac.freq=1", "trainer.fsdp_cpu_offload=true", "trainer.optim_cpu_offload=true"} & set(on)
    assert not any(
        "fsdp_cpu_offload" in key
        for key in savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "optim=muon"]).cfg)
    )
    part = savings(compose(["dry_run=true", "model=qwen3_8b", "hardware=gpu2", "env=math", "trainer.optim_cpu_offload=true"]).cfg)
    assert "trainer.fsdp_cpu_offload=true trainer.optim_cpu_offload=false" in part


def test_the_advice_names_the_estimate_its_moment_and_the_engine_on_the_same_gpu() -> None:
    text = when_out_of_memory(compose(["dry_run=true", "model=qwen3_1_7b", "hardware=gpu1_shared", "env=math"]).cfg)
    peak = trainer_memory(compose(["dry_run=true", "model=qwen3_1_7b", "hardware=gpu1_shared", "env=math"]).cfg).device
    assert f"the estimate was {size(peak)} on each rank" in text
    assert "at its peak when" in text
    assert "inference.gpu_memory_utilization" in text


def test_the_words_of_torch_and_cuda_are_recognized() -> None:
    assert ran_out(["x", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"])
    assert ran_out(["RuntimeError: CUDA error: out of memory"])
    assert not ran_out(["ValueError: the data is out of date"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


@pytest.mark.slow
def test_a_trainer_whose_gpu_has_no_memory_left_is_told_what_would_save_some(start: Callable[..., Run]) -> None:
    dies = """
        import sys
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        for i in range(40):
            print(i)
        sys.exit(1)
    """
    cause = start([toy("trainer", dies), toy("orchestrator", FOREVER)]).wait().cause
    assert cause.reason.partition("; the estimate")[0] == "exit code 1; the device ran out of memory"
