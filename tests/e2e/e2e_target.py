"""The server under test, seen as a client sees it: an address that serves OpenAI's endpoints."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

T = TypeVar("T")

#: Seconds to end hangs.
PATIENCE = 600.0
#: Words for a server whose tokenizer is not known: most are one token each.
ENGLISH = tuple(
    re.findall(
        r"\w+",
        """the of and to in is was for on that with as it by at from his an were are which this be
        or had first one their its new after but who not they have her she two been other when
        there all during into school time may years more most only over city some world would
        where later up such used many can state about national out known united then made also""",
    )
)


def wait_until(condition: Callable[[], T], what: str) -> T:
    """Polls until the condition is true; fails with ``what`` when it never is."""
    end, pause = time.monotonic() + PATIENCE, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} s: {what}"
        pause.wait(0.05)
    return value


@dataclass(frozen=True)
class Completion:
    """An answer and the counts beside it; ``cached`` is None where the server does not say."""

    text: str
    prompt_tokens: int
    cached: int | None


class Target:
    """A server; a context manager. Prompts are made of ``words``, whatever its tokenizer is."""

    def __init__(self, url: str, words: Sequence[str] = ENGLISH, key: str = "") -> None:
        self.url, self._words = url, words
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=PATIENCE)
        (first, *_) = self.client.get("/v1/models").raise_for_status().json()["data"]
        self.model: str = first["id"]
        self.max_model_len: int | None = first.get("max_model_len")

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def prompt(self, seed: str, words: int) -> str:
        """Text that depends on the seed alone; more words of a seed begin with fewer."""
        source = random.Random(seed)
        return " ".join(source.choice(self._words) for _ in range(words))

    def ask(self, prompt: str, tokens: int = 16, **more: object) -> Completion:
        """The most likely answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
        response = self.client.post("/v1/completions", json=body | more)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            answer["choices"][0]["text"], usage["prompt_tokens"], details.get("cached_tokens")
        )

    def metrics(self) -> dict[str, float]:
        """Values of ``/metrics``, summed over labels; empty where there are none."""
        answer = self.client.get("/metrics")
        found: dict[str, float] = {}
        if answer.status_code == 200:
            for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", answer.text, re.M):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def label(self, metric: str, label: str) -> str | None:
        """A label of a metric."""
        found = re.search(
            rf'^{metric}\{{.*?\b{label}="([^"]*)"', self.client.get("/metrics").text, re.M
        )
        return found[1] if found else None

    def hits(self) -> tuple[float, float]:
        """Tokens of prompts that were found so far: on the device, in a store."""
        metrics = self.metrics()
        names = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        device, store = (metrics.get(name, 0.0) for name in names)
        return device, store

    def empty_device(self) -> bool | None:
        """Whether the device's cache is empty now, blocks that are being stored keep it from that;
        None if the server does not let a client do this."""
        answer = self.client.post("/reset_prefix_cache")
        return bool(answer.json()["success"]) if answer.status_code == 200 else None
