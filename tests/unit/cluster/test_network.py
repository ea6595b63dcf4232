"""Which interface carries an address, and ports that are told before they are used."""

import socket
import sys

import psutil
import pytest

from roll_async.cluster.network import held_port, interface_of, listener


def test_the_interface_of_an_address_is_found_and_a_foreign_address_has_none():
    assert interface_of("203.0.113.77") is None
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family is socket.AF_INET:
                assert interface_of(address.address) == name


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let a server bind beside")
def test_a_held_port_is_nobody_elses_until_the_one_who_was_told_it_listens_there():
    with held_port("127.0.0.1") as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with held_port("127.0.0.1") as other:
            assert other != port
        for _ in range(2):  # a service that ends and is started again
            with socket.create_server(("127.0.0.1", port)) as told:
                with socket.create_connection(("127.0.0.1", port)) as client:
                    told.accept()[0].close()
                    assert client.recv(1) == b""
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(("127.0.0.1", port))
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0, "who holds it does not listen"
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of the connections above, some linger
        stranger.bind(("127.0.0.1", port))


def test_a_server_that_is_told_to_others_listens_from_the_moment_its_port_is_known():
    with listener("127.0.0.1") as server, socket.create_connection(server.getsockname()[:2]):
        pass
