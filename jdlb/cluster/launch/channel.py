"""JSON lines between the local launcher and a worker, over an inherited socket.

A worker sends events, and asks where it needs an answer; the launcher only answers.
Must not know what the events mean. The end of the stream on the worker's side means
that the launcher is gone, and ends the worker.

A line from a worker is `{"event": {...}}`, with `"id": n` where an answer is awaited;
the answer is `{"id": n, "reply": {...}}`.
"""

import json
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CHANNEL_FD = "JDLB_CHANNEL_FD"

Event = dict[str, Any]
# (worker, event) -> reply. None where there is nothing to say.
EventHandler = Callable[[int, Event], Event | None]

_ORPHAN_STATUS = 1


class WorkerChannel:
    """The worker's end. May be used from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected stream socket; the process ends when it does."""
        self._socket = connection
        self._write_lock = threading.Lock()
        self._request_lock = threading.Lock()
        self._requests = 0
        self._replies: queue.SimpleQueue[Event] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="jdlb-channel", daemon=True).start()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "WorkerChannel | None":
        """The channel to the launcher; None in a process that has none.

        To be called once in a process, as it takes over the descriptor.
        """
        if CHANNEL_FD not in environ:
            return None
        connection = socket.socket(fileno=int(environ[CHANNEL_FD]))
        # Programs that this process starts must not keep the channel open.
        connection.set_inheritable(False)
        return cls(connection)

    def send(self, event: Event) -> None:
        """Hand over an event; an answer, if any, is lost."""
        self._write({"event": event})

    def request(self, event: Event) -> Event:
        """Hand over an event and wait for the answer ({} where there is none)."""
        with self._request_lock:
            self._requests += 1
            self._write({"id": self._requests, "event": event})
            answer = self._replies.get()
            if answer["id"] != self._requests:
                raise RuntimeError(f"answer {answer} to request {self._requests}")
            return answer["reply"]

    def _write(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._write_lock:
            self._socket.sendall(line)

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._replies.put(json.loads(line))
        except ConnectionError:
            pass
        # Nobody can see or end this process any more; the main thread may sit in a
        # collective for half an hour, so an exception there would not do.
        print("the launcher is gone: ending", file=sys.stderr, flush=True)
        os._exit(_ORPHAN_STATUS)


@dataclass(frozen=True)
class Message:
    """One event of a worker; `id` is None where no answer is awaited."""

    id: int | None
    event: Event


class LauncherChannel:
    """The launcher's end of one worker's channel; can be given to a selector."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._socket = connection
        self._partial = b""

    def fileno(self) -> int:
        """The descriptor to watch."""
        return self._socket.fileno()

    def release(self) -> None:
        """Let the started process become the worker (see `entry`)."""
        self._socket.sendall(b"\n")

    def serve(self, worker: int, on_event: EventHandler) -> bool:
        """Deliver what has arrived (waits for it) and answer; False at the end.

        Raises:
          ValueError: a line is not a message.
        """
        messages = self._receive()
        for message in messages or ():
            reply = on_event(worker, message.event)
            if message.id is not None:
                self._answer(message.id, reply or {})
        return messages is not None

    def close(self) -> None:
        """Close this end: a worker that still listens ends itself."""
        self._socket.close()

    def _receive(self) -> list[Message] | None:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            return None
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [_parse(line) for line in lines]

    def _answer(self, request: int, reply: Event) -> None:
        line = json.dumps({"id": request, "reply": reply}).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except ConnectionError:
            # The worker died while it waited; its exit status will be seen.
            return


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
        return Message(message.get("id"), dict(message["event"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of a worker: {line[:80]!r}") from error


def open_channel() -> tuple[LauncherChannel, socket.socket]:
    """The launcher's end, and the socket whose descriptor a worker is to inherit."""
    ours, theirs = socket.socketpair()
    return LauncherChannel(ours), theirs
