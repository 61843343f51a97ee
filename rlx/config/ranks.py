"""How many trainer processes a layout has when `hardware.trainer_processes` is null: one for each place that inference leaves free."""

from __future__ import annotations


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
    by_host = max(gpus_per_node // gpus_per_server, 1)  # servers
    full, last = divmod(servers, by_host)
    if whole := max(nodes - full - (last > 0), 0):
        return max(whole * gpus_per_node, 1)
    rest = gpus_per_node - last * gpus_per_server if last and full < nodes else gpus_per_node - by_host * gpus_per_server
    return max(rest, 1)
