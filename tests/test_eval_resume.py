"""What may change when `rlx eval` resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_eval_command import config_of

from rlx.config.errors import ConfigError
from rlx.config.schema import RunConfig
from rlx.plan.make import make_plan
from rlx.runs.claim import create


def test_a_resumed_evaluation_may_have_other_operational_keys_and_no_others(tmp_path: Path) -> None:
    cfg = replace(config_of("env=sums"), dry_run=False, run=RunConfig(name="run", dir=str(tmp_path / "run")))
    create(cfg, [], make_plan(cfg, tmp_path / "run"))[1].close()
    play = replace(cfg.orchestrator, max_concurrent=3, env_workers=2)
    client = replace(cfg.client, timeout=5.0, max_retries=1, api_key_var="K")
    again = replace(cfg, resume="latest", orchestrator=play, client=client)
    create(again, [], make_plan(again, tmp_path / "run"))[1].close()
    other = replace(again, orchestrator=replace(play, max_retries=9))
    with pytest.raises(ConfigError, match=r"orchestrator.max_retries: \d+ ≠ 9\n.*; or begin anew, run.name=NEW$"):
        create(other, [], make_plan(other, tmp_path / "run"))
