"""The rules for commands that play with a model and train none (`rlx eval`): endpoints, weights, resuming."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlx.config.rules import Show, rule


@rule("client.base_url", "weights_dir", "inference.base_url")
def one_model(cfg: Any, of: Show) -> Iterator[str]:
    """`cfg`: `rlx.config.schema_eval.PlayWithModel`, here and below."""
    if cfg.client.base_url is None:
        return
    if not cfg.client.base_url.startswith(("http://", "https://")):
        yield f"`client.base_url` must be an address like https://host/v1: {of('client.base_url')}."
    if cfg.weights_dir is not None:
        yield f"an endpoint serves its own weights: {of('client.base_url')}, {of('weights_dir')}.\nRemove one of the two."
    if cfg.inference.base_url:
        yield (
            f"the model answers either at an endpoint or on rlx's servers: {of('client.base_url')}, {of('inference.base_url')}.\n"
            "Remove one of the two."
        )


@rule("client", "model.name", "model.warm_start")
def model_of_endpoint(cfg: Any, of: Show) -> Iterator[str]:
    if cfg.client.base_url is not None and cfg.model.prepared:
        yield (
            f"no endpoint serves a model that rlx makes itself (model.warm_start): {of('client.base_url')}, {of('model.name')}.\n"
            "Use model=endpoint model.name=NAME, with the endpoint's name for the model."
        )


@rule("client.base_url", "client.api_key_var", "dry_run")
def key_of_endpoint(cfg: Any, of: Show) -> Iterator[str]:
    variable = cfg.client.api_key_var
    if cfg.client.base_url is not None and variable is not None and not cfg.dry_run and not os.environ.get(variable):
        yield (
            f"the key of {cfg.client.base_url} is missing: the environment variable {variable} is not set ({of('client.api_key_var')}).\n"
            "Set the variable, name another one, or use client.api_key_var=null for an endpoint that asks for no key."
        )


@rule("client", "resume")
def no_checkpoints(cfg: Any, of: Show) -> Iterator[str]:
    if cfg.resume not in (None, "latest"):
        yield f"this command has no checkpoints, so it can only continue where it was: {of('resume')}. Use resume=latest."
