"""The terminal client against a real HTTP server whose answers are scripted, faults included."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from server.chat_client import ChatClient, ChatError, Conversation, NotReadyError


class Server:
    """`script` is what follows the question: text pieces, or one of the marks below. Records bodies and hang-ups."""

    HANG = "<hang>"
    ERROR = "<error>"
    CUT = "<cut>"

    def __init__(self) -> None:
        self.script: list[str] = ["Hel", "lo ", "🙂"]
        self.finish_reason = "stop"
        self.loading = 0
        self.status = 200
        self.bodies: list[dict[str, object]] = []
        self.hung_up = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.get(self)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                server.bodies.append(json.loads(self.rfile.read(length)))
                server.post(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def get(self, http: BaseHTTPRequestHandler) -> None:
        if self.loading:
            self.loading -= 1
            self.answer(http, 503, {"error": {"message": "The model is loading."}}, {"Retry-After": "0"})
        else:
            self.answer(http, 200, {"object": "list", "data": [{"id": "tiny"}]})

    def post(self, http: BaseHTTPRequestHandler) -> None:
        if self.status != 200:
            self.answer(http, self.status, {"error": {"message": "temperature is out of range."}})
            return
        http.send_response(200)
        http.send_header("Content-Type", "text/event-stream")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        try:
            self.stream(lambda text: self.chunk(http, text), http)
        except OSError:
            self.hung_up.set()
        http.close_connection = True

    def stream(self, send: Callable[[str], None], http: BaseHTTPRequestHandler) -> None:
        send(": keep-alive\n\n")
        self.delta(send, {"role": "assistant", "content": ""})
        for piece in self.script:
            if piece == self.HANG:
                http.connection.recv(1)  # Returns when the client closes: it has nothing more to say.
                self.hung_up.set()
                return
            if piece == self.ERROR:
                send('data: {"error": {"message": "The engine died."}}\n\n')
                send("")
                return
            if piece == self.CUT:
                send("")
                return
            self.delta(send, {"content": piece})
        self.delta(send, {}, self.finish_reason)
        send("data: [DONE]\n\n")
        send("")

    def delta(self, send: Callable[[str], None], delta: dict[str, str], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        send(f"data: {json.dumps({'choices': [choice]})}\n\n")

    def chunk(self, http: BaseHTTPRequestHandler, text: str) -> None:
        data = text.encode()
        http.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(
        self, http: BaseHTTPRequestHandler, status: int, body: object, headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(body).encode()
        http.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            http.send_header(name, value)
        http.end_headers()
        http.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


@pytest.fixture
def dead_url() -> str:
    """An address where nothing listens: the port was ours a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def talk(server: Server, **sampling: object) -> Conversation:
    return Conversation(ChatClient(server.url), "tiny", **sampling)  # type: ignore[arg-type]


def test_answer_is_streamed_and_joins_the_history(server: Server) -> None:
    conversation = talk(server)
    assert list(conversation.ask("Hi")) == ["Hel", "lo ", "🙂"]
    assert conversation.finish_reason == "stop"
    assert list(conversation.ask("More")) == ["Hel", "lo ", "🙂"]
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello 🙂"},
        {"role": "user", "content": "More"},
    ]


def test_system_message_stays_over_a_reset_and_sampling_is_sent_only_when_given(server: Server) -> None:
    conversation = talk(server, system="Be brief.", temperature=0, max_tokens=None)
    list(conversation.ask("one"))
    conversation.reset()
    list(conversation.ask("two"))
    assert server.bodies[1] == {
        "model": "tiny",
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}],
    }


def test_closing_the_answer_hangs_up_and_keeps_what_came(server: Server) -> None:
    server.script = ["part", Server.HANG]
    conversation = talk(server)
    with closing(conversation.ask("Hi")) as pieces:
        assert next(pieces) == "part"
    assert server.hung_up.wait(10)
    assert conversation.messages[-1] == {"role": "assistant", "content": "part"}


@pytest.mark.parametrize(("mark", "message"), [(Server.ERROR, "The engine died."), (Server.CUT, "in the middle")])
def test_a_stream_that_fails_raises_and_keeps_what_came(server: Server, mark: str, message: str) -> None:
    server.script = ["part", mark]
    conversation = talk(server)
    with pytest.raises(ChatError, match=message):
        list(conversation.ask("Hi"))
    assert conversation.messages[-1] == {"role": "assistant", "content": "part"}


def test_a_refused_question_is_taken_back(server: Server) -> None:
    server.status = 400
    conversation = talk(server)
    with pytest.raises(ChatError, match="temperature is out of range"):
        list(conversation.ask("Hi"))
    assert conversation.messages == []


