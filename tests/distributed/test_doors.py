"""Which doors are open while ranks work: ports of loopback, sockets in folders of this user, and nothing else."""

from __future__ import annotations

import os
import socket
import stat
import threading

import torch.distributed as dist

from distributed.doors import listening
from slipstream.distributed import wires


def test_ranks_that_we_start_listen_on_loopback_only(pool):
    for rank, (ports, sockets) in enumerate(pool.run("distributed.doors:look", ranks=2, timeout=250)):
        assert ports or rank, "rank 0 keeps the store"
        assert {address for address, _ in ports} <= {"127.0.0.1", "::1"}, ports
        assert all(mode & 0o077 == 0 for _, mode in sockets), sockets


def test_what_the_look_sees():
    """It would not miss a door that is open to all."""
    with socket.create_server(("", 0)) as door, socket.create_server(("127.0.0.1", 0)) as near:
        found = {port: address for address, port in listening()}
        assert found[door.getsockname()[1]] == "0.0.0.0"
        assert found[near.getsockname()[1]] == "127.0.0.1"


def test_wires_of_several_machines_listen_on_the_named_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with wires._network_listener(1) as door:
        assert door.getsockname()[0] == "127.0.0.1"


def test_a_stranger_at_the_door_is_shown_out():
    """One that says nothing, one that says the wrong word, one that has the word and is nobody we wait for."""
    word = b"w" * 32
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = door.getsockname()
        opened: list = []
        thread = threading.Thread(
            target=lambda: opened.append(wires._open([door], word, 250.0, {3})), daemon=True
        )
        thread.start()
        for said in (b"", b"\x00\x00\x00\x03" + b"x" * 32, b"\x00\x00\x00\x04" + word, b"\x00\x00"):
            with socket.create_connection(address) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b"", "it is closed, and nothing was said"
        with socket.create_connection(address) as friend:
            friend.sendall(b"\x00\x00\x00\x03" + word)
            thread.join(250)
            assert opened[0][0] == 3
            opened[0][1].close()


def test_the_folder_of_unix_sockets_is_for_this_user(tmp_path):
    from slipstream.distributed.ring import socket_folder

    with socket_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_the_store_of_our_own_launcher_cannot_be_reached_from_another_address(pool):
    """The rendezvous has no password: that nobody else can reach it is what protects it."""
    port = pool.run("distributed.doors:hold", ranks=2, timeout=250)[0]
    assert port == "refused"


def test_the_word_at_the_door_is_random_bytes():
    """The word at the door is plain text of 16 random bytes; what ranks post is JSON (`train/board.py`)."""
    word = wires._agreed_word(dist.HashStore())
    assert len(bytes.fromhex(word.decode())) == 16
