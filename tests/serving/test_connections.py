"""Connections: hosts, heads and bodies that are too long, too slow or none, clients that close one half or both, TLS, and browsers."""

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from threading import Event
from types import SimpleNamespace

import pytest

from paged.errors import EngineAway, InvalidConfig, ServerFailed
from paged.serving import server as serving
from paged.serving.settings import SERVED, Settings

from .http_client import DRAWN, LONG, TEXT, USUAL  # noqa: TID252
from .serving_process import END_S, free_port  # noqa: TID252

CLOSE = "connection: close\r\n"
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = "content-type: application/json\r\n"


@pytest.fixture
def server(impatient_server):
    return impatient_server


def request(body, *, host="host: a\r\n", more=""):
    raw = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\n{host}{JSON}content-length: {len(raw)}\r\n{more}"
    return head.encode() + b"\r\n" + raw


def talk(server, data, *, shuts=False):
    """What a connection gets back until it is closed; it may close its sending half first."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as connection:
        connection.sendall(data)
        if shuts:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("hosts", [[], ["a", "a"], ["a", "b"], ["a b"], ["a/b"], ["a@b"]], ids=str)
def test_a_request_without_one_host_is_refused(server, hosts):
    host = "".join(f"host: {each}\r\n" for each in hosts)
    assert talk(server, request(USUAL, host=host)).startswith(b"HTTP/1.1 400")
    assert talk(server, f"GET /health HTTP/1.1\r\n{host}\r\n".encode()).startswith(b"HTTP/1.1 400")


def test_a_request_with_one_host_is_answered_and_http_1_0_needs_none(server):
    named = (f"1.1\r\nhost:{host}\r\n{CLOSE}" for host in (" a", " a:80", " [::1]:80", "", " 127.0.0.1"))
    for head in (*named, "1.0\r\n"):
        assert talk(server, f"GET /health HTTP/{head}\r\n".encode()).startswith(b"HTTP/1.1 200"), head


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (k, b"y" * 100) for k in range(2000)), b"431"),
        (b"\x00\x01garbage\r\n\r\n", b"400"),
        (b"", b"408"),
        (b"POST /v1/completions HTTP/1.1\r\nx-a: ", b"408"),
        (f"POST {TEXT} HTTP/1.1\r\nhost: a\r\n{JSON}content-length: 100\r\n\r\n{{".encode(), b"408"),
    ],
    ids=["a flood of headers", "no HTTP", "nothing", "a head without an end", "a body without an end"],
)
def test_what_is_too_much_too_slow_or_no_http_is_not_waited_for(server, data, status):
    assert talk(server, data).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("body", [USUAL, LONG], ids=["short", "long"])
def test_a_client_that_closes_its_sending_half_gets_its_answer(server, body, streams):
    heard = talk(server, request(body | {"stream": streams}), shuts=True)
    while heard.startswith(PROBE):
        heard = heard.removeprefix(PROBE)
    assert heard.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in heard.split(b"\r\n\r\n")[0].split(b"\r\n")
    if streams:
        assert heard.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(heard.split(b"\r\n\r\n", 1)[1])["usage"]["completion_tokens"] == body["max_tokens"]


def test_two_requests_before_a_sending_half_is_closed_are_both_answered_and_half_of_one_is_not_waited_for(server):
    assert talk(server, request(USUAL)[:-5], shuts=True) == b""
    heard = talk(server, request(LONG | {"stream": False}) + request(USUAL), shuts=True).replace(PROBE, b"")
    answers = [each.split(b"\r\n\r\n", 1)[1] for each in heard.split(b"HTTP/1.1 200 OK")[1:]]
    assert [json.loads(each)["usage"]["completion_tokens"] for each in answers] == [900, 8]


def gone_from(server):
    """The lines of its log about clients that went first."""
    return [line for line in server.lines if line.get("status") == 499]


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_closes_both_halves_ends_its_request(streams, server):
    num_gone = len(gone_from(server))
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(request(DRAWN | {"stream": streams}))
    connection.close()
    server.wait_until(lambda: len(gone_from(server)) > num_gone)
    assert gone_from(server)[-1]["error"] == "client_gone"


class Hosted:
    """An application that answers each request in two pieces, the second one when the head of a next request is late; and no engine."""

    log = None

    def __init__(self):
        self.is_over = Event()

    async def wait_until_ready(self):
        await asyncio.to_thread(self.is_over.wait)
        raise EngineAway("it is over.", None)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await asyncio.sleep(5 * HASTE_S)
        await send({"type": "http.response.body", "body": b"ended"})


HASTE_S = 0.1


@pytest.fixture
def hosts():
    """Serve `Hosted` in a thread with these settings; what has its port."""
    with ExitStack() as until_the_end:

        def host(**settings):
            hosted, found = Hosted(), SimpleNamespace(port=free_port())
            settings = Settings(port=found.port, log="off", **settings)

            def serve():
                with pytest.raises(ServerFailed, match="it is over"):
                    serving.serve(settings, make=lambda _: (hosted, hosted))

            threads = until_the_end.enter_context(ThreadPoolExecutor(1))
            ran = threads.submit(serve)
            until_the_end.callback(lambda: ran.result(END_S))
            until_the_end.callback(hosted.is_over.set)
            while not ran.done():
                with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", found.port)):
                    break
            return found

        yield host


def test_the_head_of_a_next_request_that_comes_too_slowly_does_not_break_into_an_answer(hosts):
    heard = talk(hosts(header_timeout_s=HASTE_S), request(USUAL) + b"GET /health HTTP/1.1\r\nx-a: ")
    answer, is_whole, rest = heard.partition(b"ended\r\n0\r\n\r\n")
    assert is_whole and answer.count(b"HTTP/1.1 ") == 1 and b"begun" in answer
    assert rest == b""


def test_a_body_that_comes_a_byte_at_a_time_has_as_long_as_any_other(server):
    head = f"POST {TEXT} HTTP/1.1\r\nhost: a\r\n{JSON}content-length: 1000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode())
        connection.setblocking(False)
        heard = b""
        while not heard:
            connection.send(b" ")
            time.sleep(0.02)
            with suppress(BlockingIOError):
                heard = connection.recv(65536)
    assert heard.startswith(b"HTTP/1.1 408")


def preflight(origin):
    asks = "access-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n"
    return f"OPTIONS {TEXT} HTTP/1.1\r\nhost: a\r\norigin: {origin}\r\n{asks}{CLOSE}\r\n".encode()


def test_a_browser_of_an_allowed_origin_may_ask_and_read_errors_and_no_other_may(server, usual_server):
    allowed = talk(server, preflight("https://a.example"))
    assert allowed.startswith(b"HTTP/1.1 200")
    assert b"access-control-allow-origin: https://a.example" in allowed
    assert b"access-control-allow-origin" not in talk(server, preflight("https://b.example"))
    without = talk(usual_server, preflight("https://a.example"))
    assert without.startswith(b"HTTP/1.1 405") and b"access-control" not in without
    for body, status in ((USUAL, b"200"), (USUAL | {"n": 0}, b"400")):
        heard = talk(server, request(body, more=f"origin: https://a.example\r\n{CLOSE}"))
        assert heard.startswith(b"HTTP/1.1 " + status)
        assert b"access-control-allow-origin: https://a.example" in heard
        assert b"x-request-id" in heard.split(b"access-control-expose-headers: ")[1].split(b"\r\n")[0].lower()


@pytest.fixture
def pair(tmp_path):
    """Make a certificate that signs itself, and its key; return their paths."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")

    def make(name):
        certificate, key = (str(tmp_path / f"{name}.{kind}") for kind in ("pem", "key"))
        made = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=localhost", "-days", "2"]
        subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        return certificate, key

    return make


