"""`rlx push RUN OWNER/NAME`: upload a version of a run's weights to the Hugging Face hub, with a model card made of its record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.runs.run import Run

SUMMARY = "upload a run's weights to the Hugging Face hub, with a model card"


def help_text() -> str:
    return f"""\
rlx push: {SUMMARY}.

usage: rlx push RUN OWNER/NAME [--step N] [--private] [--dry-run]

  --step N               which weights; default: the newest version
  --dry-run              print the card; upload nothing

  rlx push outputs/mine me/my-model

The folder is weights/step_N, as vLLM and transformers load it, and README.md: what was trained on what, rewards and evaluations, the
command, the commit, and reproduce.sh. The hub's token is the one of `hf auth login`, or $HF_TOKEN."""


def run(argv: list[str]) -> int:
    from pathlib import Path

    from huggingface_hub import HfApi

    from rlx.cli.arguments import Parser
    from rlx.config.errors import ConfigError
    from rlx.config.strangers import is_mine
    from rlx.runs.run import Run
    from rlx.weights.files import WeightsError, verify, versions

    parser = Parser("push")
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--step", type=int)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(argv)
    found = Run.open(given.run)
    there = versions(found.paths.weights)
    step = given.step if given.step is not None else max(there, default=None)
    if step not in there:
        raise ConfigError(f"{found.root} has no weights of step {step}; it has {', '.join(map(str, there)) or 'none'}.\n  fix: --step N")
    folder = found.paths.weights / f"step_{step}"
    try:
        known = verify(folder)
    except WeightsError as error:
        raise ConfigError(f"{folder} is damaged: {error}\n  fix: --step N of another version") from error
    text = card(found, step, given.name)
    if given.dry_run:
        print(text)
        return 0
    hub = HfApi()
    hub.create_repo(given.name, private=given.private, exist_ok=True)
    if given.private and not hub.repo_info(given.name).private:
        raise ConfigError(f"{given.name} is there already, and it is public.\n  fix: another name, or make it private first")
    message, files = f"step {step} of {found.name}", [*known["files"], "COMPLETE"]  # and nothing else that lies there
    hub.upload_folder(repo_id=given.name, folder_path=folder, allow_patterns=files, commit_message=message)
    if is_mine(found.root):  # readers of the card are told to run it
        hub.upload_file(repo_id=given.name, path_or_fileobj=found.paths.reproduce.read_bytes(), path_in_repo="reproduce.sh")
    hub.upload_file(repo_id=given.name, path_or_fileobj=text.encode(), path_in_repo="README.md")
    print(f"https://huggingface.co/{given.name}")
    return 0


def card(run: Run, step: int, name: str) -> str:
    """The model card of a version, from the run's configuration, metrics and provenance."""
    import shlex
    from pathlib import Path

    import yaml

    from rlx.config.checks.run import is_path

    cfg, record, history = run.config, run.provenance or {}, run.history
    model, adapter = getattr(cfg, "model", None), bool(getattr(cfg, "lora", None) and cfg.lora.enabled)  # type: ignore[union-attr]
    base = None if model is None or model.warm_start is not None or is_path(model.name) or Path(model.name).is_dir() else model.name
    head = {"library_name": "peft" if adapter else "transformers", "tags": ["rlx", "reinforcement-learning"], "base_model": base}
    rows = {
        "trained from": base or "a model of a folder",
        "environments": ", ".join(getattr(cfg, "envs", None) or ()),
        "objective": (getattr(cfg, "loss", None) or {}).get("_target_"),
        "steps": step,
        "seed": cfg.seed if cfg is not None else None,
    }
    records = sorted(history.records["orchestrator"].items())
    rewards = [each["reward/mean"] for at, each in records if at < step and "reward/mean" in each]
    if rewards:
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        rows["mean reward, first and last 5 steps"] = f"{first:.3f} → {last:.3f}"
    rows |= {metric: f"{values[step]:.3f}" for metric, values in history.scores().items() if step in values}
    rows |= {"rlx": record.get("rlx"), "commit": record.get("source", {}).get("commit"), "date": record.get("time")}
    front = yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value not in (None, ""))
    command = shlex.join(map(str, record.get("command") or []))
    return f"---\n{front}---\n\n# {name.rpartition('/')[2]}\n\n| | |\n| --- | --- |\n{table}\n\n```\n{command}\n```\n"
