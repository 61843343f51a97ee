"""The GPUs of inference servers, and how many trainer processes a layout has when `hardware.trainer_processes` is null."""

from __future__ import annotations

Place = tuple[int, tuple[int, ...]]  # index of a host, and indices of GPUs on it


def places_of_servers(number: int, size: int, gpus_per_node: int) -> list[Place]:
    """Places of so many servers with `size` GPUs each: hosts and GPUs in their order."""
    by_host = max(1, gpus_per_node // size)
    return [(server // by_host, tuple(range(server % by_host * size, (server % by_host + 1) * size))) for server in range(number)]


def ranks_left(*, cuda: bool, nodes: int, gpus_per_node: int, servers: int, gpus_per_server: int, shared: bool) -> int:
    """The number of ranks, at least 1. Each server is on one host.

    On CPU: one for each host without a server. On CUDA: one for each GPU of the hosts without a server; if every host has one, one for
    each free GPU of the last server's host. `shared`: one for each GPU of the servers.

    node8 with 4 servers: 4. Two hosts of 8 GPUs with 4 servers: 8, on the second. Three hosts on CPU with one server: 2.
    """
    if not cuda:
        return nodes if nodes == 1 else nodes - min(servers, nodes - 1)
    if shared and servers:
        return servers * gpus_per_server
    places = places_of_servers(servers, gpus_per_server, gpus_per_node)
    free_hosts = nodes - len({host for host, _ in places})
    rest = gpus_per_node - places[-1][1][-1] - 1 if places else 0  # of the last server's host
    return max(free_hosts * gpus_per_node if free_hosts > 0 else rest, 1)
