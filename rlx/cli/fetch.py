"""`rlx fetch`: everything that a configuration needs from the hub, into the cache, before a job on nodes without internet."""

from __future__ import annotations

SUMMARY = "fetch the model, data and environments' data of a configuration into the cache, before a job"
OF = ("train", "sft", "eval", "synthesize")


def help_text() -> str:
    return f"""\
rlx fetch: {SUMMARY}.

usage: rlx fetch [{" | ".join(OF)}] [GROUP=OPTION …] [key=value …]        default: train

  rlx fetch launcher=slurm slurm=my_cluster model=qwen3_8b env=math
  rlx fetch sft launcher=slurm slurm=my_cluster model=qwen3_8b data.name=team/chats

Give the arguments of the run. The cache is slurm.hf_home of the cluster's file, else that of this shell (HF_HUB_CACHE, HF_HOME). Run it
where there is internet and where the nodes' cache can be written: on a login node, say. An environment is loaded once, which puts
the data sets that it loads into the cache. What is there already is not fetched again. Private models need HF_TOKEN or `hf auth login`.

exit codes: 0 everything is there; 2 something cannot be fetched"""


def run(argv: list[str]) -> int:
    import os
    from dataclasses import replace

    from rlx.cli.commands import BY_NAME
    from rlx.config.load import compose
    from rlx.plan.environment import hub_variables
    from rlx.preflight.env_probe import environments_of, lines_of
    from rlx.preflight.hub import fetch_models, hub_cache, use_cache

    name, rest = (argv[0], argv[1:]) if argv and argv[0] in OF else ("train", argv)
    command = BY_NAME[name]
    composed = compose([*rest, "dry_run=true"], None, command.root)
    os.environ.pop("HF_HUB_OFFLINE", None)
    use_cache({key: value for key, value in hub_variables(composed.cfg).items() if key != "HF_HUB_OFFLINE"})
    print(f"cache {hub_cache()}", flush=True)
    cfg = command.resolve(composed.cfg)  # of `rlx sft`: this loads the data sets
    for model, folder in fetch_models(cfg).items():
        print(f"model {model}: {folder}", flush=True)
    (environments,) = environments_of([replace(cfg, launcher=replace(cfg.launcher, check_envs=True))], anew=True)
    for line in lines_of(environments):
        print(f"environment {line}", flush=True)
    return 0
