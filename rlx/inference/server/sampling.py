"""Sampling parameters in vLLM's terms."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind, SamplingParams

from rlx.inference.protocol import Sampling

# More than these end vLLM's engine on a GPU, and with it every request of the server (`v1/worker/gpu/sample/` and `states.py`).
MOST_BIASES = 1024
MOST_STOPS = 128  # token ids that end an answer, if the answer has a least length
MOST_TOKENS = 2**31 - 1  # of a prompt and its answer
SEEDS = range(-(2**63), 2**63)


def refuse_what_ends_an_engine(parameters: SamplingParams, prompt: int) -> None:
    """Raise ValueError for parameters that no engine on a GPU takes. `prompt`: its number of tokens."""
    biases, stops = len(parameters.logit_bias or ()), len(set(parameters.stop_token_ids or ()) | parameters.all_stop_token_ids)
    if biases > MOST_BIASES:
        raise ValueError(f"logit_bias has {biases} entries; engines on GPUs take {MOST_BIASES} at most")
    if parameters.min_tokens and stops > MOST_STOPS:
        raise ValueError(f"min_tokens with {stops} token ids that end an answer; engines on GPUs take {MOST_STOPS} at most")
    if prompt + (parameters.max_tokens or 0) > MOST_TOKENS:
        raise ValueError(f"max_tokens is {parameters.max_tokens}; engines on GPUs take {MOST_TOKENS} with the prompt at most")
    if parameters.seed is not None and parameters.seed not in SEEDS:
        raise ValueError(f"seed is {parameters.seed}; it must fit into 64 bits with a sign")


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
