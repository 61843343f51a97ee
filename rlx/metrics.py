"""Every metric name with its meaning and unit, and the writer and reader of `metrics.jsonl`.

The file has one flat JSON object per line, each appended whole. `time` and fields under `time/` and `perf/` are wall-clock measurements;
all other fields are reproducible. `docs/metrics.md` is generated from `METRICS`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rlx.paths import listed

LONGEST = 1 << 24  # bytes of a line: a file of another user may have no end of it

METRICS: dict[str, str] = {
    # orchestrator
    "reward/mean": "mean reward over all rollouts of the step's groups, before filtering",
    "reward/std": "standard deviation of the same rewards",
    "reward/<env>/mean": "the same mean for one environment; this and its other metrics appear only in steps with its groups",
    "reward/<env>/<function>": "mean of one reward function of an environment, unweighted",
    "env/<env>/share": "share of the step's groups, before filtering, that came from this environment",
    "env/<env>/trained_share": "share of the groups trained on that came from this environment; weights and replacements aim at it",
    "buffer/<env>/<pool>": "examples in its pool `normal`, `easy` or `hard`; only with thresholds in `orchestrator.buffer`",
    "env/<env>/<metric>": "mean of one of the environment's own metrics",
    "env/<env>/requests_beside": "requests of a rollout that are not in its trajectory (judges, planners, user simulators): not trained",
    "env/<env>/reward_error": "share of its rollouts trained on though a reward function raised and scored 0 (`envs.NAME.on_reward_error`)",
    "env/<env>/timed_out": "share of its rollouts that ran out of time and count with the reward 0 (`envs.NAME.on_timeout=zero`)",
    "batch/groups": "groups trained on",
    "batch/rollouts": "rollouts trained on",
    "batch/short_groups": "groups of which a rollout failed or timed out, so that fewer are trained on (`orchestrator.min_group`)",
    "batch/samples": "training samples (a rollout or a row gives several when its turns do not share a prefix)",
    "batch/loss_tokens": "trainable tokens",
    "batch/overlong_frac": "share of the groups' sampled tokens that `loss.mask_overlong` dropped",
    "batch/tokens": "tokens, prompts included",
    "batch/zero_advantage_frac": "share of groups whose advantages are all 0",
    "length/completion_mean": "sampled tokens per rollout, mean",
    "length/completion_max": "sampled tokens per rollout, largest",
    "length/truncated_frac": "share of rollouts cut by a length limit",
    "filter/<rule>": "groups of the step that a rule of `orchestrator.difficulty_filter` dropped; only for active rules",
    "rollouts/dropped_<cause>": "rollouts discarded since the run began, by whole groups: off_policy (stale); error, timeout (of members)",
    "rollouts/failed_<cause>": "failed rollout attempts since the run began, by cause: timeout, reward_raised, prompt_too_long, …",
    "teacher/unscored": "samples left out of the batch because the teacher did not score them by `teacher.deadline`",
    "teacher/unscored_tokens": "sampled tokens of these samples",
    "teacher/retries": "requests to the teacher that failed and were made again",
    "workers/replayed": "requests to environment workers sent again since this attempt began, because their worker ended",
    "workers/replaced_<cause>": "environment workers replaced since this attempt began, by cause: died, timeout, memory",
    "time/rollout_mean": "seconds from the start of a rollout to its reward, mean",
    "time/rollout_max": "largest of the same",
    "time/wait_rollouts": "seconds the orchestrator waited for rollouts to complete the batch",
    "time/wait_weights": "seconds the orchestrator waited for new weights",
    "time/teacher": "seconds for which the complete batch waited for the teacher, which scores groups as they finish",
    "time/update_weights": "seconds until all servers had the new weights",
    "time/step": "seconds of the step in this source",
    "time/first_token": "seconds until the first token of a new prompt under the load, mean; only with bench_role=inference",
    "perf/rollouts_per_second": "finished rollouts per second",
    "perf/inference_tokens_per_second": "sampled tokens per second",
    "perf/prompt_tokens_per_second": "prompt tokens of completed requests per second, cached ones included; only with bench_role=inference",
    "perf/in_flight": "rollouts in flight when the step's batch was complete",
    "perf/max_concurrent": "most rollouts in flight: `orchestrator.max_concurrent`, or what the engines can use at that moment",
    "perf/env_worker_memory_gb": "resident memory of the largest environment worker and of the processes that it has started, GiB",
    "perf/waiting_for_workers": "rollouts that wait until their environment's worker has computed for others; 0 while the workers keep up",
    "perf/cpu_ms_per_rollout": "CPU time of the orchestrator process per finished rollout, milliseconds",
    # trainer
    "loss/policy": "the objective, aggregated over the global batch",
    "loss/kl": "the KL term, weighted",
    "loss/entropy": "the entropy term, weighted",
    "loss/total": "the minimised sum",
    "loss/nll": "mean negative log-probability of a trained token, nats; only for supervised data",
    "loss/perplexity": "exp of that",
    "policy/entropy": "mean entropy of the policy over trainable tokens, nats",
    "policy/clip_frac_low": "share of trainable tokens (sequences for gspo and rloo) clipped at the lower bound",
    "policy/clip_frac_high": "the same at the upper bound",
    "policy/ratio_mean": "mean importance ratio against the proximal policy",
    "policy/ratio_min": "smallest importance ratio",
    "policy/ratio_max": "largest importance ratio",
    "policy/ess": "effective sample size as a share of the tokens, (Σw)² / (N Σw²). w is a token's factor of A ∇log π in the objective, "
    "corrections included, and 0 for clipped or dropped tokens",
    "policy/masked_frac": "share of trainable tokens that the objective or its correction dropped. Those dropped by `loss.mask_overlong` "
    "do not reach the trainer: `batch/overlong_frac`",
    "mismatch/kl": "k3 estimate of KL between trainer and inference on the sampled tokens, nats",
    "mismatch/abs_logp_diff_mean": "mean |log-probability by the trainer − by inference|, nats",
    "mismatch/abs_logp_diff_max": "largest of the same",
    "mismatch/seq_abs_logp_diff_mean": "mean over sequences of |mean over tokens of trainer − inference|, nats: how far the "
    "geometric mean of a sequence's ratios is from 1; one that is split between micro-batches counts with the sum of its parts",
    "ref/kl": "k3 estimate of KL between trainer and reference model on the sampled tokens, nats; only with a reference",
    "ref/beta": "weight of the KL term in this step; only with a reference",
    "loss/ce": "the cross-entropy term on tokens with a weight for it, weighted; only if an objective has `ce_coef`",
    "loss/<envs>/total": "what the objective of these environments adds to the minimised sum; only with several objectives",
    "ce/nll": "mean −log-probability of the tokens of that term, nats, unweighted",
    "ce/tokens": "tokens of that term",
    "teacher/kl": "mean log-probability by the policy − by the teacher on sampled tokens, nats: the reverse KL. Only with a teacher",
    "optim/grad_norm": "global gradient norm before clipping",
    "optim/lr": "learning rate",
    "off_policy/lag_mean": "mean staleness of the sampled tokens, in policy versions",
    "off_policy/lag_max": "largest staleness of a trained token, in policy versions",
    "time/wait_batch": "seconds the trainer waited for the batch",
    "time/forward_backward": "seconds of forward and backward, including scoring by the old policy and the reference",
    "time/optimizer": "seconds of remaining gradient reduction, clipping and optimizer",
    "time/broadcast": "seconds that the step waited for weights: for the previous version to be written, and for copying this one",
    "time/send_weights": "seconds that sending the previous version to the servers without files held the trainer; 0 over files",
    "time/write_weights": "seconds of checksums and files of the previous version, written during this step; 0 in the first",
    "perf/tokens_per_second": "trained tokens, prompts included, per second of forward, backward and optimizer, without waiting",
    "perf/compute_frac": "share of the trainer's step in forward, backward and optimizer; the rest is waiting and writing",
    "perf/runs": "runs of a shared trainer whose batches were trained in the same step; the other `perf/…` values of each, "
    "except `perf/compute_frac`, are those of that whole step",
    "perf/tflops": "10¹² floating-point operations of the model per second and rank, by the count of `perf/mfu`; a row without backward "
    "counts its forward alone. With bench_role=inference: of the servers' forward, per device",
    "perf/mfu": "share of the device's dense 16-bit peak; attention counted as if not causal, as most published numbers are. Only on GPUs "
    "whose peak is known",
    "perf/mfu_causal": "the same with the causal half of attention alone",
    "perf/peak_memory_gb": "peak memory of a trainer rank's device, GiB, of the rank that has the highest; on CPU the largest resident "
    "memory of its process so far. With bench=true also of the servers' devices (`inference`) and of the orchestrator's process",
    "perf/peak_memory_rank": "that rank",
    "perf/imbalance": "work of the costliest of the rows that the ranks compute at a time, over their mean; 1: no rank waits for another. "
    "Work is the count of `perf/mfu_causal`: matrices for each token, and attention, which grows with Σ n². Rows are balanced by it",
    "perf/imbalance_attention": "the same of Σ n² alone, over the samples of each row",
    "data/epoch": "passes over the data sets so far; with this step",
    "data/overlong": "samples of the step left out because they are longer than `seq_len`",
    "data/truncated": "samples of the step cut to `seq_len`; only with data.on_too_long=truncate",
    "data/refused": "rows of the step left out because they cannot be marked exactly; only with data.on_bad_row=skip",
    "data/<set>/rows": "rows of the step from one of several data sets",
    # inference
    "perf/servers": "servers that responded when the step's batch was complete",
    "perf/kv_cache_usage": "share of the KV cache in use at that moment, mean of the servers (with bench_role=inference, this and "
    "the next two: mean over the step)",
    "perf/running": "requests being decoded at that moment",
    "perf/waiting": "requests queued at that moment",
    "perf/answered": "requests that the servers have finished since they started, sum of the servers",
    "perf/preemptions": "requests preempted for lack of KV cache since the server started, sum of the servers; those that an update "
    "interrupts are not counted",
    "perf/prefix_cache_hits": "share of the prompts' tokens since the servers started that were not computed, because they were in the "
    "cache: of another completion of the group, or of the conversation so far",
    "perf/weights_compared": "share of the served weights that the last full compare with the published files covered, of the server where "
    "it is smallest (docs/servers.md); 0 before the first, with adapters, and with weights from memory",
    "perf/device_memory_gb": "memory of a server's GPU, GiB; only with bench=true",
    # eval: one record an evaluation; its step is the policy version
    "eval/<env>/avg@<n>": "mean reward of an evaluation: n rollouts of each example. A failed rollout scores 0",
    "eval/<env>/pass@<k>": "probability that at least one of k rollouts of an example passes (`eval.pass_threshold`), by the unbiased "
    "estimator; k = 1, 2, 4, … up to n",
    "eval/<env>/<score>_low": "lower end of the 95 % confidence interval of `avg@<n>` or `pass@<k>`, over examples",
    "eval/<env>/<score>_high": "its upper end",
    "eval/<env>/examples": "examples evaluated",
    "eval/<env>/newest_version": "the newest policy version that sampled a token of the evaluation, which began at the version of its "
    "step; only where updates went on meanwhile (`eval.pins`)",
    "eval/<env>/error_frac": "share of rollouts that failed, after retries",
    "eval/<env>/truncated_frac": "share of rollouts cut by a length limit",
    "eval/<env>/completion_mean": "sampled tokens per rollout, mean",
    "eval/<env>/reward/<function>": "mean of one reward function over the rollouts that did not fail, unweighted",
    "eval/<env>/metric/<metric>": "mean of one of the environment's own metrics over the same rollouts",
    "eval/attested": "share of the served weights that the last full compare with the trainer's files covered (`rlx eval`)",
    "time/evaluation": "seconds of the evaluation, concurrent with training",
    "time/wait_evaluation": "seconds for which the evaluation delayed the next update of the servers (`rlx train`)",
    # val: one record a validation of `rlx sft`; its step is the policy version
    "val/loss": "mean negative log-probability of a trained token on the rows of `val`, nats",
    "val/perplexity": "exp of that",
    "val/loss_tokens": "trained tokens of these rows",
    "val/samples": "their samples",
    "val/overlong": "samples left out of the validation because they are longer than `seq_len`",
    "val/truncated": "samples of the validation cut to `seq_len`; only with data.on_too_long=truncate",
    "val/refused": "rows left out of the validation because they cannot be marked exactly; only with data.on_bad_row=skip",
    "time/validation": "seconds of the validation",
}


class MetricsWriter:
    """Appends the records of one source to a run's `metrics.jsonl`."""

    def __init__(self, path: Path, source: str) -> None:
        self.source, self._path = source, path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one record in one system call. Raises OSError if it cannot be written whole (a full disk)."""
        record = {"step": step, "source": self.source, "time": time.time(), **{k: float(values[k]) for k in sorted(values)}}
        line = (json.dumps(record) + "\n").encode()
        written = os.write(self._fd, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a record of step {step} could be written", str(self._path))

    def close(self) -> None:
        os.close(self._fd)


def read_metrics(path: Path, offset: int = 0) -> Iterator[tuple[dict, int]]:
    """Yield `(record, offset after it)` for every complete line from `offset` on. Yields nothing if there is no file yet.

    Corrupt lines (cut by a full disk, with another process's record appended) are skipped. Resuming a run warns about them.
    """
    # Of a run on several hosts another host makes the file, so its name is not looked up before it is listed or was read.
    try:
        file = path.open("rb") if offset or (listed(path) and path.is_file()) else None  # no pipe
    except FileNotFoundError:
        file = None
    if file is None:
        return
    with file:
        file.seek(offset)
        for line in iter(partial(file.readline, LONGEST), b""):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("source"), str) and isinstance(record.get("step"), int):
                yield record, offset
