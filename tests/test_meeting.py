"""The meeting of the processes, in threads of this one, and what process 0 compares in it."""

import concurrent.futures
import logging
import socket
import threading

import pytest
from clusters import free_port

from jaxtrain.distributed import check_together
from jaxtrain.errors import ConfigError, PeerError
from jaxtrain.launch import meeting


def introduction(process_id, **changes):
    return {
        "process_id": process_id,
        "num_processes": 3,
        "host": f"host{process_id}",
        "pid": 1,
        "node": f"node{process_id}",
        "address": f"10.0.0.{process_id}",
        "has_loopback_name": False,
        "num_gpus": None,
        "versions": {"jax": "1.0"},
    } | changes


def test_who_waits_says_from_time_to_time_who_is_absent(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "REPORT_SECONDS", 0.2)
    caplog.set_level(logging.INFO)
    port = free_port()

    def come(process_id):
        me = introduction(process_id)
        with pytest.raises(PeerError, match="2 of 3 processes came within 1 s"):
            meeting.meet("127.0.0.1", port, me, timeout_seconds=1, check=check_together)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(come, (0, 1)))
    said = [message for message in caplog.messages if "waiting for 1 of 3 processes: 2" in message]
    # Both say so, each more than once.
    assert len(said) > 3


@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_told_to_end_while_others_are_absent_takes_all_along(monkeypatch, victim):
    monkeypatch.setattr(meeting, "REPORT_SECONDS", 0.1)
    me = threading.local()
    port = free_port()

    def hear(absent, *_):
        if me.process_id == victim and absent == [2]:  # the other one has come
            raise meeting.ToldError(f"SIGTERM to process {victim}")

    def come(process_id):
        me.process_id = process_id
        with pytest.raises(meeting.ToldError, match=f"SIGTERM to process {victim}"):
            meeting.meet(
                "127.0.0.1",
                port,
                introduction(process_id),
                timeout_seconds=60,
                check=check_together,
            )

    # As a signal does, in the middle of the wait.
    monkeypatch.setattr(meeting, "_say_absent", hear)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(come, (0, 1)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"jax": "0.9"}}, "process 2 on host2 has jax 0.9 instead of 1.0 on host0"),
        ({"has_loopback_name": True}, "the host name of host2 resolves to a loopback address"),
        ({"node": "node1"}, r"same number of processes \(node0: 1, node1: 2\)"),
    ],
)
def test_processes_that_do_not_fit_together_are_refused(changes, words):
    check_together([introduction(i) for i in range(3)])
    with pytest.raises(ConfigError, match=words):
        check_together([introduction(0), introduction(1), introduction(2, **changes)])


def test_numbers_are_written_with_ranges():
    assert meeting.format_ids([1, 3, 4, 5, 9]) == "1, 3-5, 9"


def test_strangers_are_passed_over_and_clocks_are_compared():
    port = free_port()
    came = threading.Event()

    def come(process_id):
        me = introduction(process_id, num_processes=2)
        if process_id:
            came.wait()
        return meeting.meet("127.0.0.1", port, me, timeout_seconds=60, check=lambda everybody: None)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        meetings = [pool.submit(come, process_id) for process_id in (0, 1)]
        meeting.wait_for_listener("127.0.0.1", port, 60)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\nHost: here\n\n")
            assert stranger.recv(100) == b""
        came.set()
        everybody, same = (waiting.result() for waiting in meetings)
    assert everybody == same
    assert everybody[0]["clock_skew_seconds"] == 0
    # It is one clock, so the skew is at most what is said of its error.
    skew, round_trip = everybody[1]["clock_skew_seconds"], everybody[1]["round_trip_seconds"]
    assert 0 < round_trip < 10
    assert abs(skew) <= round_trip / 2 + 1e-3


def test_what_the_check_adds_reaches_all():
    port = free_port()

    def look(everybody):
        for who in everybody:
            who["seen"] = f"by 0: {who['process_id']}"

    def come(process_id):
        me = introduction(process_id, num_processes=2)
        return meeting.meet("127.0.0.1", port, me, timeout_seconds=60, check=look)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for everybody in pool.map(come, (0, 1)):
            assert [who["seen"] for who in everybody] == ["by 0: 0", "by 0: 1"]