def test_first_model_waits_for_a_server_that_loads(server: Server) -> None:
    server.loading = 3
    said: list[str] = []
    assert ChatClient(server.url).first_model(said.append) == "tiny"
    assert said == ["The model is loading."], "told once, however often it was asked"


def test_a_loading_server_is_told_apart_from_a_dead_one(server: Server, dead_url: str) -> None:
    server.loading = 1
    with pytest.raises(NotReadyError):
        ChatClient(server.url).models()
    with pytest.raises(ChatError, match="No server answers") as caught:
        ChatClient(dead_url).models()
    assert "headrace serve" in (caught.value.hint or "")


@pytest.mark.parametrize("form", ["{}/v1", "{}/", "{}/v1/", "{}"])
def test_url_is_taken_in_the_forms_people_paste(server: Server, form: str) -> None:
    assert ChatClient(form.format(server.url)).models() == ["tiny"]
    assert ChatClient(form.format(server.url.removeprefix("http://"))).models() == ["tiny"]


@pytest.mark.parametrize(
    "url",
    ["", "http://", "ftp://host", "http://host:port", "http://h:99999", "http://[::1", "http://a b", "http://a/b c"],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ChatError, match="not the URL"):
        ChatClient(url)


def test_something_else_on_the_port_is_named_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1024)
                peer.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(ChatError, match="no OpenAI-compatible server"):
            ChatClient(f"127.0.0.1:{listener.getsockname()[1]}").models()
        thread.join()


def headrace_chat(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "chat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_one_message_prints_the_answer_and_leaves(server: Server) -> None:
    done = headrace_chat("--url", server.url, "-m", "Hi", "--temperature", "0", "--max-tokens", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello 🙂\n", "")
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0, 5)


def test_text_on_standard_input_is_one_message(server: Server) -> None:
    done = headrace_chat("--url", server.url, input="What is\nthis?")
    assert (done.returncode, done.stdout) == (0, "Hello 🙂\n")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "What is\nthis?"}]


def test_no_server_is_one_line_and_the_command_to_start_one(dead_url: str) -> None:
    done = headrace_chat("--url", dead_url, "-m", "Hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: No server answers at {dead_url}.\nhint: Start one with `headrace serve`.\n"


class Terminal:
    """`headrace chat` on a pseudo-terminal. `until` reads on until a text has appeared."""

    def __init__(self, url: str) -> None:
        self._main, side = os.openpty()
        self._unread = b""
        command = [sys.executable, "-m", "server", "chat", "--url", url]
        self.process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
        os.close(side)

    def until(self, text: str) -> None:
        while text.encode() not in self._unread:
            self._unread += os.read(self._main, 4096)
        self._unread = self._unread.partition(text.encode())[2]

    def interrupt_until(self, text: str) -> None:
        """Press Ctrl-C again when nothing happens, as people do: a signal that comes just before a blocking read of
        Python's own is only seen after it.
        """
        while text.encode() not in self._unread:
            self.process.send_signal(signal.SIGINT)
            while text.encode() not in self._unread and select.select([self._main], [], [], 1)[0]:
                self._unread += os.read(self._main, 4096)
        self.until(text)

    def type(self, line: str) -> None:
        self.press(line.encode() + b"\n")

    def press(self, keys: bytes) -> None:
        os.write(self._main, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    one = Terminal(server.url)
    yield one
    one.close()


def test_conversation_in_a_terminal(server: Server, terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("Hi")
    terminal.until("Hello 🙂")
    terminal.until("> ")
    terminal.type("/reset")
    terminal.until("Starting over.")
    terminal.until("> ")
    server.script, server.finish_reason = ["long"], "length"
    terminal.type("Again")
    terminal.until("cut off")
    terminal.until("> ")
    terminal.type("/exit")
    assert terminal.process.wait(10) == 0
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "Again"}]


def test_interrupt_stops_the_answer_and_not_the_program(server: Server, terminal: Terminal) -> None:
    server.script = ["begins", Server.HANG]
    terminal.until("> ")
    terminal.type("Hi")
    terminal.until("begins")
    terminal.interrupt_until("[stopped]")
    assert server.hung_up.wait(10)
    terminal.until("> ")
    server.script = ["yes indeed"]
    terminal.type("Go on")
    terminal.until("yes indeed")
    terminal.until("> ")
    terminal.interrupt_until("Ctrl-D")
    terminal.until("> ")
    terminal.press(b"\x04")
    assert terminal.process.wait(10) == 0
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "begins"},
        {"role": "user", "content": "Go on"},
    ]
