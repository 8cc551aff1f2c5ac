"""``ucm pd-proxy`` before real vLLM servers: two that compute prompts and two that produce tokens,
with ucm on one root.

Tokens through the proxy equal those of a server alone, at every endpoint, and also when servers are
killed. Decode servers load what prefill servers computed: nothing publishes a segment sooner than
in a minute but the end of a prompt. Servers alone are asked with a salt, so that they compute every
prompt.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import EngineHost, machine_lock, wait_until
from lives import LAYERS, new_disk
from models import MAX_LEN, llama_config, write_model
from ports import free_port
from served import NAME, PATIENCE, Server, vllm_server, write_tokenizer
from specs import BLOCK, EngineSpec, prompt

pytestmark = pytest.mark.long

COMPLETIONS = "/v1/completions"
ENDPOINTS = [COMPLETIONS, "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
#: The proxy's own bounds in seconds: the time until a server counts as down (six health checks),
#: and that in which a request without a decode server is retried. The other bounds are longer: of a
#: prefill 120 s, of a decode server's wait for blocks 60 s, of an answer 1800 s.
HEALTH_INTERVAL, RETRY_FOR = 0.5, 5.0
DOWN_AFTER = 6 * HEALTH_INTERVAL
#: For all that is computed within a bound, on a busy machine: some tokens, and hundreds of them.
SLACK, LONG_SLACK = 45.0, 150.0


class Site:
    """The servers and the proxy."""

    def __init__(self, prefill: list[Server], decode: list[Server], proxy: Server) -> None:
        self.prefill, self.decode, self.proxy = prefill, decode, proxy

    def busy(self, role: str) -> str:
        """The lines of the proxy's metrics with a request at a server of this role."""
        text = self.proxy.client.get("/metrics").text
        return "\n".join(re.findall(rf'^ucm_pd_in_flight{{role="{role}".* [1-9].*$', text, re.M))

    def alone(self, tokens: list[int], count: int) -> list[int]:
        """The answer of the first decode server, which computes the prompt."""
        body = {"prompt": tokens, "max_tokens": count, "cache_salt": "alone", **GREEDY}
        answer = self.decode[0].client.post(
            "/v1/completions", json=body | {"model": NAME, "return_token_ids": True}
        )
        return list(answer.json()["choices"][0]["token_ids"])


def loaded(servers: list[Server]) -> float:
    """Tokens that these servers have loaded from the store, as vLLM counts them."""
    return sum(server.metric("vllm:external_prefix_cache_hits_total") for server in servers)


@pytest.fixture(scope="module")
def site(work: Path, host: EngineHost) -> Iterator[Site]:
    host.stop()
    model = write_model(work / "pd-model", llama_config(LAYERS))
    write_tokenizer(model)
    store = new_disk(work, "pd").store()
    keys = {"layout": "segment", "segment_age": 60}
    store = replace(store, options={**store.options, **keys})
    spec = EngineSpec(model, "v1", store, extra_config={"pd_wait_ms": 60_000})
    with machine_lock(), ExitStack() as stack:
        servers = []
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            servers.append(vllm_server(spec, work / f"pd-{name}.log", "--enable-scale-out"))
            stack.callback(servers[-1].close)
        for server in servers:
            wait_until(server.started, f"{server.log} starts", PATIENCE)
        prefill, decode = servers[:2], servers[2:]
        port = free_port()
        command = ["ucm", "pd-proxy", f"--port={port}"]
        command += [f"--health-interval={HEALTH_INTERVAL}", f"--retry-for={RETRY_FOR}"]
        command += [f"--prefill={server.at}" for server in prefill]
        command += [f"--decode={server.at}" for server in decode]
        proxy = Server(command, dict(os.environ), port, work / "pd-proxy.log")
        stack.callback(proxy.close)
        wait_until(proxy.started, "the proxy starts")
        yield Site(prefill, decode, proxy)


def request(endpoint: str, tokens: list[int], count: int, stream: bool) -> dict[str, Any]:
    """A request for ``count`` tokens, in the form of the endpoint."""
    words = " ".join(f"w{token}" for token in tokens)
    body: dict[str, Any] = {"model": NAME, "stream": stream}
    if endpoint == "/inference/v1/generate":
        return body | {"token_ids": tokens, "sampling_params": {"max_tokens": count, **GREEDY}}
    if endpoint == "/v1/completions":
        return body | {"prompt": tokens, "max_tokens": count, **GREEDY}
    messages = [{"role": "user", "content": words}]
    return body | {"messages": messages, "max_tokens": count, "temperature": 0.0}


