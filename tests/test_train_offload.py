"""The optimizer whose state is in host memory between steps. Here both memories are the host's; copies are made all the same."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_examples import make_model, make_samples, make_trainer, step_batch, train_minibatch

from rlx.config.load import compose, to_yaml
from rlx.config.schema import LoraConfig, LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.models.tiny import build_tokenizer
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.paths import RunPaths
from rlx.shared.member import HostedRun
from rlx.train.build import build, policy_of
from rlx.train.muon import Muon, groups_of
from rlx.train.offload import CPUOffloadOptimizer, _copied
from rlx.train.step import PolicyTrainer

pytestmark = pytest.mark.slow

SMALL = 4096  # bytes of parameters in a bucket: the model has several times as many
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sgd_without_state": (torch.optim.SGD, {}),
    "factored": (torch.optim.Adafactor, {}),
    "made_at_once": (torch.optim.Adagrad, {}),
    "muon": (Muon, {"fused": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return str(folder)


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def moving(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parts of the state that lie in host memory between steps."""
    return [value for state in state_of(optimizer) for value in state.values() if isinstance(value, Tensor) and value.ndim]


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()


class Spy:
    """Looks at each update of the inner optimizer: which of its state has left the host's tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.hosts: set[int] = set()
        self.away: list[int] = []  # bytes, of each update
        optimizer.register_step_pre_hook(self.look)

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        everything = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor) and value.ndim]
        self.away.append(sum(value.nbytes for value in everything if id(value) not in self.hosts))
        own = [value for group in optimizer.param_groups for p in group["params"] for value in optimizer.state[p].values()]
        assert all(id(value) not in self.hosts for value in own), "the update reads host memory"


def trained(model: str, mesh: Mesh, kind: str, *, offload: bool, lora: int = 0, max_norm: float | None = 0.5) -> Any:
    """Weights, state and metrics after three steps; with `offload` also what the spy saw."""
    policy = load_policy(model, mesh, dtype="float32", lora=LoraConfig(rank=lora) if lora else None)
    make, keys = MAKERS[kind]
    inner = optimizer = make(groups_of(policy.layers, policy), lr=1e-2, **keys)
    spy = Spy(inner)
    if offload:
        optimizer = CPUOffloadOptimizer(inner, mesh, bucket=SMALL)
    trainer = PolicyTrainer(policy, Objective(grpo, LossTerms(aggregate="token_mean")), optimizer, max_norm=max_norm, mesh=mesh)
    metrics = []
    for step in range(3):
        spy.hosts, spy.away = {id(value) for value in moving(optimizer)} if offload else set(), []
        batch = pack(step_batch(step, [make_samples(seed=step)]), rank=0, ranks=1, tokens=60)
        before = moving(optimizer)
        metrics.append(train_minibatch(trainer, batch.mini_batches[0], step=step))
        if offload and step:
            assert all(one is other for one, other in zip(before, moving(optimizer), strict=True)), "host memory is allocated once"
    weights = {name: whole(tensor) for name, tensor in policy.named_weights()}
    state = [{name: whole(value) if isinstance(value, Tensor) else value for name, value in each.items()} for each in state_of(optimizer)]
    return weights, state, [{name: value for name, value in each.items() if "time/" not in name} for each in metrics], optimizer, spy


def check(model: str, mesh: Mesh, kind: str, **keys: Any) -> None:
    weights, state, metrics, *_ = trained(model, mesh, kind, offload=False, **keys)
    own_weights, own_state, own_metrics, optimizer, spy = trained(model, mesh, kind, offload=True, **keys)
    assert own_metrics == metrics
    assert all(torch.equal(own_weights[name], tensor) for name, tensor in weights.items())
    assert len(own_state) == len(state)
    for one, other in zip(own_state, state, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], value) if isinstance(value, Tensor) else one[name] == value for name, value in other.items())
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    largest = max(SMALL, *(p.nbytes for p in parameters))
    assert len(spy.away) > 1
    assert len(spy.away) >= sum(p.nbytes for p in parameters) / largest
    assert sum(spy.away) == sum(value.nbytes for value in moving(optimizer)), "each part of the state is on the device once a step"
    parts = max(len([v for v in each.values() if isinstance(v, Tensor) and v.ndim]) for each in own_state)
    assert max(spy.away) <= parts * largest, "only a bucket's state is on the device"


@pytest.mark.parametrize("kind", MAKERS)
def test_updates_have_the_same_bits_and_state_is_on_the_device_for_its_own_alone(model: str, kind: str) -> None:
    check(model, one_process("cpu"), kind)


@pytest.mark.parametrize("keys", [{"lora": 16}, {"max_norm": None}, {"max_norm": 1e-3}], ids=str)
def test_adapters_and_clipped_gradients_change_nothing(model: str, keys: dict[str, Any]) -> None:
    check(model, one_process("cpu"), "fused", **keys)


def test_shards_keep_their_placement_wherever_they_lie(model: str) -> None:
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        for kind in ("fused", "muon"):
            check(model, mesh, kind)
        policy = load_policy(model, mesh, dtype="float32")
        sharded: Any = next(policy.parameters())
        elsewhere: Any = _copied(sharded.detach(), torch.empty(sharded.to_local().shape, device="meta"))
        assert elsewhere.to_local().device.type == "meta", "it stays where it was copied to, although the mesh is on another device"
        assert (elsewhere.placements, elsewhere.shape) == (sharded.placements, sharded.shape)
    finally:
        mesh.close()


class Counts(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_changes_its_groups_is_refused() -> None:
    trainer = make_trainer(make_model())
    trainer.optimizer = CPUOffloadOptimizer(Counts(trainer.parameters, lr=0.1), one_process("cpu"), bucket=SMALL)
    batch = pack(step_batch(0, [make_samples()]), rank=0, ranks=1, tokens=60)
    with pytest.raises(ValueError, match=r"but Counts changes steps of all of them .* Set trainer.optim_cpu_offload=false"):
        train_minibatch(trainer, batch.mini_batches[0], step=0)


def test_the_key_reaches_the_optimizer_also_of_a_run_in_a_shared_trainer(model: str, tmp_path: Path) -> None:
    mesh, adapters = one_process("cpu"), ["lora.rank=4", "seq_len=60", "sampling.max_tokens=32"]
    run = compose([*adapters, "trainer.shared_trainer_dir=/outputs/host"], {}).cfg
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.config.write_text(to_yaml(run))
    build_tokenizer(64).save_pretrained(model)
    for offload in (False, True):
        own, host = (compose([*adapters, *more], {}).cfg for more in ([], ["trainer.max_concurrent_runs=2"]))
        for cfg in (own, host):
            cfg.trainer.optim_cpu_offload = offload  # a rule refuses it on a CPU
        assert isinstance(build(own, model, mesh, lambda _: nullcontext()).optimizer, CPUOffloadOptimizer) == offload
        shared = policy_of(host, model, mesh, lambda _: nullcontext())
        member = HostedRun(host, paths, "token", 0, shared, mesh, lambda: None)
        assert isinstance(member.trainer.optimizer, CPUOffloadOptimizer) == offload
