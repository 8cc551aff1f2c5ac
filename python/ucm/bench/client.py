"""The client of ``ucm bench vllm``: streams answers of a server and reads its metrics.

Prompts are token ids, which vLLM's completions take. Answers have a fixed length (``ignore_eos``).
httpx and the client of Prometheus come with the extra ``bench``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ucm.bench.metrics import BenchmarkMetrics, summary
from ucm.bench.scenarios import Conversation, Scenario
from ucm.errors import UcmError

#: Seconds; they end a run with a server that hangs.
CONNECT, ANSWER = 10.0, 3600.0
#: Seconds for which the server is asked to empty its device's cache.
RESET = 30.0


class BenchError(UcmError):
    """The server does not serve, or refuses, what a benchmark needs."""


@dataclass
class Answer:
    """One request. Times are those of the clock in seconds."""

    began: float
    first: float = 0.0
    last: float = 0.0
    #: As the server counts them.
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.began

    @property
    def tpot(self) -> float | None:
        """Seconds of each further token; None without one."""
        further = self.output_tokens - 1
        return (self.last - self.first) / further if further > 0 else None


@dataclass
class Sample:
    """One run of a scenario."""

    metrics: BenchmarkMetrics
    answers: list[Answer]
    failed: list[Answer]
    #: Whether the device's cache was emptied after the warming; None without warming.
    emptied: bool | None
    #: Shares of the tokens of prompts, by where they were found; None where not known.
    hits: dict[str, float | None]

    def as_json(self) -> dict[str, Any]:
        """Everything but single requests."""
        return {
            "metrics": vars(self.metrics),
            "hits": self.hits,
            "requests": len(self.answers),
            "failed": len(self.failed),
            "prompt_tokens": sum(answer.prompt_tokens for answer in self.answers),
            "output_tokens": sum(answer.output_tokens for answer in self.answers),
            "device_cache_emptied": self.emptied,
        }


class Server:
    """A server under test; an asynchronous context manager."""

    def __init__(self, url: str, key: str | None = None, model: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.model = url, model or ""
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(ANSWER, connect=CONNECT),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def prepare(self, scenario: Scenario) -> None:
        """Finds the model's name, and checks that the scenario fits. Raises
        :class:`BenchError`."""
        try:
            answer = await self._client.get("/v1/models")
            models = answer.raise_for_status().json()["data"]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise BenchError(f"{self.url} does not list its models: {why}") from None
        known = {model["id"]: model.get("max_model_len") for model in models}
        self.model = self.model or next(iter(known), "")
        if self.model not in known:
            raise BenchError(f"{self.url} has no model {self.model!r}; it has {', '.join(known)}")
        most = known[self.model]
        if most is not None and scenario.longest > most:
            raise BenchError(
                f"{scenario.name} needs {scenario.longest} tokens for a request and"
                f" {self.model} has {most}: make it shorter with --input, --output or --turns"
            )

    async def ask(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Streams the answer to a prompt; never raises for what the server does."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.perf_counter())
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {text[:300]}"
                    return answer
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _read(answer, json.loads(line[6:]))
        except (httpx.HTTPError, ValueError) as error:
            answer.error = str(error) or type(error).__name__
        if answer.error is None and not answer.output_tokens:
            answer.error = "the answer ended without a token"
        return answer

    async def counts(self) -> dict[str, float]:
        """Counters of ``/metrics``, summed over labels; empty where there are none."""
        found: dict[str, float] = {}
        with suppress(httpx.HTTPError, ValueError):
            answer = await self._client.get("/metrics")
            for family in text_string_to_metric_families(answer.raise_for_status().text):
                for sample in family.samples:
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def empty_device(self) -> bool:
        """Empties the device's prefix cache, where the server lets a client do so
        (``VLLM_SERVER_DEV_MODE=1``)."""
        end = time.monotonic() + RESET
        while time.monotonic() < end:
            try:
                answer = await self._client.post("/reset_prefix_cache")
            except httpx.HTTPError:
                return False
            if answer.status_code != 200:
                return False
            if not answer.content or answer.json().get("success", True):
                return True
            await asyncio.sleep(0.05)  # blocks are still being stored
        return False


def _read(answer: Answer, event: Mapping[str, Any]) -> None:
    """Adds one event of a stream."""
    if "error" in event:
        answer.error = str(event["error"])[:300]
    for choice in event.get("choices", ()):
        tokens = choice.get("token_ids") or []
        if tokens or choice.get("text"):
            answer.last = time.perf_counter()
            answer.first = answer.first or answer.last
            answer.tokens += tokens
            answer.output_tokens += len(tokens) or 1
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)


async def run(
    server: Server, scenario: Scenario, seed: str, done: Callable[[], object] = lambda: None
) -> Sample:
    """Runs a scenario, with ``done`` after each request. :class:`BenchError` if none succeeds."""
    conversations = [Conversation(scenario, seed, number) for number in range(scenario.requests)]
    places = asyncio.Semaphore(scenario.concurrency)

    async def warm(conversation: Conversation) -> Answer | None:
        prompt = conversation.warming()
        async with places:
            return await server.ask(prompt, 1) if prompt else None

    async def talk(conversation: Conversation) -> list[Answer]:
        answers: list[Answer] = []
        async with places:
            for _ in range(scenario.turns):
                before = answers[-1].tokens if answers else []
                answers.append(
                    await server.ask(conversation.prompt(before), scenario.output_tokens)
                )
                done()
                if answers[-1].error is not None:
                    break
        return answers

    emptied = None
    if scenario.warmed:
        warmed = await asyncio.gather(*map(warm, conversations))
        _refuse_failures([answer for answer in warmed if answer is not None])
        emptied = await server.empty_device()
    before, began = await server.counts(), time.perf_counter()
    talks = await asyncio.gather(*map(talk, conversations))
    seconds, after = time.perf_counter() - began, await server.counts()
    answers = [answer for answers in talks for answer in answers]
    good = [answer for answer in answers if answer.error is None]
    _refuse_failures(answers if not good else [])
    hits = _hits(good, before, after)
    metrics = _metrics(good, seconds, before, after)
    metrics.hit_rate = hits["all"]
    failed = [answer for answer in answers if answer.error is not None]
    return Sample(metrics, good, failed, emptied, hits)


async def take_turns(
    servers: Sequence[Server],
    scenario: Scenario,
    rounds: int,
    seed: str,
    done: Callable[[], object] = lambda: None,
) -> list[list[Sample]]:
    """Runs a scenario on each server in each round, in an order that alternates. Returns the
    samples of each server. Every run has prompts of its own, so that no server finds those of
    another in a store that they share."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
            await server.prepare(scenario)
        samples: list[list[Sample]] = [[] for _ in servers]
        for number in range(rounds):
            order = list(enumerate(servers))
            for place, server in reversed(order) if number % 2 else order:
                own = f"{seed} {number} {place}"
                samples[place].append(await run(server, scenario, own, done))
    return samples