def events(text: str) -> list[dict[str, Any]]:
    """The documents of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def answered(endpoint: str, documents: list[dict[str, Any]]) -> list[int]:
    """The tokens of an answer, from its document or from those of its stream."""
    tokens: list[int] = []
    text = ""
    for document in documents:
        for choice in document.get("choices", ()):
            if endpoint == "/inference/v1/generate":
                tokens += choice.get("token_ids") or []
            else:
                part = choice.get("message") or choice.get("delta") or choice
                text += part.get("content") or part.get("text") or ""
        for part in [*document.get("content", ()), document.get("delta") or {}]:
            text += part.get("text") or ""
    return tokens or [int(word[1:]) for word in text.split()]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_tokens_are_those_of_one_server(site: Site, endpoint: str) -> None:
    seed = ENDPOINTS.index(endpoint)
    for number, length in enumerate((10, 5 * BLOCK, 20 * BLOCK + 7)):
        tokens = prompt(100 * seed + number, length)
        expected, before = site.alone(tokens, 24), loaded(site.decode)
        for stream in (False, True):
            response = site.proxy.client.post(
                endpoint,
                json=request(endpoint, tokens, 24, stream),
                headers={"x-request-id": "one"},
            )
            assert response.status_code == 200, response.text
            assert response.headers["x-request-id"] == "one"
            got = events(response.text) if stream else [response.json()]
            assert answered(endpoint, got) == expected
            if not stream:
                blocks = (length - 1) // BLOCK  # vLLM computes the last token
                assert loaded(site.decode) == before + blocks * BLOCK
    assert site.proxy.metric("ucm_pd_prefills_total", result="refused") == 0
    assert site.proxy.metric("ucm_pd_failures_total") == 0


def through_toy_proxy(
    prefill: Server, decode: Server, tokens: list[int], count: int
) -> tuple[list[int], dict[str, Any] | None]:
    """The answer of the decode server, and the ``kv_transfer_params`` of the prefill server's: the
    requests of vLLM's toy proxy (tests/v1/kv_connector/nixl_integration/toy_proxy_server.py)."""
    body = request(COMPLETIONS, tokens, count, True)
    none = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
    )
    first = body | {"stream": False, "max_tokens": 1}
    first |= {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **none}}
    headers = {"Authorization": "Bearer None", "X-Request-Id": f"toy-{tokens[0]}"}
    response = prefill.client.post(COMPLETIONS, json=first, headers=headers)
    params = response.raise_for_status().json().get("kv_transfer_params", {})
    if params:
        body["kv_transfer_params"] = params
    response = decode.client.post(COMPLETIONS, json=body, headers=headers).raise_for_status()
    return answered(COMPLETIONS, events(response.text)), params


def test_the_toy_proxy_of_vllm_is_served(site: Site) -> None:
    for number, length in enumerate((10, 3 * BLOCK, 12 * BLOCK + 9)):
        tokens = prompt(800 + number, length)
        before = loaded(site.decode)
        got, params = through_toy_proxy(site.prefill[0], site.decode[1], tokens, 24)
        assert got == site.alone(tokens, 24)
        assert loaded(site.decode) == before + (length - 1) // BLOCK * BLOCK
        if length < BLOCK:
            assert params is None
        else:
            assert params is not None
            assert params["do_remote_prefill"]
            assert params["ucm"]["tokens"] == length // BLOCK * BLOCK


def test_a_prefill_server_loads_what_it_has_computed(site: Site) -> None:
    """Under ``kv_both`` it does not compute a prefix again that its device has no room for."""
    tokens = prompt(850, 10 * BLOCK)
    through_toy_proxy(site.prefill[0], site.decode[0], tokens, 4)
    for number in range(9):  # more blocks than the device has
        through_toy_proxy(site.prefill[0], site.decode[0], prompt(860 + number, 20 * BLOCK), 1)
    before = loaded(site.prefill)
    longer = [*tokens, *prompt(851, 2 * BLOCK)]
    got, _ = through_toy_proxy(site.prefill[0], site.decode[0], longer, 4)
    assert got == site.alone(longer, 4)
    assert loaded(site.prefill) == before + len(tokens)


def test_other_paths_and_wrong_requests_have_the_servers_answers(site: Site) -> None:
    proxy, alone = site.proxy.client, site.decode[0].client
    assert [one["id"] for one in proxy.get("/v1/models").json()["data"]] == [NAME]
    words = {"model": NAME, "prompt": "w5 w6"}
    assert proxy.post("/tokenize", json=words).json()["tokens"] == [5, 6]
    for body in ({"model": "none", "prompt": "w5"}, {"model": NAME, "prompt": [], "n": 1}):
        ours, theirs = (one.post(COMPLETIONS, json=body) for one in (proxy, alone))
        assert ours.status_code == theirs.status_code >= 400
        assert ours.json()["error"]["message"] == theirs.json()["error"]["message"]


def test_several_answers_and_probabilities(site: Site) -> None:
    tokens = prompt(900, 6 * BLOCK)
    body = request(COMPLETIONS, tokens, 8, False)
    body |= {"n": 3, "temperature": 1.0, "top_k": 1, "logprobs": 2, "echo": True, "min_tokens": 8}
    choices = site.proxy.client.post(COMPLETIONS, json=body).json()["choices"]
    expected = [*tokens, *site.alone(tokens, 8)]
    assert len(choices) == 3
    for choice in choices:
        assert [int(word[1:]) for word in choice["text"].split()] == expected
        assert len(choice["logprobs"]["tokens"]) == len(expected)


