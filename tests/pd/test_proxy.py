"""The proxy before servers that stand in for vLLM: both hops, retries, failures during an answer,
cancellation and limits."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from loopback import Site, wait_until
from stand_in import PROMPTS, Fault, words

LONG = "a prompt that is long enough to have a full block"
# A server that breaks off with its loop leaves connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

COMPLETION = "/v1/completions"


def ask(client: httpx.Client, prompt: Any = LONG, count: int = 4, **more: Any) -> httpx.Response:
    return client.post(COMPLETION, json={"prompt": prompt, "max_tokens": count, **more})


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def streamed(response: httpx.Response) -> list[str]:
    """The words of a stream; it must be whole."""
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event[5:])["choices"][0]["text"] for event in events[:-2]]


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """A value of ``/metrics``, summed over other labels."""
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", client.get("/metrics").text, re.M)
    return sum(
        float(value)
        for given, value in found
        if all(f'{key}="{wanted}"' in given for key, wanted in labels.items())
    )


def later(call: Callable[[], httpx.Response]) -> Future[httpx.Response]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


def request(client: httpx.Client, body: Any) -> socket.socket:
    """A connection on which a request was sent, and whose answer is not read."""
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((client.base_url.host, client.base_url.port or 0))
    connection.sendall(head.encode() + raw)
    return connection


# Both hops
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", sorted(PROMPTS))
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_through_both(site: Site, endpoint: str, stream: bool) -> None:
    p, d = site.stand_in(), site.stand_in()
    prompt: Any = {"prompt": LONG, "token_ids": list(range(50))}.get(
        PROMPTS[endpoint], [{"role": "user", "content": LONG}]
    )
    body = {"model": "m", PROMPTS[endpoint]: prompt, "stream": stream, "other": [1]}
    if endpoint == "/inference/v1/generate":
        body["sampling_params"] = {"max_tokens": 5, "seed": 1}
    else:
        body |= {"max_tokens": 5, "seed": 1}
    with site.proxy(prefill=[p], decode=[d]) as client:
        response = client.post(endpoint, json=body, headers={"x-request-id": "r1", "x-other": "o"})
        if stream:
            assert streamed(response) == words(prompt, 5)
            assert response.headers["content-type"].startswith("text/event-stream")
        else:
            assert " ".join(words(prompt, 5)) in response.text
            assert response.json()["from"] == d.at
    assert response.headers.get_list("x-request-id") == ["r1"]
    assert [seen.path for seen in (*p.seen, *d.seen)] == [endpoint, endpoint]
    prefill, decode = p.seen[0], d.seen[0]
    assert prefill.body["kv_transfer_params"]["do_remote_decode"] is True
    params = decode.body["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["ucm"].keys() == {"key", "tokens", "identity"}
    assert {k: v for k, v in decode.body.items() if k != "kv_transfer_params"} == body
    for seen in (prefill, decode):
        assert seen.headers["x-request-id"] == "r1"
        assert seen.headers["x-other"] == "o"


def test_a_prompt_without_a_block_goes_on_as_it_came(site: Site) -> None:
    p, d = site.stand_in(), site.stand_in()
    raw = b'{"prompt":  "short", "max_tokens":3}'
    with site.proxy(prefill=[p], decode=[d]) as client:
        assert text(client.post(COMPLETION, content=raw)) == " ".join(words("short", 3))
        assert metric(client, "ucm_pd_prefills_total", result="without blocks") == 1
    assert len(p.seen) == 1
    assert d.seen[0].raw == raw


def test_what_it_does_not_know_passes_unchanged(site: Site) -> None:
    p, d = site.stand_in(), site.stand_in()
    with site.proxy(prefill=[p], decode=[d]) as client:
        response = client.put("/v1/%2Fa b/?q=%41&r", content=b"\x00{", headers={"te": "gzip"})
        assert response.json() == {"path": "/v1/%2Fa%20b/?q=%41&r", "method": "PUT", "raw": "\x00{"}
        assert response.headers["x-mine"] == "yes"
        assert "te" not in d.seen[0].headers
        bad = client.post(COMPLETION, content=b"no json")
    assert p.seen == []
    assert d.seen[-1].raw == b"no json"
    assert bad.status_code == 500  # the stand-in's own failure


def test_a_server_below_a_path_and_a_rank_of_its_data_parallel_group(site: Site) -> None:
    p, d = site.stand_in(), site.stand_in()
    with site.proxy(prefill=(f"{p.at}/a/b",), decode=(f"{d.at}/c/",)) as client:
        response = client.post(f"{COMPLETION}?q=1", json={"prompt": LONG})
        client.post(COMPLETION, json={"prompt": LONG}, headers={"x-data-parallel-rank": "1"})
    assert response.json() == {
        "path": "/c/v1/completions?q=1",
        "method": "POST",
        "raw": json.dumps({"prompt": LONG}, separators=(",", ":")),
    }
    paths = [seen.path for seen in p.seen]
    assert paths == ["/a/b/v1/completions?q=1", "/a/b/v1/completions"]
    assert "x-data-parallel-rank" not in p.seen[1].headers
    assert d.seen[1].headers["x-data-parallel-rank"] == "1"


def test_servers_of_both_roles_get_one_request(site: Site) -> None:
    a, b = site.stand_in(), site.stand_in()
    with site.proxy(mixed=[a, b]) as client:
        for number in range(4):
            assert text(ask(client, f"prompt {number}")) == " ".join(words(f"prompt {number}", 4))
    assert [len(a.seen), len(b.seen)] == [2, 2]
    assert all("kv_transfer_params" not in seen.body for seen in a.seen + b.seen)


def test_a_request_of_another_proxy_is_not_split_again(site: Site) -> None:
    p, d = site.stand_in(), site.stand_in()
    with site.proxy(prefill=[p], decode=[d]) as client:
        ask(client, kv_transfer_params={"do_remote_decode": True, "ucm": {}})
        assert (len(p.seen), len(d.seen)) == (1, 0)
        ask(client, kv_transfer_params={"do_remote_prefill": True, "ucm": {"key": "k"}})
        assert (len(p.seen), len(d.seen)) == (1, 1)
    assert d.seen[0].body["kv_transfer_params"]["ucm"] == {"key": "k"}


# Retries
# --------------------------------------------------------------------------------------------------

PAUSED = {"error": {"code": "engine_paused", "message": "paused", "type": "x"}}
BEFORE_A_BYTE = {
    "unavailable": Fault(status=503),
    "busy": Fault(status=429),
    "an error": Fault(status=500, document={"error": {"code": 500}}),
    "paused": Fault(status=400, document=PAUSED),
    "paused in the stream": Fault(event=PAUSED),
    "aborted": Fault(
        event={"choices": [{"text": "", "finish_reason": "abort"}]},
        document={"choices": [{"text": "", "finish_reason": "abort"}]},
    ),
    "killed": Fault(events=0),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", sorted(BEFORE_A_BYTE))
def test_another_server_answers(site: Site, role: str, stream: bool, kind: str) -> None:
    p, d = [site.stand_in() for _ in "ab"], [site.stand_in() for _ in "ab"]
    fault = BEFORE_A_BYTE[kind]
    if (role == "prefill" or not stream) and fault.event and not fault.document:
        fault = Fault(document=fault.event)
    failing = p if role == "prefill" else d
    for server in failing[:1] if kind == "busy" else failing:
        server.faults.append(fault)
    with site.proxy(prefill=p, decode=d) as client:
        response = ask(client, stream=stream)
        got = " ".join(streamed(response)) if stream else text(response)
        assert metric(client, "ucm_pd_failures_total", role=role) >= 1
    assert got == " ".join(words(LONG, 4))
    seen = [one for server in failing for one in server.seen]
    assert len({one.headers["x-request-id"] for one in seen}) == len(seen) >= 2
    answered = next(one for server in d for one in reversed(server.seen))
    assert answered.body["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize("fault", [Fault(events=0), Fault(status=503)])
def test_a_single_server_is_tried_again(site: Site, fault: Fault) -> None:
    d = site.stand_in()
    d.faults.append(fault)
    with site.proxy(mixed=[d]) as client:
        assert text(ask(client)) == " ".join(words(LONG, 4))
    assert len(d.seen) == 2


def test_without_a_prefill_server_the_decode_server_computes(site: Site) -> None:
    p, d = site.stand_in(), site.stand_in()
    site.stop(p.at)
    with site.proxy(prefill=[p], decode=[d]) as client:
        assert text(ask(client)) == " ".join(words(LONG, 4))
        wait_until(lambda: metric(client, "ucm_pd_server_up", server=p.at) == 0, "p is down")
        assert text(ask(client)) == " ".join(words(LONG, 4))
        assert metric(client, "ucm_pd_prefills_total", result="down") >= 1
        assert client.get("/health").status_code == 200
    assert all("kv_transfer_params" not in seen.body for seen in d.seen)


def test_a_late_prefill_is_cancelled_and_the_decode_server_computes(
    site: Site, event: Callable[[], asyncio.Event]
) -> None:
    p, d = site.stand_in(), site.stand_in()
    p.gate = event()
    asked = 0
    with site.proxy(prefill=[p], decode=[d], prefill_timeout=0.2) as client:
        while not p.seen:  # the time may be over before the request is sent
            assert text(ask(client)) == " ".join(words(LONG, 4))
            asked += 1
        assert metric(client, "ucm_pd_prefills_total", result="late") == asked
    wait_until(lambda: p.seen[0].left, "the prefill server saw the end of its request")


def test_a_request_that_breaks_servers_is_not_sent_to_all(site: Site) -> None:
    p, d = site.stand_in(), [site.stand_in() for _ in range(5)]
    for server in (p, *d):
        server.faults += [Fault(events=0) for _ in range(9)]
    with site.proxy(prefill=[p], decode=d, tries=2) as client:
        response = ask(client)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == 502
    assert "no decode server answered" in response.json()["error"]["message"]
    assert len(p.seen) == 2
    assert sum(len(server.seen) for server in d) == 2


def test_the_last_refusal_is_passed_on(site: Site) -> None:
    d = [site.stand_in() for _ in "ab"]
    for server in d:
        server.faults += [Fault(status=429, document={"mine": True})] * 9
    with site.proxy(mixed=d) as client:
        response = ask(client)
    assert (response.status_code, response.json()) == (429, {"mine": True})
    assert [len(server.seen) for server in d] == [1, 1]


def test_a_server_that_starts_late_gets_the_request(site: Site) -> None:
    d = site.stand_in()
    site.stop(d.at)
    with site.proxy(mixed=[d]) as client:
        waiting = later(lambda: ask(client))
        wait_until(lambda: metric(client, "ucm_pd_failures_total") >= 2, "it was tried twice")
        assert client.get("/health").status_code == 503
        site.serve(d, at=d.at)
        assert text(waiting.result(30)) == " ".join(words(LONG, 4))
        wait_until(lambda: client.get("/health").status_code == 200, "the proxy is healthy again")


def test_a_prefill_server_that_is_full_is_left_out(
    site: Site, event: Callable[[], asyncio.Event]
) -> None:
    p, d = site.stand_in(), site.stand_in()
    p.gate = event()
    with site.proxy(prefill=[p], decode=[d], max_per_server=1, queue_timeout=0.1) as client:
        first = later(lambda: ask(client))
        wait_until(lambda: p.seen, "the first request is at the prefill server")
        assert text(ask(client, LONG + LONG)) == " ".join(words(LONG + LONG, 4))
        assert metric(client, "ucm_pd_prefills_total", result="full") == 1
        site.loop.call_soon_threadsafe(p.gate.set)
        assert text(first.result(30)) == " ".join(words(LONG, 4))


def test_nothing_listens(site: Site) -> None:
    d = site.stand_in()
    site.stop(d.at)
    with site.proxy(mixed=[d], retry_for=0.1) as client:
        wait_until(lambda: client.get("/health").status_code == 503, "the proxy knows of it")
        response = ask(client)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        message = client.post("/v1/messages", json={"messages": [], "max_tokens": 1}).json()
        assert message["error"]["type"] == "overloaded_error"
        assert client.put("/other").status_code == 503


def test_a_request_that_was_never_sent_is_unreachable_whenever_a_check_fails(site: Site) -> None:
    """Failed checks end the wait for answers, also while another request connects."""
    d = site.stand_in()
    site.stop(d.at)
    with site.proxy(mixed=[d], retry_for=0.01, health_interval=0.001) as client:
        wait_until(lambda: client.get("/health").status_code == 503, "the proxy knows of it")
        assert {client.put("/other").status_code for _ in range(100)} == {503}


def test_an_unknown_request_is_sent_once(site: Site) -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    seen: list[str] = []
    at = site.serve(breaks)
    with site.proxy(mixed=(at,)) as client, pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/audio/speech", content=b"x")
    assert [path for path in seen if path != "/health"] == ["/v1/audio/speech"]


# Failures during an answer
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/messages"])
def test_a_stream_that_breaks_off_ends_with_an_error(site: Site, endpoint: str) -> None:
    d = [site.stand_in() for _ in "ab"]
    for server in d:
        server.faults.append(Fault(events=3))
    prompt: Any = LONG if endpoint == COMPLETION else [{"role": "user", "content": LONG}]
    body = {PROMPTS[endpoint]: prompt, "max_tokens": 9, "stream": True}
    with site.proxy(mixed=d) as client:
        events = client.post(endpoint, json=body).text.split("\n\n")
        assert metric(client, "ucm_pd_broken_answers_total") == 1
    got = [json.loads(event[5:])["choices"][0]["text"] for event in events[:3]]
    assert got == words(prompt, 9)[:3]
    assert events[4:] == [""]  # no [DONE], and nothing of the half event
    error = json.loads(events[3].rpartition("data: ")[2])
    if endpoint == "/v1/messages":
        assert events[3].startswith("event: error\n")
        assert error["type"] == "error"
    assert "failed during the answer" in error["error"]["message"]
    assert sum(len(server.seen) for server in d) == 1


def test_a_server_that_stops_answering_health_checks_loses_its_requests(
    site: Site, event: Callable[[], asyncio.Event]
) -> None:
    a, b = site.stand_in(), site.stand_in()
    a.gate = event()
    with site.proxy(mixed=[a, b]) as client:
        waiting = later(lambda: ask(client))
        wait_until(lambda: a.seen, "the request is at the first server")
        a.healthy = False
        assert text(waiting.result(30)) == " ".join(words(LONG, 4))
    assert len(b.seen) == 1


# The client
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_client_that_disconnects_cancels(
    site: Site, event: Callable[[], asyncio.Event], role: str
) -> None:
    p, d = site.stand_in(), site.stand_in()
    held = p if role == "prefill" else d
    held.gate = event()
    with site.proxy(prefill=[p], decode=[d]) as client:
        with request(client, {"prompt": LONG, "max_tokens": 4}):
            wait_until(lambda: held.seen, "the request is at the server")
        wait_until(lambda: held.seen[0].left, "the server saw the end")
        wait_until(lambda: metric(client, "ucm_pd_cancelled_total") == 1, "it is counted")
        wait_until(lambda: metric(client, "ucm_pd_in_flight") == 0, "no request is left")
    assert len(d.seen) == (0 if role == "prefill" else 1)


def test_a_client_that_leaves_a_stream_cancels(site: Site) -> None:
    d = site.stand_in()
    with (
        site.proxy(mixed=[d]) as client,
        client.stream(
            "POST", COMPLETION, json={"prompt": LONG, "max_tokens": 10**6, "stream": True}
        ) as stream,
    ):
        assert next(stream.iter_bytes())
    wait_until(lambda: d.seen[0].left, "the server saw the end")


def test_a_body_that_does_not_arrive(site: Site) -> None:
    with site.proxy(mixed=[site.stand_in()], client_timeout=0.1) as client:
        address = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(address) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read(site: Site) -> None:
    d = site.stand_in()
    body = {"prompt": LONG, "max_tokens": 10**6, "stream": True}
    with site.proxy(mixed=[d], client_timeout=0.1) as client, request(client, body):
        wait_until(lambda: d.seen and d.seen[0].left, "the server saw the end")


@pytest.mark.parametrize(
    ("given", "kept"), [("a-B_1.2:3", True), ("a b", False), ("é", False), ("x" * 129, False)]
)
def test_ids_of_requests(site: Site, given: str, kept: bool) -> None:
    d = site.stand_in()
    with site.proxy(mixed=[d]) as client:
        response = client.post(
            COMPLETION, json={"prompt": "a"}, headers=[(b"x-request-id", given.encode())]
        )
    sent = d.seen[0].headers["x-request-id"]
    assert response.headers["x-request-id"] == sent
    assert (sent == given) == kept
    assert kept or re.fullmatch("[0-9a-f]{32}", sent)


# Limits
# --------------------------------------------------------------------------------------------------


def test_too_many_requests(site: Site, event: Callable[[], asyncio.Event]) -> None:
    d = site.stand_in()
    d.gate = event()
    with site.proxy(mixed=[d], max_requests=2) as client:
        waiting = [later(lambda: ask(client)) for _ in "ab"]
        wait_until(lambda: len(d.seen) == 2, "two requests are at the server")
        refused = ask(client)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "RateLimitError"
        site.loop.call_soon_threadsafe(d.gate.set)
        assert [one.result(30).status_code for one in waiting] == [200, 200]
        assert ask(client).status_code == 200
        wait_until(lambda: metric(client, "ucm_pd_requests_total", status="429") == 1, "it counts")


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_makes_room(
    site: Site, event: Callable[[], asyncio.Event], stream: bool
) -> None:
    """A client may ask again before the proxy goes on behind the last bytes of its answer."""
    end = event()

    def around(app: Any) -> Any:
        async def held(scope: Any, receive: Any, send: Any) -> None:
            async def last_waits(message: Any) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not message["more_body"]:
                    await end.wait()

            await app(scope, receive, last_waits if scope["type"] == "http" else send)

        return held

    with site.proxy(around, mixed=[site.stand_in()], max_requests=1) as client:
        for _ in range(3):
            assert ask(client, stream=stream).status_code == 200
        site.loop.call_soon_threadsafe(end.set)


def test_requests_wait_for_their_turn_at_a_server(
    site: Site, event: Callable[[], asyncio.Event]
) -> None:
    d = site.stand_in()
    d.gate = event()
    with site.proxy(mixed=[d], max_per_server=1, queue_timeout=0.2) as client:
        first = later(lambda: ask(client))
        wait_until(lambda: d.seen, "the first request is at the server")
        assert ask(client).status_code == 429
        assert len(d.seen) == 1
        site.loop.call_soon_threadsafe(d.gate.set)
        assert first.result(30).status_code == 200
    with site.proxy(mixed=[d], max_per_server=1) as client:
        others = [later(lambda: ask(client)) for _ in range(8)]
        assert [one.result(30).status_code for one in others] == [200] * 8


def test_bodies_have_a_limit(site: Site) -> None:
    d = site.stand_in()
    with site.proxy(mixed=[d], max_body=1000) as client:
        assert ask(client, "x" * 1000).status_code == 413
        assert d.seen == []
        assert ask(client, "x" * 900).status_code == 200


def test_bodies_together_have_a_limit(site: Site, event: Callable[[], asyncio.Event]) -> None:
    d = site.stand_in()
    d.gate = event()
    with site.proxy(mixed=[d], max_body=1000) as client:
        waiting = [later(lambda: ask(client, "x" * 900)) for _ in range(17)]
        wait_until(lambda: len(d.seen) == 17, "seventeen bodies are held")
        assert ask(client, "x" * 900).status_code == 429
        site.loop.call_soon_threadsafe(d.gate.set)
        assert [one.result(30).status_code for one in waiting] == [200] * 17
        assert ask(client, "x" * 900).status_code == 200


# Choice
# --------------------------------------------------------------------------------------------------


def test_requests_that_begin_alike_go_to_the_same_servers(site: Site) -> None:
    p, d = [site.stand_in() for _ in "abc"], [site.stand_in() for _ in "abc"]
    with site.proxy(prefill=p, decode=d) as client:
        for turn in range(4):
            for talk in range(3):
                begin = f"talk {talk} " + "x" * 5000
                assert ask(client, begin + "y" * turn).status_code == 200
    for server in (*p, *d):
        assert len({seen.body["prompt"][:6] for seen in server.seen}) == 1
        assert len(server.seen) == 4


def test_one_prompt_of_many_clients_is_shared_out(
    site: Site, event: Callable[[], asyncio.Event]
) -> None:
    d = [site.stand_in() for _ in "abc"]
    gate = event()
    for server in d:
        server.gate = gate
    with site.proxy(mixed=d) as client:
        waiting = [later(lambda: ask(client, "x" * 20_000)) for _ in range(12)]
        wait_until(lambda: sum(len(server.seen) for server in d) == 12, "all are at servers")
        assert min(len(server.seen) for server in d) >= 2
        site.loop.call_soon_threadsafe(gate.set)
        assert all(one.result(30).status_code == 200 for one in waiting)


def test_metrics_and_health(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    p, d = site.stand_in(), site.stand_in()
    caplog.set_level("INFO", "ucm.pd")
    with site.proxy(prefill=[p], decode=[d]) as client:
        ask(client)
        answered = {"endpoint": COMPLETION, "status": "200"}
        wait_until(lambda: metric(client, "ucm_pd_requests_total", **answered) == 1, "it counts")
        assert metric(client, "ucm_pd_prefills_total", result="ok") == 1
        assert metric(client, "ucm_pd_prefill_seconds_count") == 1
        assert metric(client, "ucm_pd_first_byte_seconds_count") == 1
        assert metric(client, "ucm_pd_server_up") == 2
        assert client.get("/healthcheck").json() == {
            "status": "ok",
            "prefill_instances": 1,
            "decode_instances": 1,
            "prefill_ready": 1,
            "decode_ready": 1,
        }
    line = next(text for text in caplog.messages if "in all" in text)
    assert re.fullmatch(
        rf"request \w+: POST /v1/completions 200, prefill server {p.at}, prefill ok after \S+ s,"
        rf" decode server {d.at}, first byte after \S+ s, \S+ s in all",
        line,
    )


def test_many_clients_while_servers_fail(site: Site) -> None:
    """Whatever fails before the first byte, every answer is whole and right."""
    p, d = [site.stand_in() for _ in "ab"], [site.stand_in() for _ in "abc"]
    kinds = [Fault(events=0), Fault(status=503), Fault(status=500), Fault(event=PAUSED)]
    before = threading.active_count()
    with site.proxy(prefill=p, decode=d, tries=60) as client:
        for number, server in enumerate((*p, *d)):
            server.faults += [
                kinds[(number + turn) % 4] if turn % 3 else Fault() for turn in range(24)
            ]

        def one(number: int) -> None:
            prompt = f"prompt {number} " * 9
            response = ask(client, prompt, stream=number % 2 == 0)
            got = " ".join(streamed(response)) if number % 2 == 0 else text(response)
            assert got == " ".join(words(prompt, 4))

        with ThreadPoolExecutor(12) as pool:
            for _ in pool.map(one, range(60)):
                pass
        wait_until(lambda: metric(client, "ucm_pd_in_flight") == 0, "no request is left")
    wait_until(lambda: threading.active_count() <= before, "no thread is left")
