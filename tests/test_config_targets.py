"""Open nodes: what they build and what their signature shows. Also: no value of any key ends in a traceback."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from rlx.config.composition import compose_tree
from rlx.config.errors import ConfigError
from rlx.config.load import checked, compose, instantiate
from rlx.config.schema import Config
from rlx.config.signatures import signature_of
from rlx.config.validate import convert, leaves

pytestmark = pytest.mark.slow

MODULE = """
import functools

class Scale:
    def __init__(self, factor: float, offset: float = 0.0):
        self.factor, self.offset = factor, offset

class Child(Scale):
    pass

def loss(tokens, *, scale: "Scale | None" = None, eps: float = 0.2, names: list[str] | None = None):
    return scale, eps

def any_keys(tokens, **options):
    return options

@functools.lru_cache
def wrapped(tokens, *, eps=0.1):
    return eps

made = functools.partial(loss, eps=0.4)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch) -> str:
    """A user's own module."""
    (tmp_path / "acme_loss.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "acme_loss"
    sys.modules.pop("acme_loss", None)


def test_a_function_is_bound_and_a_class_is_built(module: str):
    bound = instantiate({"_target_": f"{module}.loss", "eps": 0.3, "scale": {"_target_": f"{module}.Scale", "factor": 2}})
    assert isinstance(bound, functools.partial)
    scale, eps = bound("tokens")
    assert (scale.factor, scale.offset, eps) == (2, 0.0, 0.3)


def test_a_class_that_lacks_arguments_waits_for_them(module: str):
    node = {"_target_": f"{module}.Scale", "offset": 1.0}
    assert instantiate(node)(3).factor == 3
    assert instantiate(node, factor=4).factor == 4


def test_a_users_own_objective_is_imported_and_its_arguments_checked(module: str):
    cfg = compose([f"loss._target_={module}.loss", "loss.eps=0.1", "~loss.eps_low", "~loss.eps_high"], {}).cfg
    assert cfg.loss["eps"] == 0.1
    with pytest.raises(ConfigError) as caught:
        compose([f"loss._target_={module}.loss", "loss.eps=high", "loss.names=[a,true]"], {})
    for part in (
        "unknown key loss.eps_high=0.2",
        "loss takes scale, eps, names, aggregate",
        "`loss.eps` must be a number",
        "`loss.names` must be a string",
    ):
        assert part in str(caught.value)
    assert compose([f"loss._target_={module}.any_keys", "loss.whatever=1"], {}).cfg.loss["whatever"] == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (bool | str, "true or false or a string"),
        (Literal["auto", 1] | list[int], "auto or 1 or a list"),
        (dict[str, int], "a section of keys"),
        (float, "a number"),
    ],
)
def test_what_may_not_be_null_is_named_by_all_that_it_may_be(kind: Any, words: str):
    with pytest.raises(TypeError, match=f"^{words}$"):
        convert(kind, None)


def test_a_users_module_that_fails_to_import_is_a_problem_of_the_configuration(tmp_path: Path, monkeypatch):
    (tmp_path / "acme_broken.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="acme_broken cannot be imported: No module named 'not_there_at_all'"):
        compose(["loss._target_=acme_broken.loss"], {})


DECLARING = """
import torch  # as a module for per-token tensors does
from rlx.config.loss_traits import declares

@declares(uses_ratio=False, own_sign="pull", against_engine=True, needs_teacher=NEEDS, ranges={"pull": "at least 0"})
def own(tokens, *, pull: float = 0.0):
    return pull

@declares(compares_group=True, rewards_from_0=True, std_over="group")
def spread(groups, *, ddof: int = 1):
    return ddof
"""
OWN = ["--config-dir", "my_conf", "loss=own", "advantage=spread"]


@pytest.fixture
def declaring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own objective and advantage that declare facts about themselves, in one module, with a YAML file each."""
    module = tmp_path / "acme_declared.py"
    module.write_text(DECLARING.replace("NEEDS", "False"))
    for name, text in {
        "loss/own": "_target_: acme_declared.own\naggregate: token_mean\npull: 0.0\n",
        "advantage/spread": "_target_: acme_declared.spread\nddof: 1\n",
    }.items():
        path = tmp_path / "my_conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield module
    sys.modules.pop("acme_declared", None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("loss.dual_clip=3 loss.pull=0.1", "own does not follow its sign as it is set"),
        ("loss.pull=-1", "`loss.pull` must be at least 0: loss.pull=-1"),
        ("loss.proximal=recompute loss.correction=tis", "own already weighs tokens by their ratio to the engine"),
        ("orchestrator.rollouts_per_example=1 orchestrator.batch_size=32", "the advantage spread compares the rollouts of a group"),
        ("reward.soft_overlong=true", "the advantage spread needs rewards of at least 0"),
        ("advantage.ddof=8", "the std of a group divides by its rollouts - ddof"),
        ("loss.dual_clip=3 sampling.top_p=0.9", None),
    ],
)
def test_the_rules_know_a_users_own_objective_by_what_it_declares(declaring: Path, argv: str, message: str | None):
    if message is None:
        compose([*OWN, *argv.split()], {})
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([*OWN, *argv.split()], {})


def test_a_users_own_objective_that_needs_a_teacher_is_refused_without_one(declaring: Path):
    declaring.write_text(DECLARING.replace("NEEDS", "True"))
    with pytest.raises(ConfigError, match=r"the objective own learns from a teacher, and there is none: ref\.name=null"):
        compose(OWN, {})


def test_a_declaration_that_cannot_be_is_explained(declaring: Path):
    for wrong, message in (("uses_rato=False", "unexpected keyword argument 'uses_rato'"), ("std_over='all'", "it must be group or batch")):
        declaring.write_text(f"from rlx.config.loss_traits import declares\n@declares({wrong})\ndef own(tokens): ...\n")
        with pytest.raises(ConfigError, match=f"acme_declared cannot be imported: (Type|Value)Error: .*{message}"):
            compose(["loss._target_=acme_declared.own", "~loss.eps_low", "~loss.eps_high"], {})


def test_shipped_targets_are_checked_without_importing_them_or_torch():
    code = (
        "import sys; from rlx.config.load import compose; compose(['loss=masked_is', 'advantage=batch_norm'], {}); "
        "print([m for m in sys.modules if m == 'torch' or m.startswith(('rlx.losses', 'rlx.advantages'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torchs_optimizers_are_read_without_importing_torch():
    betas = signature_of("torch.optim.AdamW").parameters["betas"]
    assert betas.default == (0.9, 0.999)
    assert betas.annotation == tuple[float, float]


@pytest.mark.parametrize(
    "value",
    [None, "text", *(pytest.param(value, marks=pytest.mark.slow) for value in (-1, 0, 1e30, True, [], ["a"], {}, {"a": 1}, "???"))],
    ids=str,
)
def test_no_value_of_any_key_ends_in_a_traceback(value):
    tree = compose_tree(["logger=[wandb,tensorboard]", "dry_run=true"], {})
    accepted = 0
    keys = [key.replace("<name>", "reverse_text").split(".") for key in leaves(Config)]
    tried = sorted({".".join(parts[:n]) for parts in keys for n in range(1, len(parts) + 1)})
    for key in tried:
        changed = replace(tree, data=copy.deepcopy(tree.data))
        *above, last = key.split(".")
        section = changed.data
        for part in above:
            section[part] = section.get(part) or {}  # a section may be null: slurm.container
            section = section[part]
        section[last] = value
        with contextlib.suppress(ConfigError):
            checked(changed)
            accepted += 1
    assert accepted < 0.54 * len(tried), "other keys must have refused it"