def test_a_client_that_leaves_ends_the_request_in_the_engine(site: Site) -> None:
    def running() -> float:
        return sum(server.metric("vllm:num_requests_running") for server in site.decode)

    body = request(COMPLETIONS, prompt(901, BLOCK), MAX_LEN - 2 * BLOCK, True)
    with site.proxy.client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        parts = response.iter_bytes()
        assert next(parts)
        wait_until(lambda: running() == 1, "the engine has the request")
    wait_until(lambda: running() == 0, "the engine is idle")
    assert site.proxy.metric("ucm_pd_cancelled_total") == 1


# Servers are killed below: these come last, in this order.
# --------------------------------------------------------------------------------------------------


def test_a_prefill_server_is_killed_in_a_prefill(site: Site) -> None:
    tokens = prompt(902, 20 * BLOCK)
    expected, proxy = site.alone(tokens, 16), site.proxy
    with ThreadPoolExecutor() as pool:
        for server in site.prefill:
            os.killpg(server.process.pid, signal.SIGSTOP)
        body = request(COMPLETIONS, tokens, 16, True)
        answer = pool.submit(proxy.client.post, COMPLETIONS, json=body)
        wait_until(lambda: site.busy("prefill"), "the request is in the prefill")
        (victim,) = (server for server in site.prefill if server.at in site.busy("prefill"))
        victim.kill()
        killed = time.monotonic()
        site.prefill.remove(victim)
        os.killpg(site.prefill[0].process.pid, signal.SIGCONT)
        got = events(answer.result(PATIENCE).text)
        assert time.monotonic() - killed < DOWN_AFTER + SLACK
    assert answered(COMPLETIONS, got) == expected
    assert proxy.metric("ucm_pd_failures_total", role="prefill", why="broken") == 1
    assert proxy.metric("ucm_pd_failures_total", role="decode") == 0


def test_a_decode_server_is_killed_under_clients(site: Site) -> None:
    """Requests without a byte of an answer go to the other server; streams end at once with an
    error, after tokens that are right."""
    count, proxy = 800, site.proxy
    prompts = [prompt(910 + number, 2 * BLOCK + number) for number in range(8)]
    begun: list[int] = []
    ended: dict[int, float] = {}

    def ask(number: int) -> list[dict[str, Any]]:
        body = request(COMPLETIONS, prompts[number], count, stream=number % 2 == 0)
        with proxy.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            begun.append(number)
            text = "\n".join([first, *lines])
        ended[number] = time.monotonic()
        return events(text) if number % 2 == 0 else [json.loads(text)]

    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda tokens: site.alone(tokens, count), prompts))
        answers = [pool.submit(ask, number) for number in range(8)]
        wait_until(lambda: len(begun) >= 2, "two streams have begun")
        victim = next(server for server in site.decode if server.at in site.busy("decode"))
        victim.kill()
        killed = time.monotonic()
        site.decode.remove(victim)
        got = [answer.result(PATIENCE) for answer in answers]
    broken = 0
    for number, documents in enumerate(got):
        tokens = answered(COMPLETIONS, documents)
        if number % 2 == 0 and "error" in documents[-1]:
            broken += 1
            assert tokens == expected[number][: len(tokens)]
            assert ended[number] - killed < DOWN_AFTER + SLACK
        else:
            assert tokens == expected[number]
            assert ended[number] - killed < DOWN_AFTER + RETRY_FOR + LONG_SLACK
    assert broken == proxy.metric("ucm_pd_broken_answers_total")
    assert broken + proxy.metric("ucm_pd_failures_total", role="decode", why="broken") > 0
    assert proxy.metric("ucm_pd_requests_total", status="502") == 0
    assert proxy.client.get("/health").status_code == 200


def test_the_last_decode_server_is_killed(site: Site) -> None:
    """A stream ends with an error, unless vLLM had sent all of it at once, as it does on a busy
    machine; new requests are refused within ``--retry-for``."""
    tokens, count = prompt(904, 3 * BLOCK), 800
    expected, proxy = site.alone(tokens, count), site.proxy
    body = request(COMPLETIONS, tokens, count, True)
    with proxy.client.stream("POST", COMPLETIONS, json=body) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        site.decode[0].kill()
        killed = time.monotonic()
        text = "\n".join([first, *lines])
    assert time.monotonic() - killed < DOWN_AFTER + SLACK
    documents = events(text)
    got = answered(COMPLETIONS, documents)
    if "[DONE]" in text:
        assert got == expected
    else:
        assert "failed during the answer" in documents[-1]["error"]["message"]
        assert got == expected[: len(got)]
    asked = time.monotonic()
    refused = proxy.client.post(COMPLETIONS, json=body | {"stream": False})
    assert time.monotonic() - asked < RETRY_FOR + SLACK
    assert refused.status_code == 503
    assert "no decode server answered" in refused.json()["error"]["message"]
