"""The address and interface by which other nodes reach a role process.

Gloo and NCCL resolve the host's name, which on many hosts gives 127.0.1.1, or an address of another network. The
address that Ray's nodes use works, so it is set before a library connects.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray

HOST_VARIABLE = "ROLL_ASYNC_HOST_IP"
"""Read by `weight_sync/transport/links.py`."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interface_of(address: str) -> str | None:
    """Name of the network interface with this IPv4 address; None when this host has none such (behind a NAT)."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family is socket.AF_INET and a.address == address for a in addresses):
            return name
    return None


def listener(address: str) -> socket.socket:
    """A server of this process on a port that the system picks, to be told to others: nobody takes it meanwhile."""
    return socket.create_server((address, 0), family=_family(address), backlog=socket.SOMAXCONN)


@contextmanager
def held_port(address: str) -> Iterator[int]:
    """A port of this host for a process that binds it later. Nobody gets it by chance meanwhile: it stays bound here,
    and Linux lets a server bind it beside, because neither listens yet and both set SO_REUSEADDR, as servers do. Other
    systems do not; there it was free a moment ago.
    """
    with socket.socket(_family(address)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # before bind: later it has no effect on this port
        held.bind((address, 0))
        port = held.getsockname()[1]
        if sys.platform != "linux":
            held.close()
        yield port


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def use_node_address() -> str:
    """Make this process and its children use the address that Ray has for its node. Returns it. Variables that the user
    set (`system_envs`) are not changed; a run on one machine is confined to loopback already.
    """
    address = ray.util.get_node_ip_address()
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return address
    os.environ.setdefault(HOST_VARIABLE, address)
    os.environ.setdefault("VLLM_HOST_IP", address)
    if (name := interface_of(address)) is not None:
        for variable in _INTERFACES:
            os.environ.setdefault(variable, name)
    return address
