"""The rules for how new weights reach the servers, and where their versions are kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from rlx.config.memory import published_bytes, size, versions_in_memory
from rlx.config.mounts import IN_MEMORY, file_system
from rlx.config.rules import Show, rule
from rlx.config.schema import Config

NO_FOLDER = "weight_broadcast.folder=null"


@rule("weight_broadcast.type", "hardware", "lora", "inference.base_url")
def weights_without_files(cfg: Config, of: Show) -> Iterator[str]:
    kind, hardware = cfg.weight_broadcast.type, cfg.hardware
    if kind == "filesystem" or not cfg.plays:  # then no version reaches a server
        return
    if cfg.lora.on:
        yield (
            f"adapters reach the servers as files: {of('weight_broadcast.type')} with {of('lora.rank')}. They are small.\n"
            "Use weight_broadcast.type=filesystem."
        )
    if cfg.inference.base_url:
        yield (
            f"servers that the run did not start take weights only from files: {of('weight_broadcast.type')} with "
            f"{of('inference.base_url')}.\nUse weight_broadcast.type=filesystem."
        )
    if hardware.device == "cpu":
        yield f"{kind} needs GPUs: {of('weight_broadcast.type')} with {of('hardware.device')}. Use weight_broadcast.type=filesystem."
    elif kind == "nccl" and hardware.shared:
        yield (
            f"NCCL has no two processes on one GPU: {of('weight_broadcast.type')} with {of('hardware.shared')}.\n"
            "Use weight_broadcast.type=ipc."
        )
    elif kind == "ipc" and not (hardware.shared and hardware.nodes == 1):
        yield (
            f"ipc is for trainer and servers on the same GPUs of one host: {of('weight_broadcast.type')} with {of('hardware.shared')}, "
            f"{of('hardware.nodes')}.\nUse weight_broadcast.type=nccl."
        )


@rule("weight_broadcast.folder", "weight_broadcast.type", "hardware", "lora", "inference.base_url")
def versions_of_one_host(cfg: Config, of: Show) -> Iterator[str]:
    folder, said = cfg.weight_broadcast.folder, of("weight_broadcast.folder")
    if folder is None:
        return
    if not folder.startswith("/"):
        yield f"a folder in memory is named by its absolute path: {said}. Set weight_broadcast.folder=/dev/shm, or {NO_FOLDER}."
    if cfg.lora.on:
        yield f"adapters are small, so all of them are written to the run directory: {said} with {of('lora.rank')}. Set {NO_FOLDER}."
    if cfg.weight_broadcast.type != "filesystem":
        yield (
            f"these weights reach the servers without files, so there are none to keep in memory: {said} with "
            f"{of('weight_broadcast.type')}.\nSet {NO_FOLDER}, or weight_broadcast.type=filesystem."
        )
    if cfg.hardware.nodes > 1:
        yield (
            f"servers on other hosts cannot read what is in the memory of the trainer's host: {said} with {of('hardware.nodes')}.\n"
            f"Set {NO_FOLDER}{'; or weight_broadcast.type=nccl, which needs no files' * (cfg.hardware.device == 'cuda')}."
        )
    if cfg.inference.base_url:
        yield (
            f"servers that the run did not start may be on another host or of another user, where they cannot read the run's folder in "
            f"memory: {said} with {of('inference.base_url')}.\nSet {NO_FOLDER}."
        )


@rule(
    *("weight_broadcast.folder", "weight_broadcast.keep_last", "weight_broadcast.type", "max_async_level", "model", "lora", "hardware"),
    *("launcher", "dry_run", "replay", "bench", "trainer"),
)
def room_in_memory(cfg: Config, of: Show) -> Iterator[str]:
    """The free room is compared when the trainer starts, when what a killed attempt has left is deleted."""
    folder, said = cfg.memory_folder, of("weight_broadcast.folder")
    if folder is None or cfg.lora.on or not folder.is_absolute():
        return
    if cfg.launcher.name != "local" or cfg.dry_run:  # the folder is of another machine
        return
    elif not folder.is_dir():
        yield f"the folder does not exist: {said}. Name a folder in memory such as /dev/shm, or set {NO_FOLDER}."
        return
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"the folder may not be written: {said}. Name another folder in memory, or set {NO_FOLDER}."
        return
    elif (kind := file_system(folder)) not in IN_MEMORY:
        yield f"the folder is not in memory, its file system is {kind}: {said}. Name a folder such as /dev/shm, or set {NO_FOLDER}."
        return
    total = shutil.disk_usage(folder).total
    if (need := versions_in_memory(cfg)) > total:
        yield (
            f"{cfg.versions_kept + 1} versions of {size(published_bytes(cfg))} do not fit into the folder in memory: {said}, its size is "
            f"{size(total)}; {size(need)} are needed.\nMake it larger (mount -o remount,size=…; docker run --shm-size=…), lower "
            f"{of('weight_broadcast.keep_last')} or {of('max_async_level')}, or set {NO_FOLDER}."
        )