def talk_over_tls(server, trusts, mine=None):
    """What a usual request gets back over TLS, from a client that may have a certificate of its own."""
    context = ssl.create_default_context(cafile=trusts)
    context.check_hostname = False
    if mine is not None:
        context.load_cert_chain(*mine)
    plain = socket.create_connection(("127.0.0.1", server.port), timeout=600)
    with context.wrap_socket(plain) as connection:
        connection.sendall(request(USUAL, more=CLOSE))
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_with_a_certificate_it_answers_over_tls_and_nothing_else(pair, hosts):
    certificate, key = pair("server")
    server = hosts(tls_certificate=certificate, tls_key=key)
    assert talk_over_tls(server, certificate).startswith(b"HTTP/1.1 200")
    assert b"HTTP" not in talk(server, request(USUAL))


def test_with_a_client_ca_only_clients_with_a_certificate_that_it_signed_are_answered(pair, hosts):
    (certificate, key), client = pair("server"), pair("client")
    server = hosts(tls_certificate=certificate, tls_key=key, tls_client_ca=client[0])
    assert talk_over_tls(server, certificate, client).startswith(b"HTTP/1.1 200")
    for other in (None, (certificate, key)):
        with suppress(ssl.SSLError, ConnectionError):
            assert talk_over_tls(server, certificate, other) == b""


def test_a_certificate_that_is_of_no_use_is_refused_before_anything_is_loaded(pair, tmp_path):
    (certificate, key), other_key, none = pair("server"), pair("other")[1], f"{tmp_path}/none"
    for files, says in {
        (none, key, None): f"{none}: No such file or directory.",
        (certificate, none, None): f"{none}: No such file or directory.",
        (certificate, key, none): f"{none}: No such file or directory.",
        (certificate, other_key, None): f"{certificate} and {other_key} are no certificate and its key: ",
        (certificate, key, key): f"{key} has no certificate that signs for clients: ",
    }.items():
        named = dict(zip(("tls_certificate", "tls_key", "tls_client_ca"), files, strict=True))
        settings = Settings(engine=SERVED.but(model=none), port=0, **named)
        with pytest.raises(InvalidConfig, match=re.escape(says)):
            serving.serve(settings, make=lambda _: pytest.fail("it was loaded"))


def test_a_host_that_cannot_be_a_name_is_refused():
    said = r"^cannot listen on a{64}:0: this is no name of a host\. Name another --host;"
    with pytest.raises(ServerFailed, match=said):
        serving.serve(Settings(host="a" * 64, port=0, log="off"), make=lambda _: pytest.fail("it was loaded"))


def test_a_connection_is_kept_for_parts_of_a_second(hosts):
    def is_kept(port):
        with socket.create_connection(("127.0.0.1", port), timeout=600) as connection, suppress(ConnectionError):
            connection.sendall(request(USUAL))
            while not connection.recv(65536).endswith(b"0\r\n\r\n"):
                pass
            time.sleep(HASTE_S)
            connection.sendall(request(USUAL))
            return connection.recv(65536) != b""

    server = hosts(keep_alive_s=0.99)
    # On busy cores a client may be late.
    assert any(is_kept(server.port) for _ in range(3))
