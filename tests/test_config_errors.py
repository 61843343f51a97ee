"""The verdict for each configuration mistake: how many problems, and which keys each names. One file per mistake in
tests/golden/config_errors/ shows the text at the time of its last change.

`UPDATE_GOLDEN=1 pytest tests/test_config_errors.py` rewrites the files whose verdict has changed; read them before committing.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.presets import shipped_groups
from rlx.config.roots import has_key
from rlx.config.schema import Config

GOLDEN = Path(__file__).resolve().parent / "golden" / "config_errors"


@dataclass
class Case:
    """A command line with a mistake, and the surroundings that the mistake needs."""

    argv: str
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # in the directory my_conf
    gpus: int = 0
    absent: tuple[str, ...] = ()  # packages that count as not installed


CASES = {
    "unknown_key": Case("trianer.num_minibatches=2 model.dtyp=float32 top_p=0.9 foo=1"),
    "unknown_key_of_other_frameworks": Case("lr=1e-5 trainer.optim.lr=1e-5 kl_coef=0.1 group_size=8 eps_low=0.1"),
    "unknown_environment": Case("envs.revers.args.min_length=2"),
    "unknown_key_in_file": Case(
        "--config-dir my_conf experiment=first", files={"experiment/first.yaml": "# @package _global_\ntrainer: {microbatch_tokens: 64}\n"}
    ),
    "unknown_key_package_line_forgotten": Case("--config-dir my_conf env=riddles", files={"env/riddles.yaml": "id: rlx-sums\n"}),
    "unknown_option": Case("loss=gpso model=qwen3"),
    "unknown_option_in_list": Case("env=[sums,typo] logger=[wandb,tensorbord]"),
    "unknown_option_in_file": Case(
        "--config-dir my_conf experiment=first",
        files={"experiment/first.yaml": "# @package _global_\ndefaults:\n  - override /loss: gpso\n"},
    ),
    "unknown_option_of_variable": Case("", environ={"RLX_LOSS": "gpso"}),
    "several_options_where_one_is_chosen": Case(
        "loss=[gspo,grpo] hardware=[cpu,node8] --config-dir my_conf --config-name mine",
        environ={"RLX_OPTIM": "[adamw,muon]"},
        files={"mine.yaml": "defaults: [train, _self_]\n"},
    ),
    "several_options_in_a_file": Case(
        "--config-dir my_conf experiment=first",
        files={"experiment/first.yaml": "# @package _global_\ndefaults:\n  - override /loss: [grpo, gspo]\n"},
    ),
    "several_options_without_a_sweep": Case("loss=grpo,gspo env=sums,math"),
    "several_options_of_a_variable": Case("", environ={"RLX_LOSS": "grpo,gspo"}),
    "several_values_of_a_variable": Case("", environ={"RLX_SEED": "0,1"}),
    "file_that_is_no_yaml": Case("--config-dir my_conf loss=mine", files={"loss/mine.yaml": "_target_: a.b\n  bound: 2\nc: 1\n"}),
    "file_with_a_key_twice": Case("--config-dir my_conf loss=mine", files={"loss/mine.yaml": "bound: 1\nc: 2\nbound: 3\n"}),
    "file_with_an_unknown_tag": Case("--config-dir my_conf --config-name mine", files={"mine.yaml": "seed: !number 3\n"}),
    "file_with_a_forbidden_character": Case("--config-dir my_conf --config-name mine", files={"mine.yaml": "seed: \x01\n"}),
    "file_with_half_a_reference": Case("--config-dir my_conf --config-name mine", files={"mine.yaml": "run: {name: '${'}\n"}),
    "file_of_text": Case("--config-dir my_conf loss=mine", files={"loss/mine.yaml": "just text\n"}),
    "file_of_a_list": Case("--config-dir my_conf env=mine", files={"env/mine.yaml": "- a\n- b\n"}),
    "file_whose_defaults_are_no_list": Case("--config-dir my_conf loss=mine", files={"loss/mine.yaml": "defaults: grpo\n"}),
    "heads_that_vllm_does_not_compute_on_a_cpu": Case("model=smollm2_135m model.head_dim=72 env=sums hardware=cpu"),
    "unknown_variable": Case("", environ={"RLX_MODEL_DTYPE": "float32", "RLX_MAX_STEP": "3", "RLX_ZZZ": "1"}),
    "unknown_config_name": Case("--config-dir my_conf --config-name nope", files={"mine.yaml": "defaults: [train, _self_]\n"}),
    "unknown_command_line_option": Case("--dry-run"),
    "config_dir_absent": Case("--config-dir nowhere"),
    "wrong_type": Case("seq_len=long dry_run=perhaps optim.lr=fast inference.base_url=localhost trainer=3 orchestrator.batch_size=1.5"),
    "wrong_type_in_variable": Case("", environ={"RLX_SEQ_LEN": "long"}),
    "wrong_value": Case(
        "max_steps=0 model.dtype=float16 trainer.num_minibatches=0 sampling.temperature=0 sampling.top_p=1.5 max_async_level=-1 "
        "hardware.device=gpu scheduler.type=exponential trainer.micro_batch_tokens=0"
    ),
    "seed_below_zero": Case("seed=-1"),
    "seed_too_large": Case("seed=4294967296"),
    "wrong_value_of_the_optimizer": Case("optim.lr=-1 optim.weight_decay=-0.1 optim.betas=[0.9,1.5] scheduler.decay_steps=0"),
    "weights_without_files": Case("weight_broadcast.type=nccl lora.rank=8 inference.base_url=[http://127.0.0.1:1]"),
    "versions_in_memory_that_servers_do_not_see": Case(
        "weight_broadcast.folder=shm weight_broadcast.type=nccl lora.rank=8 inference.base_url=[http://127.0.0.1:1]"
    ),
    "shell_variable_in_a_list": Case(
        "--config-dir my_conf slurm=mine launcher=slurm hardware=cpu dry_run=true",
        files={"slurm/mine.yaml": "setup:\n  - module load cuda\n  - export PATH=${HOME}/bin:$PATH\n"},
    ),
    "versions_in_memory_of_another_host": Case("weight_broadcast.folder=/dev/shm hardware=cpu_3nodes dry_run=true"),
    "versions_in_memory_without_the_folder": Case("weight_broadcast.folder=/nowhere/shm"),
    "weights_by_nccl_on_cpu": Case("weight_broadcast.type=nccl"),
    "weights_by_nccl_on_a_shared_gpu": Case("weight_broadcast.type=nccl hardware=gpu1_shared", gpus=1),
    "weights_by_ipc_between_gpus": Case("weight_broadcast.type=ipc hardware=gpu2", gpus=2),
    "searchpath_is_no_list": Case("hydra.searchpath=null"),
    "hydras_own_keys": Case("hydra.searchpath=[nowhere] hydra.job.name=x hydra/sweeper=basic"),
    "variables_that_exclude_each_other": Case("", environ={"RLX_MODEL__WARM_START": "null", "RLX_MODEL__WARM_START__STEPS": "3"}),
    "nothing_in_a_list_of_options": Case("logger=[null] sweeps=[null]", environ={"RLX_SLURM": "[null]"}),
    "section_without_a_value": Case("trainer=??? loss.kl=??? reward=${nope}"),
    "group_left_out": Case("~env ~loss"),
    "key_inside_a_value": Case("seq_len.foo=3"),
    "missing_value": Case("env=custom"),
    "missing_file_value": Case(
        "--config-dir my_conf model=mine", files={"model/mine.yaml": "name: Qwen/Qwen3-0.6B\ncontext_length: 40960\nhidden_size: 1024\n"}
    ),
    "missing_environment_variable": Case("seq_len=${oc.env:NOT_SET} trainer.micro_batch_tokens=${seq_len}"),
    "unreadable": Case("seq_len = 3", environ={}),
    "several_values": Case("seed=0,1,2"),
    "filter_leaves_nothing": Case("orchestrator.difficulty_filter.min_reward=0.8 orchestrator.difficulty_filter.max_reward=0.2"),
    "overlong_cache_above_all": Case("reward.overlong_cache=13"),
    "section_that_is_off": Case("logger.wandb.project=mine model=qwen3_0_6b model.warm_start.steps=3 dry_run=true"),
    "environment_not_named": Case("env=[sums,reverse_text] env.weight=2"),
    "batch_not_whole_groups": Case("orchestrator.batch_size=100"),
    "batch_smaller_than_group": Case("orchestrator.batch_size=4"),
    "batch_not_whole_groups_of_a_mix": Case("env=[math,reverse_text] envs.math.rollouts_per_example=4 envs.reverse_text.weight=3"),
    "group_of_one_in_an_environment": Case("envs.reverse_text.rollouts_per_example=1"),
    "pools_without_sense": Case(
        "orchestrator.buffer.easy_threshold=0.2 orchestrator.buffer.hard_threshold=0.5 orchestrator.buffer.easy_fraction=0.7 "
        "orchestrator.buffer.hard_fraction=0.6"
    ),
    "pool_without_threshold": Case("orchestrator.buffer.hard_fraction=0.5"),
    "sampling_of_an_environment": Case(
        "envs.reverse_text.sampling.top_p=0.9 envs.reverse_text.sampling.top_k=0 envs.reverse_text.sampling.min_tokens=9999"
    ),
    "group_of_one": Case("orchestrator.rollouts_per_example=1 orchestrator.batch_size=32"),
    "more_minibatches_than_groups": Case("trainer.num_minibatches=33"),
    "engine_context_below_seq_len": Case("inference.max_model_len=32"),
    "completion_fills_seq_len": Case("sampling.max_tokens=64 envs.reverse_text.sampling.max_tokens=80"),
    "min_tokens_above_max_tokens": Case("sampling.min_tokens=20"),
    "context_over_the_models": Case("seq_len=512 inference.max_model_len=1024"),
    "row_below_seq_len": Case("trainer.micro_batch_tokens=32"),
    "truncated_sampling": Case("sampling.top_p=0.95 sampling.top_k=50"),
    "forbidden_end": Case("sampling.min_tokens=4"),
    "correction_without_recompute": Case("loss.correction=tis"),
    "correction_by_token_of_gspo": Case("loss=gspo loss.proximal=recompute loss.correction=mis"),
    "correction_by_token_of_rloo": Case("loss=rloo loss.proximal=recompute loss.correction=tis"),
    "corrected_twice": Case("loss=aipo loss.proximal=recompute loss.correction=tis"),
    "dual_clip_without_the_rewards_sign": Case("loss=masked_is loss.kl_tau=0.1 loss.dual_clip=3"),
    "negative_rewards_of_max_rl": Case("loss=dapo advantage=max_rl"),
    "truncated_sampling_of_a_correction": Case("loss=reinforce loss.proximal=recompute loss.correction=tis sampling.top_p=0.9"),
    "overlong_cache_above_an_environments": Case(
        "reward.overlong_cache=13 envs.reverse_text.sampling.max_tokens=10 sampling.max_tokens=20"
    ),
    "objective_out_of_range": Case("loss.eps_low=1.5 loss.eps_high=0 advantage.ddof=8"),
    "kl_target_without_weight": Case("loss.kl.target_kl=0.01"),
    "kl_target_of_some_tokens": Case("env=[sums,reverse_text] loss.kl.beta=0.1 loss.kl.target_kl=0.01 envs.sums.loss_weights.ref_kl=0"),
    "decay_of_a_constant_rate": Case("scheduler.decay_steps=20 scheduler.min_lr=1e-9"),
    "terms_of_the_loss": Case(
        "loss.kl.beta=much loss.kl.estimator=k4 loss.kl.gamma=1 loss.correction=is loss.dual_clip=1 loss.proximal=old"
    ),
    "terms_are_a_section": Case("loss.kl=0.1"),
    "teacher_not_named": Case("loss=opd"),
    "loss_of_an_environment_unknown": Case("env=[sums,reverse_text] envs.sums.loss=gpso envs.reverse_text.advantage=none_of_them"),
    "loss_of_an_environment_argument": Case("envs.reverse_text.loss=gspo envs.reverse_text.loss.eps_hgih=0.3"),
    "loss_of_an_environment_out_of_range": Case("envs.reverse_text.loss=cispo envs.reverse_text.loss.eps_high=-1"),
    "loss_of_an_environment_corrects": Case(
        "env=[sums,reverse_text] envs.sums.loss=gspo envs.sums.loss.correction=mis sampling.top_p=0.9 loss=sft"
    ),
    "kl_target_of_one_of_two": Case("env=[sums,reverse_text] envs.sums.loss=sft loss.kl.beta=0.1 loss.kl.target_kl=0.01"),
    "role_that_is_none": Case(
        "loss.ce_coef=0.1 envs.reverse_text.observation_ce_weights.asistant=1 envs.reverse_text.observation_ce_weights.tool=0"
    ),
    "weights_in_no_loss": Case(
        "env=[sums,reverse_text,math] envs.sums.loss=opd ref.name=big envs.sums.loss_weights.policy=2 envs.math.loss_weights.ref_kl=2 "
        "envs.reverse_text.loss_weights.policy=0 envs.reverse_text.loss_weights.kl=1 envs.math.loss_weights.policy=-1"
    ),
    "kl_term_divided_by_nothing": Case(
        "loss=grpo loss.aggregate=group_token_mean loss.kl.beta=0.1 env=[sums,reverse_text] envs.sums.loss_weights.policy=0"
    ),
    "learning_without_cross_entropy": Case("envs.reverse_text.observation_ce_weights.user=1"),
    "cross_entropy_on_nothing": Case("loss.ce_coef=0.1"),
    "ratio_on_a_teachers_tokens": Case("envs.reverse_text.sampled_by=teacher teacher.base_url=[http://host:8000] teacher.model=big"),
    "deadline_of_a_teacher": Case(
        "envs.reverse_text.sampled_by=teacher envs.reverse_text.turn_timeout=5 teacher.base_url=[http://host:8000] teacher.model=big "
        "loss=sft loss.ce_coef=1"
    ),
    "player_that_is_not_there": Case("envs.reverse_text.sampled_by=teacher loss=sft loss.ce_coef=1"),
    "player_without_a_name": Case("envs.reverse_text.sampled_by=teacher loss=sft loss.ce_coef=1 teacher.base_url=[http://host:8000]"),
    "teacher_is_the_policy": Case("loss=opd teacher.base_url=[http://host:8000/v1] inference.base_url=[http://host:8000]"),
    "teacher_is_the_initial_policy": Case("loss=opd model=qwen3_0_6b ref.name=Qwen/Qwen3-0.6B"),
    "teacher_for_nobody": Case("teacher.base_url=[http://host:8000]"),
    "teacher_at_another_temperature": Case("loss=opd teacher.base_url=[http://host:8000] sampling.temperature=0.7"),
    "two_teachers": Case("loss=opd teacher.base_url=[http://host:8000] ref.name=a/teacher"),
    "self_teacher_that_reads_the_same": Case("loss=sdft inference.max_model_len=128"),
    "self_teacher_and_a_second_one": Case("loss=sdft teacher.demonstration=answer inference.max_model_len=128 ref.name=a/teacher"),
    "self_teacher_without_room": Case("loss=sdft teacher.demonstration=answer teacher.template=shown sampling.temperature=0.7"),
    "filter_over_several_agents": Case("loss=dapo envs.reverse_text.agents_per_group=all orchestrator.buffer.easy_threshold=0.9"),
    "demonstration_for_nobody": Case("teacher.demonstration=answer"),
    "teacher_that_follows": Case("ref.name=a/teacher ref.sync_interval=10"),
    "nothing_follows": Case("ref.sync_interval=10"),
    "thinking_interleaved": Case("model=qwen3_0_6b model.name=me/qwen3-tuned orchestrator.trajectory_strategy=interleaved"),
    "renderer_unknown": Case("model.renderer=qwen-3"),
    "parser_unknown": Case("model.tool_call_parser=hermez model.reasoning_parser=r1"),
    "parser_beside_a_renderer": Case("model=qwen3_0_6b model.tool_call_parser=hermes dry_run=true"),
    "template_beside_a_renderer": Case("model=qwen3_0_6b model.renderer=qwen3 model.chat_template=mine.jinja dry_run=true"),
    "model_folder_absent": Case("model=qwen3_0_6b model.name=./checkpoints/mine"),
    "varlen_on_cpu": Case("model.attention=varlen hardware=cpu"),
    "triton_on_cpu": Case("model.logprob_backend=triton model.liger=true hardware=cpu"),
    "adapters_out_of_range": Case("lora.rank=-1 lora.alpha=0 lora.dropout=-0.5"),
    "references_into_a_section_that_is_null": Case("model.warm_start=null"),
    "adapters_without_a_rank": Case("lora.alpha=8 lora.target_modules=[q_proj]"),
    "adapters_without_a_rank_with_a_default": Case("lora.alpha=32"),
    "adapters_of_float32_on_a_gpu": Case("hardware=gpu1_shared lora.rank=8 dry_run=true"),
    "adapters_set_twice": Case("lora.rank=8 +inference.vllm.max_lora_rank=32"),
    "adapters_with_a_reference_that_moves": Case("lora.rank=8 loss.kl.beta=0.1 ref.sync_interval=5"),
    "liger_neither_on_nor_off": Case("model.liger=maybe"),
    "liger_two_temperatures": Case(
        "model.logprob_backend=liger model.dtype=bfloat16 hardware=cpu env=[sums,reverse_text] envs.sums.sampling.temperature=0.5"
    ),
    "tensor_parallel_heads": Case("model=qwen3_8b hardware=node8 hardware.tensor_parallel=3 dry_run=true"),
    "tensor_parallel_gpus": Case("model=qwen3_8b hardware=node8 hardware.gpus_per_node=6 hardware.tensor_parallel=4 dry_run=true"),
    "layout_too_large": Case("model=qwen3_8b hardware=node8 hardware.inference_replicas=6 hardware.trainer_processes=4 dry_run=true"),
    "copies_of_unequal_size": Case("model=qwen3_8b hardware=node8 trainer.dp_replicate=3 dry_run=true"),
    "context_groups_of_unequal_size": Case("model=qwen3_8b hardware=node8 trainer.cp=3 dry_run=true"),
    "context_parallel_heads": Case("hardware=cpu hardware.trainer_processes=8 trainer.cp=8 dry_run=true"),
    "context_parallel_of_whole_sequences": Case(
        "hardware=cpu hardware.trainer_processes=2 trainer.cp=2 model.attention=rows trainer.compile=true dry_run=true"
    ),
    "tensor_groups_of_key_heads": Case("hardware=cpu hardware.trainer_processes=4 trainer.tp=4 dry_run=true"),
    "tensor_groups_of_undivided_heads": Case("model=olmoe_1b_7b hardware=node8 trainer.tp=2 dry_run=true"),
    "tensor_and_context_groups": Case("model=qwen3_8b hardware=node8 trainer.tp=2 trainer.cp=4 dry_run=true"),
    "tensor_groups_of_small_copies": Case("model=qwen3_8b hardware=node8 trainer.tp=2 trainer.dp_replicate=4 dry_run=true"),
    "expert_groups_without_experts": Case("model=qwen3_8b hardware=node8 trainer.ep=2 trainer.compile=true dry_run=true"),
    "expert_groups_of_experts": Case("model=qwen3_30b_a3b hardware=node8 trainer.ep=3 dry_run=true"),
    "expert_groups_of_ranks": Case("model=qwen3_30b_a3b hardware=node8 trainer.ep=8 dry_run=true"),
    "offload_on_a_cpu": Case("hardware=cpu trainer.fsdp_cpu_offload=true"),
    "optimizer_offload_on_a_cpu": Case("hardware=cpu trainer.optim_cpu_offload=true"),
    "offload_of_all_and_of_a_part": Case(
        "model=qwen3_8b hardware=node8 trainer.fsdp_cpu_offload=true trainer.optim_cpu_offload=true dry_run=true"
    ),
    "muon_in_host_memory": Case("model=qwen3_8b hardware=node8 optim=muon trainer.fsdp_cpu_offload=true dry_run=true"),
    "layout_too_small_for_the_servers": Case("model=qwen3_8b hardware=node8 hardware.inference_replicas=8 dry_run=true"),
    "renamed_key": Case("hardware.trainer_ranks=2"),
    "gpus_absent": Case("hardware=node8"),
    "gpus_too_few": Case("hardware=gpu2", gpus=1),
    "several_nodes_locally": Case("hardware=node8 hardware.nodes=2", gpus=8),
    "background_checkpoints_on_a_gpu": Case("ckpt.save_async=true hardware=gpu1_shared", gpus=1),
    "shared_gpu_full": Case("hardware=gpu1_shared inference.gpu_memory_utilization=0.9", gpus=1),
    "python_of_an_environment_is_a_folder": Case("envs.reverse_text.python=/tmp"),
    "best_by_a_metric_that_is_not": Case("eval.interval=50 ckpt.keep_best=eval/reverse_text/avg"),
    "environment_not_installed": Case("env.id=acme/word-ladder"),
    "no_environment": Case("~envs.reverse_text"),
    "no_weight": Case("envs.reverse_text.weight=0"),
    "logger_not_installed": Case("logger=[wandb,tensorboard]", absent=("wandb", "tensorboard")),
    "engine_option_owned": Case("inference.vllm.max-model-len=128"),
    "engine_option_unknown": Case("inference.vllm={blok_size:16,max-num-batched-tokens:512,zzz:1}"),
    "engine_option_that_changes_what_is_trained": Case(
        "inference.vllm={speculative_config:{method:ngram},kv_cache_dtype:fp8,data_parallel_size:2,hf_overrides:{head_dtype:model,x:1}}"
    ),
    "engine_option_on_cpu": Case("inference.vllm={enable_chunked_prefill:true,enable_expert_parallel:true,kv_cache_memory_bytes:9}"),
    "loss_argument": Case("loss.eps_hgih=0.3 optim.betas=[0.9] advantage.ddof=no loss.aggregate=mean"),
    "target_absent": Case("loss._target_=rlx.losses.grpo.grop optim._target_=acme.Lion"),
    "everything_at_once": Case(
        "trianer.compile=true seq_len=12 orchestrator.batch_size=100 hardware=gpu2 sampling.top_p=0.9", environ={"RLX_MAX_STEPS": "0"}
    ),
}


def run(case: Case, monkeypatch, tmp_path: Path) -> str:
    """The error text of a case."""
    for name, text in case.files.items():
        path = tmp_path / "my_conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("rlx.config.gpus.installed_gpus", lambda: case.gpus)
    if case.absent:
        from rlx.config.checks import run as checks

        is_installed = checks.is_installed
        monkeypatch.setattr(checks, "is_installed", lambda module: module not in case.absent and is_installed(module))
    argv = [case.argv] if " = " in case.argv else case.argv.split()
    with pytest.raises(ConfigError) as caught:
        compose(argv, case.environ)
    return str(caught.value).replace(str(tmp_path), "/home/you").replace(sys.executable, "/home/you/.venv/bin/python")


def verdict(text: str) -> list[list[str]]:
    """The keys of the schema that each problem names, without what it suggests, and what the user wrote."""
    command, _, report = text.partition("\n\n")
    typed = {word.lstrip("+~").partition("=")[0] for word in command.split() if "=" in word}
    found = []
    for problem in report.strip().split("\n\n"):
        words = {word.strip(".") for word in re.findall(r"[\w.]+", re.sub(r"Did you mean.*", "", problem))}
        named = {word for word in words if has_key(Config, word) and (f"{word}=" in problem or f"`{word}`" in problem)}
        found.append(sorted(named | (words & typed)))
    return sorted(found)


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_explained(name: str, monkeypatch, tmp_path: Path):
    case = CASES[name]
    report = run(case, monkeypatch, tmp_path)
    variables = "".join(f"{key}={value} " for key, value in case.environ.items())
    text = f"$ {variables}python train.py {case.argv}".rstrip() + f"\n\n{report}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") and (not path.exists() or verdict(path.read_text()) != verdict(text)):
        path.write_text(text)
    assert verdict(path.read_text()) == verdict(text)
    assert all(len(problem.splitlines()) <= 4 for problem in report.split("\n\n")), "a few lines each"


REMEDY = re.compile(r"(?<![\w.'])([a-z_][\w.]*)=(\[[^\]]*\]|[^\s,;()`]+)")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if " = " not in case.argv])
def test_a_remedy_can_be_typed(name: str, monkeypatch, tmp_path: Path):
    """Whatever `key=value` a `fix:` names is a key that exists with a value that it may have. Some remedies need another one with them."""
    case = CASES[name]
    report = run(case, monkeypatch, tmp_path)
    for key, value in REMEDY.findall(" ".join(re.findall(r"\n  fix: (.*)", report))):
        typed = value.rstrip(".:")
        if re.search(r"…|[A-Z]{2}", typed):  # a placeholder
            continue
        assert has_key(Config, key) or key in shipped_groups() or key.partition(".")[0] not in Config.__dataclass_fields__, key
        try:
            compose([*case.argv.split(), f"{key}={typed}"], case.environ)
        except ConfigError as error:
            new = [problem for problem in str(error).split("\n\n") if key in problem and problem not in report]
            assert not [problem for problem in new if re.search(r"unknown key|there is no|must be|cannot be parsed", problem)], new


def test_what_looks_like_those_mistakes_and_is_none_composes():
    for argv in (
        "reward.overlong_cache=13 envs.reverse_text.sampling.max_tokens=20",  # no environment uses the run's max_tokens, 12
        "loss=aipo loss.proximal=recompute loss.correction=mis",
        "loss=gspo loss.proximal=recompute loss.correction=seq_mis",
        "loss=gspo_token loss.proximal=recompute loss.correction=tis",
        "loss=masked_is loss.dual_clip=3",
        "loss=reinforce sampling.top_p=0.9",
        "loss=sdft teacher.demonstration=answer inference.max_model_len=128 ref.name=a/model loss.kl.beta=0.1",
        "env=[sums,math] model=qwen3_0_6b envs.sums.loss=opd ref.name=Qwen/Qwen3-0.6B",  # the initial policy holds one of two environments
        "loss=dapo advantage=max_rl reward.soft_overlong=false",
        "model=qwen3_0_6b orchestrator.trajectory_strategy=interleaved",  # has a renderer that keeps the reasoning
    ):
        compose(argv.split(), {})


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_the_command_line_ends_with_2_and_without_a_traceback(tmp_path: Path):
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "rlx.cli", "train", "seq_len=long", f"run.dir={tmp_path}/run"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "`seq_len` must be an integer: seq_len=long (command line)." in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
