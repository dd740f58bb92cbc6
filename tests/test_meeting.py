"""The meeting of the processes, in threads of this one, and what process 0 compares in it."""

import concurrent.futures
import logging

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
