"""The channel between launcher and worker, both ends in this process or two."""

import os
import selectors
import subprocess
import sys
import threading

import pytest

from jdlb.cluster.launch.channel import (
    CHANNEL_FD,
    LauncherChannel,
    WorkerChannel,
    open_channel,
)


def serve_in_thread(channel: LauncherChannel, count: int, on_event) -> threading.Thread:
    def serve() -> None:
        for _ in range(count):
            channel.serve(3, on_event)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def run_worker(script: str, theirs) -> subprocess.Popen:
    environ = {**os.environ, CHANNEL_FD: str(theirs.fileno())}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environ,
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_variable_no_channel():
    assert WorkerChannel.from_environ({}) is None


WORKER = """
import os
from jdlb.cluster.launch.channel import WorkerChannel
channel = WorkerChannel.from_environ(os.environ)
channel.send({"event": "epoch", "number": 1})
reply = channel.request({"event": "ask", "text": "\\u00fc\\n"})
channel.send({"event": "got", "reply": reply, "empty": channel.request({"event": "x"})})
"""


def test_events_arrive_in_order_and_requests_are_answered():
    seen = []

    def on_event(worker, event):
        seen.append((worker, event))
        return {"answer": 42} if event["event"] == "ask" else None

    channel, theirs = open_channel()
    with run_worker(WORKER, theirs) as process:
        theirs.close()
        while channel.serve(3, on_event):
            pass
        assert process.stderr is not None
        assert process.stderr.read() == ""
    channel.close()
    assert process.returncode == 0
    assert seen == [
        (3, {"event": "epoch", "number": 1}),
        (3, {"event": "ask", "text": "\u00fc\n"}),
        (3, {"event": "x"}),
        (3, {"event": "got", "reply": {"answer": 42}, "empty": {}}),
    ]


def test_an_answer_to_a_send_is_not_sent():
    channel, theirs = open_channel()
    theirs.sendall(b'{"event": {"event": "a"}}\n{"id": 7, "event": {"event": "b"}}\n')
    channel.serve(0, lambda worker, event: {"to": event["event"]})
    assert theirs.recv(1000) == b'{"id": 7, "reply": {"to": "b"}}\n'
    theirs.close()
    channel.close()


def test_lines_may_arrive_in_pieces():
    seen = []
    channel, theirs = open_channel()
    for piece in (b'{"event": {"a"', b': 1}}\n{"event"', b': {"a": 2}}\n'):
        theirs.sendall(piece)
        assert channel.serve(0, lambda worker, event: seen.append(event))
    assert seen == [{"a": 1}, {"a": 2}]
    theirs.close()
    assert not channel.serve(0, lambda worker, event: None)
    channel.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b"{}\n", b'{"event": 3}\n'])
def test_a_line_that_is_no_message_is_shown(line):
    channel, theirs = open_channel()
    theirs.sendall(line)
    with pytest.raises(ValueError, match="not a message of a worker"):
        channel.serve(0, lambda worker, event: None)
    theirs.close()
    channel.close()


def test_the_channel_can_be_selected():
    channel, theirs = open_channel()
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        assert not selector.select(0)
        theirs.sendall(b"{")
        assert selector.select(1)
    theirs.close()
    channel.close()


ORPHAN = """
import os, time
from jdlb.cluster.launch.channel import WorkerChannel
channel = WorkerChannel.from_environ(os.environ)
channel.send({"event": "ready"})
time.sleep(60)
"""


def test_a_worker_whose_launcher_is_gone_ends_itself():
    channel, theirs = open_channel()
    with run_worker(ORPHAN, theirs) as process:
        theirs.close()
        assert channel.serve(0, lambda worker, event: None)
        channel.close()
        _, text = process.communicate(timeout=10)
    assert process.returncode == 1
    assert text == "the launcher is gone: ending\n"


def test_requests_from_several_threads_get_their_own_answers():
    script = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
from jdlb.cluster.launch.channel import WorkerChannel
channel = WorkerChannel.from_environ(os.environ)
with ThreadPoolExecutor(8) as pool:
    replies = list(pool.map(lambda n: channel.request({"n": n})["n"], range(200)))
assert replies == list(range(200)), replies
"""
    channel, theirs = open_channel()
    with run_worker(script, theirs) as process:
        theirs.close()
        while channel.serve(0, lambda worker, event: event):
            pass
    channel.close()
    assert process.returncode == 0
