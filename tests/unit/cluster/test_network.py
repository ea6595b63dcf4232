"""Which interface carries an address."""

import socket

import psutil

from roll_async.cluster.network import interface_of


def test_the_interface_of_an_address_is_found_and_a_foreign_address_has_none():
    assert interface_of("203.0.113.77") is None
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family is socket.AF_INET:
                assert interface_of(address.address) == name
