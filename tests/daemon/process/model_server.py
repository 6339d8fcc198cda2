"""A language model's server as others run it: it writes piece by piece, as a test lets it.

with writing(lambda prompt: ["Oil burns ", "[1]."]) as server:
    server.hold()                  # from now on each piece waits
    ChatClient(server.url, "m").reply("Which?", sampling, 5, told=print)
    server.let(1)                  # one piece more
    server.hung_up                 # counts who left before the end
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[str], Iterable[str]]
BREAK = "\x00"  # in the place of a piece: the server falls silent for good


class ModelServer:
    """See the module; all it says is of a real HTTP server on loopback."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.peers: list[int] = []  # ports of who asked
        self.hung_up = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self._may = threading.Semaphore(0)
        self._held = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.peers.append(self.client_address[1])
                outer.begun.release()
                try:
                    outer._answer(self, body)
                except OSError:
                    outer.hung_up.release()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def hold(self) -> None:
        """No piece more until it is let."""
        self._held = True
        for one in (self._may, self.begun, self.hung_up):  # what was left of a test before
            while one.acquire(blocking=False):
                pass

    def let(self, pieces: int = 1000) -> None:
        """So many more; all, where that is not said."""
        if pieces == 1000:
            self._held = False
        self._may.release(pieces)

    def _answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        pieces = self.script(body["messages"][0]["content"])
        if not body.get("stream"):
            said = {"choices": [{"message": {"content": "".join(pieces)}}]}
            data = json.dumps(said).encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            while not self._permitted(handler):
                pass
            handler.wfile.write(data)
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        handler.wfile.write(b": here\n\n")
        for piece in pieces:
            while not self._permitted(handler):
                pass
            if piece == BREAK:
                return
            _say(handler, {"choices": [{"index": 0, "delta": {"content": piece}}]})
        _say(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        handler.wfile.write(b"data: [DONE]\n\n")

    def _permitted(self, handler: BaseHTTPRequestHandler) -> bool:
        """Whether a piece may go; raises OSError where nobody is there any more."""
        if not self._held or self._may.acquire(timeout=0.02):
            return True
        handler.connection.settimeout(0.001)
        try:
            if not handler.connection.recv(1):
                raise ConnectionError("who asked has hung up")
        except TimeoutError:
            pass
        finally:
            handler.connection.settimeout(None)
        return False

    def __enter__(self) -> ModelServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _say(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@contextmanager
def writing(script: Script) -> Iterator[ModelServer]:
    """One that writes what ``script`` says to a prompt."""
    with ModelServer(script) as server:
        yield server
