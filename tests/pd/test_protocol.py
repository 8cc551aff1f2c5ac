"""What the proxy reads of requests and answers, and what it changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucm.pd.protocol import (
    ANSWER_FIELDS,
    PREFIX_BYTES,
    PROMPTS,
    Generation,
    answered_params,
    event_end,
    read,
    why_retry,
)

CHAT = "/v1/chat/completions"
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWERED = {"do_remote_prefill": True, "ucm": {"key": "k", "tokens": 64, "identity": "i"}}


def generation(endpoint: str, **body: Any) -> Generation:
    found = read(endpoint, json.dumps(body).encode())
    assert found is not None
    return found


def test_a_prefill_is_the_same_prompt_for_one_token() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "é\ud83d"}],
        "tools": [{"a": 1}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"x": 1},
        "cache_salt": "s",
        "temperature": 0.7,
        "seed": 3,
        "stop": ["x"],
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 4,
        "min_tokens": 7,
        "logprobs": True,
        "top_logprobs": 5,
        "max_tokens": 90,
        "max_completion_tokens": 80,
        "unknown": {"kept": True},
    }
    sent = json.loads(generation(CHAT, **body).for_prefill())
    assert sent == {
        **{key: value for key, value in body.items() if key not in ANSWER_FIELDS},
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": REMOTE,
    }


def test_a_prefill_of_token_ids_changes_its_sampling_params() -> None:
    sampling = {"max_tokens": 9, "min_tokens": 3, "n": 2, "logprobs": 1, "temperature": 0.5}
    sent = json.loads(
        generation(
            "/inference/v1/generate", token_ids=[1, 2], sampling_params=sampling, stream=True
        ).for_prefill()
    )
    assert sent == {
        "token_ids": [1, 2],
        "sampling_params": {"temperature": 0.5, "max_tokens": 1},
        "stream": False,
        "kv_transfer_params": REMOTE,
    }


def test_without_an_answer_the_decode_server_gets_the_same_bytes() -> None:
    raw = b'{ "prompt" :"a",  "max_tokens": 2.50, "prompt": "b" }'
    found = read("/v1/completions", raw)
    assert found is not None
    assert found.for_decode(None) == found.for_decode({}) == raw


def test_params_of_the_client_and_of_the_answer_go_to_the_decode_server() -> None:
    own = {"ucm": {"max_load_tokens": 5, "key": "old"}, "theirs": [1]}
    found = generation(CHAT, messages=[], kv_transfer_params=own)
    assert json.loads(found.for_prefill())["kv_transfer_params"] == own | REMOTE
    assert json.loads(found.for_decode(ANSWERED)) == {
        "messages": [],
        "kv_transfer_params": own | ANSWERED | {"ucm": own["ucm"] | ANSWERED["ucm"]},
    }


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "a"}, ""),
        ({"prompt": ["a"]}, ""),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"prompt": "a", "echo": True}, ""),
        ({"prompt": "a", "logprobs": 0}, ""),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "prompt logprobs"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt logprobs"),
        ({"prompt": "a", "sampling_params": {"prompt_logprobs": 1}}, "prompt logprobs"),
        ({"prompt": "a", "use_beam_search": True}, "beam search"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncated"),
        ({"prompt": "a", "truncate_prompt_tokens": 9}, ""),
        ({"prompt": "a", "max_tokens": 0}, "no tokens"),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "split already"),
        ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}}, "split already"),
        ({"prompt": "a", "kv_transfer_params": {"ucm": {"load": False}}}, ""),
        ({"prompt": "a", "kv_transfer_params": 7}, "unknown params"),
    ],
)
def test_requests_that_skip_the_prefill_server(body: dict[str, Any], why: str) -> None:
    assert generation("/v1/completions", **body).skips == why


def test_short_bodies_skip_the_prefill_server() -> None:
    raw = b'{"prompt": "a"}'
    assert [read("/v1/completions", raw, most).skips for most in (15, 16)] == ["", "short"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "raw", [b"", b"[", b"[1]", b'"a"', b'{"model": "m"}', b"\xff{}", b"[" * 9**5]
)
def test_a_body_that_is_not_understood(raw: bytes) -> None:
    assert read(CHAT, raw) is None
    assert read("/v1/embeddings", b'{"messages": []}') is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    endpoint=st.sampled_from(sorted(PROMPTS)),
    body=st.dictionaries(
        st.sampled_from(
            [
                *sorted(ANSWER_FIELDS),
                *("max_tokens", "max_completion_tokens", "sampling_params", "tools", "system"),
                *("kv_transfer_params", "use_beam_search", "truncate_prompt_tokens", "other"),
            ]
        ),
        JSON,
    ),
    prompt=JSON,
)
def test_any_body_is_read_and_only_named_fields_change(
    endpoint: str, body: dict[str, Any], prompt: Any
) -> None:
    body[PROMPTS[endpoint]] = prompt
    found = generation(endpoint, **body)
    changed = ANSWER_FIELDS | {"max_tokens", "max_completion_tokens", "kv_transfer_params"}
    changed |= {"sampling_params"} if endpoint == "/inference/v1/generate" else set()
    sent, whole = json.loads(found.for_prefill()), json.loads(found.for_decode(ANSWERED))
    assert {k: v for k, v in sent.items() if k not in changed} == {
        k: v for k, v in body.items() if k not in changed
    }
    assert sent["kv_transfer_params"].items() >= REMOTE.items()
    params = whole.pop("kv_transfer_params")
    assert params["do_remote_prefill"] is True
    assert params["ucm"].items() >= ANSWERED["ucm"].items()  # type: ignore[attr-defined]
    assert whole == {k: v for k, v in body.items() if k != "kv_transfer_params"}
    assert isinstance(found.prefixes, list)


def test_requests_that_begin_alike_share_prefixes() -> None:
    turn = {"role": "user", "content": "x" * (5 * PREFIX_BYTES)}
    first = generation(CHAT, model="m", messages=[turn]).prefixes
    second = generation(
        CHAT, model="m", messages=[turn, {"role": "user", "content": "y" * 3000}], n=2
    ).prefixes
    other = generation(CHAT, model="m2", messages=[turn]).prefixes
    salted = generation(CHAT, model="m", messages=[turn], cache_salt="s").prefixes
    assert len(first) == 5
    assert second[:5] == first
    assert not set(first) & (set(other) | set(salted))


def test_params_of_an_answer() -> None:
    assert answered_params(json.dumps({"kv_transfer_params": ANSWERED}).encode()) == ANSWERED
    for params in (None, {}, [], {"do_remote_prefill": False}, {"ucm": {}}):
        assert answered_params(json.dumps({"kv_transfer_params": params}).encode()) is None
    assert answered_params(b"no json") is None


@pytest.mark.parametrize(
    ("status", "document", "why"),
    [
        (200, {"choices": [{"text": 'an "error" and an "abort"', "finish_reason": "stop"}]}, ""),
        (200, {"choices": [{"text": "", "finish_reason": "abort"}]}, "unavailable"),
        (200, {"error": {"code": "engine_paused", "type": "x"}}, "unavailable"),
        (200, {"error": {"code": 503, "type": "ServiceUnavailableError"}}, "unavailable"),
        (200, {"error": {"code": 500, "type": "InternalServerError"}}, "error"),
        (200, {"error": {"code": 400, "type": "BadRequestError"}}, ""),
        (200, {"type": "error", "error": {"type": "overloaded_error"}}, "unavailable"),
        (400, {"error": {"code": "engine_paused"}}, "unavailable"),
        (400, {"error": {"code": 400}}, ""),
        (404, {}, ""),
        (429, {}, "busy"),
        (500, {}, "error"),
        (503, {}, "unavailable"),
    ],
)
def test_answers_that_may_be_retried(status: int, document: dict[str, Any], why: str) -> None:
    raw = json.dumps(document)
    assert why_retry(status, raw.encode()) == why
    assert why_retry(status, f"event: error\ndata: {raw}\n\n".encode()) == why


def test_the_ends_of_events() -> None:
    assert event_end(b"data: a\n\ndata: b\n\ndata") == 18
    assert event_end(b"data: a\n\ndata: b\n\ndata", first=True) == 9
    assert event_end(b"data: a\r\n\r\ndata: b", first=True) == 11
    assert event_end(b"data: a\n") == 0
