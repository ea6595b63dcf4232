"""Whether a run can join the cluster at RAY_ADDRESS. Needs no Ray, whose import takes a second."""

from __future__ import annotations

import socket

_ANSWERS_WITHIN_S = 10.0
"""How long a cluster may take to accept a connection; Ray alone tries for minutes and tells nobody."""


def require_cluster(address: str, within_s: float = _ANSWERS_WITHIN_S) -> None:
    """Raises ValueError when nothing accepts connections at HOST:PORT, and for the address of a job server; other
    addresses are Ray's to judge.
    """
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"RAY_ADDRESS={address} is the address of Ray's job server: hand the run over with `ray job submit`, unset "
            "RAY_ADDRESS to run on this machine, or set it to HOST:6379 to join the cluster from here"
        )
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=within_s).close()
    except (OSError, OverflowError) as error:  # OverflowError: a port above 65,535
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({reason}); start one with "
            f"`ray start --head --port={port}`, or unset RAY_ADDRESS to run on this machine"
        ) from error
