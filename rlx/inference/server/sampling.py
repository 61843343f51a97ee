"""Sampling parameters in vLLM's terms."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind, SamplingParams

from rlx.inference.protocol import Sampling


def sampling_params(sampling: Sampling) -> SamplingParams:
    """vLLM's parameters for a policy request: log-probabilities of the sampled tokens only, and no text unless it is searched for stops."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias or None,
        logprobs=0,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