def _refuse_failures(answers: Sequence[Answer]) -> None:
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise BenchError(f"the server answers no request of this scenario: {failed}")


def _metrics(
    answers: Sequence[Answer], seconds: float, before: dict[str, float], after: dict[str, float]
) -> BenchmarkMetrics:
    def share(part: str, whole: str) -> float | None:
        more = after.get(whole, 0.0) - before.get(whole, 0.0)
        return (after.get(part, 0.0) - before.get(part, 0.0)) / more if more > 0 else None

    tokens = sum(answer.prompt_tokens + answer.output_tokens for answer in answers)
    further = [answer.tpot for answer in answers if answer.tpot is not None]
    return BenchmarkMetrics(
        *summary([answer.ttft for answer in answers]),
        *summary(further or [0.0]),
        throughput=tokens / seconds,
        requests_per_second=len(answers) / seconds,
        load_time_mean=share("ucm_load_seconds_sum", "ucm_load_seconds_count"),
        dump_time_mean=share("ucm_dump_seconds_sum", "ucm_dump_seconds_count"),
        sparse_ratio=share("ucm_sparse_kept_blocks_total", "ucm_sparse_seen_blocks_total"),
    )


def _hits(
    answers: Sequence[Answer], before: dict[str, float], after: dict[str, float]
) -> dict[str, float | None]:
    """By vLLM's counters, else by what it reports of each request."""
    asked, device, store = (
        after.get(f"vllm:{name}_total", 0.0) - before.get(f"vllm:{name}_total", 0.0)
        for name in ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits")
    )
    if asked > 0:
        shares = {"device": device / asked, "store": store / asked}
        return {"all": (device + store) / asked, **shares}
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    prompts = sum(answer.prompt_tokens for answer in answers)
    whole = sum(cached) / prompts if cached and prompts else None
    return {"all": whole, "device": None, "store": None}
