"""Which of vLLM's options `inference.vllm` may set. This table is the source of truth: the check runs where vLLM is not installed.

Every option of the supported versions (0.32, 0.33) is of one kind; a test compares the table with the installed version:

- an rlx key sets it (`OWNED`);
- it changes what is trained, or nobody has shown that updates stay exact with it (`REFUSED`, `ON_CPU`);
- it is harmless (`HARMLESS`): speed, memory, logs, and routes that rlx does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.config.rules import Describe, check_of, problem
from rlx.config.schema import PlayRoot
from rlx.config.validate import Problem, closest, show


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names.split()}


OWNED = _by_name(  # option -> the key that sets it
    {
        "model.name": "model tokenizer",
        "model.dtype": "dtype lora_dtype",
        "model.trust_remote_code": "trust_remote_code",
        "model.chat_template": "chat_template",
        "model.chat_template_kwargs": "default_chat_template_kwargs",
        "model.tool_call_parser": "tool_call_parser tool_parser_plugin enable_auto_tool_choice",
        "model.reasoning_parser": "reasoning_parser reasoning_parser_plugin",
        "inference.max_model_len": "max_model_len",
        "inference.max_num_seqs": "max_num_seqs",
        "inference.gpu_memory_utilization": "gpu_memory_utilization device_memory_utilization",
        "inference.enforce_eager": "enforce_eager",
        "inference.host": "host uds",
        "inference.port": "port",
        "inference.api_key": "api_key",
        "orchestrator.max_concurrent": "max_num_queued_reqs max_num_queued_tokens",
        "hardware.tensor_parallel": "tensor_parallel_size device_ids",
        "seed": "seed",
        "lora.rank": "enable_lora max_loras max_cpu_loras max_lora_rank lora_modules",
        "lora.target_modules": "lora_target_modules",
        "weight_broadcast.type": "weight_transfer_config",
    }
)

REFUSED = _by_name(  # option -> why
    {
        "rlx sets it, and updates of the weights depend on it": (
            "worker_extension_cls worker_cls scheduler_cls middleware enable_scale_out tokens_only served_model_name"
        ),
        "the trainer needs log-probabilities at the sampling temperature": "logprobs_mode",
        "the server would add sampling defaults that the trainer does not know": "generation_config override_generation_config",
        "tokens would not be drawn from the policy's own distribution": (
            "logits_processors watermark_config diffusion_config reasoning_config enable_trace_replay"
        ),
        "nobody has compared sampling that is divided between GPUs with the trainer": "enable_batch_sharded_sampling",
        "speculative decoding was not compared with the trainer, and an update does not reach the draft model": (
            "speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics"
        ),
        "tokens would come from rounded weights, and the trainer trains others": (
            "quantization quantization_config allow_deprecated_quantization"
        ),
        "the KV cache or a layer's state would be rounded, so log-probabilities differ from the trainer's": (
            "kv_cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm replayssm_buffer_len "
            "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds kv_sharing_fast_prefill"
        ),
        "the server would compute another model than the trainer": (
            "hf_overrides hf_config_path config_format tokenizer_mode revision code_revision tokenizer_revision model_impl runner convert "
            "model_class_overrides pooler_config attention_config additional_config disable_sliding_window io_processor_plugin"
        ),
        "the server would load other weights than the folder's": (
            "load_format safetensors_load_strategy model_loader_extra_config ignore_patterns enable_ep_weight_filter"
        ),
        "weights that vLLM moves or copies by itself are not those that an update has verified": (
            "monokernel enable_eplb eplb_config expert_placement_strategy engram_config enable_sleep_mode sleep_mode_backend "
            "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_nccl_comm_suspend enable_cumem_allocator "
            "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params"
        ),
        "keys and values outside the engine outlive an update": (
            "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config ec_manager_config"
        ),
        "an update reaches only the first engine of a server; hardware.inference_replicas starts more servers": (
            "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_start_rank data_parallel_address "
            "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
            "data_parallel_multi_port_external_lb data_parallel_supervisor_port dp_supervisor_probe_interval_s "
            "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold dp_sync_interval disable_nccl_for_dp_synchronization "
            "prefill_schedule_interval enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config headless"
        ),
        "an update gives its version only to the API process that it reaches": "api_server_count",
        "updates were verified with tensor parallelism on one host only": (
            "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size dcp_comm_backend dcp_q_replicate "
            "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_hc_sp nnodes node_rank master_addr master_port "
            "distributed_executor_backend ray_workers_use_nsight"
        ),
        "adapters were compared with the trainer without it": (
            "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels "
            "enable_tower_connector_lora default_mm_loras"
        ),
        "environments may ask for stop strings, and those need the tokenizer": "skip_tokenizer_init",
        "nothing in rlx reads what it adds to requests or responses": (
            "enable_prompt_embeds enable_return_routed_experts return_sampling_mask aux_output_config"
        ),
        "rlx trains on text alone": (
            "allowed_local_media_path allowed_media_domains enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_type "
            "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
            "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
            "interleave_mm_strings video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
            "mm_device_do_normalize enable_flash_late_interaction trust_request_mm_kwargs enable_shm_tensor_arena disable_chunked_mm_input"
        ),
        "rlx reads the server's statistics": "disable_log_stats",
        "rlx speaks HTTP to its servers, at their root, without encryption; a proxy of yours goes into inference.base_url": (
            "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh root_path grpc grpc_port"
        ),
        "it opens a port that does not ask for the run's secret": "kv_events_config",
        "a web page in somebody's browser has no business with the run's servers": (
            "allow_credentials allowed_origins allowed_methods allowed_headers"
        ),
        "it lets the server run code that the model writes": "tool_server",
        "every user of the host can read a command line; export HF_TOKEN instead": "hf_token",
        "the options in that file would not be checked; write them here": "config",
    }
)

ON_CPU = {  # option -> why not there
    "enable_chunked_prefill": "vLLM's CPU engine ends at a request with a seed whose prefill is cut, as every update cuts it",
    "enable_expert_parallel": "vLLM's CPU kernel of experts reads beyond the experts that it has",
    "kv_cache_memory_bytes": "on a CPU, inference.kv_cache_gb is the size of the cache",
}

SAME = {  # refused option -> values with which it changes nothing
    "logprobs_mode": ("processed_logprobs",),
    "generation_config": ("vllm",),
    "kv_cache_dtype": ("auto",),
    "config_format": ("hf",),
    "load_format": ("safetensors",),
    "safetensors_load_strategy": ("lazy", "eager", "prefetch"),
    "model_impl": ("auto", "vllm"),
    "pipeline_parallel_size": (1,),
    "distributed_executor_backend": ("mp", "uni"),
    "enable_chunked_prefill": (False,),
    "enable_expert_parallel": (False,),
}

PARTS = {  # refused option -> keys of it that are harmless
    "hf_overrides": ("head_dtype",),
    "attention_config": ("backend", "backend_per_kind", "flash_attn_version", "mla_prefill_backend", "use_trtllm_attention"),
}

HARMLESS = _by_name(  # option -> what it is about
    {
        "scheduling and memory": (
            "max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs long_prefill_token_threshold async_scheduling "
            "long_prefill_token_threshold_adaptive scheduling_policy enable_chunked_prefill scheduler_reserve_full_isl "
            "watermark disable_hybrid_kv_cache_manager stream_interval block_size kv_cache_memory_bytes num_gpu_blocks_override "
            "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit "
            "swa_bounded_replay mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint enable_dbo ubatch_size "
            "dbo_decode_token_threshold dbo_prefill_token_threshold limit_mm_per_prompt language_model_only skip_mm_profiling "
            "mm_processor_cache_gb"
        ),
        "kernels and compilation": (
            "attention_backend mamba_backend mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend kda_decode_backend "
            "moe_backend linear_backend sparse_indexer_topk_backend all2all_backend ir_op_priority kernel_config "
            "enable_flashinfer_autotune compilation_config cudagraph_capture_sizes max_cudagraph_capture_size "
            "optimization_level performance_mode disable_cascade_attn use_fp64_gumbel disable_custom_all_reduce "
            "enable_expert_parallel"
        ),
        "processes and loading": (
            "distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus "
            "max_parallel_loading_workers download_dir safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location renderer_num_workers shutdown_timeout "
            "watchdog_config"
        ),
        "logs and metrics": (
            "uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints log_level logging_config "
            "log_config_file max_log_len log_error_stack enable_log_requests enable_log_outputs enable_log_deltas "
            "aggregate_engine_logging enable_request_id_headers fail_on_environ_validation show_hidden_metrics_for_version "
            "otlp_traces_endpoint collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets "
            "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
            "jit_monitor_mode jit_monitor_verbose profiler_config enable_server_load_tracking enable_per_request_metrics "
            "fingerprint_mode fingerprint_value"
        ),
        "routes that rlx does not use, and limits of all": (
            "max_logprobs structured_outputs_config chat_template_content_format trust_request_chat_template response_role "
            "return_tokens_as_token_ids exclude_tools_when_tool_choice_none tool_strict_level enable_prompt_tokens_details "
            "enable_force_include_usage sse_keep_alive_interval enable_tokenizer_info_endpoint cohere_is_reasoning_model "
            "cohere_format anthropic_disabled_thinking_effort reasoning_effort_map disable_fastapi_docs enable_offline_docs "
            "h11_max_incomplete_event_size h11_max_header_count"
        ),
    }
)


@check_of(PlayRoot)
def options(cfg: PlayRoot, of: Describe) -> Iterator[Problem]:
    for name, value in cfg.inference.vllm.items():
        if (found := _wrong(name, value, cfg.hardware.device)) is not None:
            yield problem(found[0], [f"inference.vllm.{name}"], found[1], of)


def _wrong(name: str, value: Any, device: str) -> tuple[str, str] | None:
    """What is wrong with an option, and the fix; None if nothing is."""
    plain = name.replace("-", "_")
    if plain in OWNED:
        return "rlx has a key of its own for this option of vLLM", OWNED[plain]
    if (why := (ON_CPU.get(plain) if device == "cpu" else None) or REFUSED.get(plain)) is not None:
        harmless = value in SAME.get(plain, ()) or (isinstance(value, dict) and {*value} <= {*PARTS.get(plain, ())})
        may = PARTS.get(plain) or SAME.get(plain, ())
        return None if harmless else (why, f"leave it out{', or use only ' + ', '.join(map(show, may)) if may else ''}")
    if name in HARMLESS:
        return None
    return "rlx knows no option of vLLM with this name", " or ".join([*closest(plain, [*HARMLESS, *OWNED, *REFUSED], 1), "leave it out"])
