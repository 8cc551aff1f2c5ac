"""The process of one vLLM engine for :mod:`harness`: commands and results use one connection.

The first message is that of :meth:`specs.EngineSpec.first_message`; the reply ``("ready", {})``
means that the engine runs. Then every command is ``(number, name, arguments)`` with the reply
``(number, True, value)`` or ``(number, False, text)``. Commands may overlap: only ``collect`` waits
for requests.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any


class Child:
    """One AsyncLLM and its requests."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.produced: dict[str, int] = {}

    async def submit(self, requests: list[dict[str, Any]]) -> list[str]:
        """Starts every request; returns their ids at once."""
        ids = []
        for request in requests:
            request_id = request["id"]
            self.produced[request_id] = 0
            self.tasks[request_id] = asyncio.create_task(self._run(request))
            ids.append(request_id)
        return ids

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt, options = asked(request)
        options["data_parallel_rank"] = request.get("engine")
        started, first, last = time.monotonic(), None, None
        async for output in self.engine.generate(prompt, **options):
            last = output
            self.produced[request["id"]] = len(output.outputs[0].token_ids)
            if first is None and self.produced[request["id"]]:
                first = time.monotonic() - started
        return answered(request["id"], last, first)

    async def collect(self, ids: list[str]) -> list[dict[str, Any]]:
        """Waits for the requests and returns their results, in order."""
        return [await self.tasks.pop(request_id) for request_id in ids]

    async def embed(self, request_id: str, tokens: list[int]) -> list[float]:
        """The vector of an embedding engine."""
        from vllm import PoolingParams
        from vllm.inputs import TokensPrompt

        params, last = PoolingParams(task="embed"), None
        async for output in self.engine.encode(
            TokensPrompt(prompt_token_ids=tokens), params, request_id
        ):
            last = output
        return [] if last is None else last.outputs.data.tolist()

    async def progress(self, ids: list[str]) -> list[tuple[int, bool]]:
        """Tokens so far and whether the request ended, for each id; does not wait."""
        return [(self.produced[i], i not in self.tasks or self.tasks[i].done()) for i in ids]

    async def abort(self, ids: list[str]) -> None:
        """Aborts the requests, like a client that disconnects."""
        await self.engine.abort(ids)

    async def reset(self) -> bool:
        """Empties vLLM's own prefix cache; False while a request or a transfer still holds
        blocks."""
        return bool(await self.engine.reset_prefix_cache())

    async def metrics(self) -> dict[str, float]:
        """Sum of every counter and gauge of the Prometheus registry, over its labels, and of each
        ``name:reason`` and ``name:source``."""
        from prometheus_client import REGISTRY

        sums: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    labels = [
                        sample.labels[label]
                        for label in ("reason", "source")
                        if label in sample.labels
                    ]
                    names = [sample.name, *(f"{sample.name}:{label}" for label in labels)]
                    for name in names:
                        sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    async def utility(self, method: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the engine core, which holds the scheduler (see :mod:`probe`)."""
        return await self.engine.engine_core.call_utility_async(method, *args)

    async def utility_each(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        """The same of every data-parallel engine."""
        core = self.engine.engine_core
        engines = getattr(core, "core_engines", [])
        if len(engines) < 2:
            return [await self.utility(method, args)]
        calls = (core._call_utility_async(method, *args, engine=engine) for engine in engines)
        return list(await asyncio.gather(*calls))

    async def rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of every worker (see :mod:`probe`)."""
        return list(await self.engine.collective_rpc(method, args=args, kwargs=kwargs))

    async def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Calls a method of the engine itself."""
        return await getattr(self.engine, method)(**kwargs)

    def shutdown(self) -> None:
        """Ends the engine."""
        # seconds; vLLM kills its core after 5, which a busy machine may need
        self.engine.shutdown(timeout=40)


class InProcess(Child):
    """One LLMEngine with core and worker in this process, like a trainer's: it steps only when it
    is called."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.outputs: dict[str, Any] = {}

    async def submit(self, requests: list[dict[str, Any]]) -> list[str]:
        """Adds every request; nothing runs before the next :meth:`collect` or :meth:`step`."""
        for request in requests:
            prompt, options = asked(request)
            params = options.pop("sampling_params")
            self.engine.add_request(options.pop("request_id"), prompt, params, **options)
            self.outputs[request["id"]], self.produced[request["id"]] = None, 0
        return [request["id"] for request in requests]

    async def step(self, steps: int) -> None:
        """Runs ``steps`` steps."""
        for _ in range(steps):
            for output in self.engine.step():
                self.outputs[output.request_id] = output
                self.produced[output.request_id] = len(output.outputs[0].token_ids)

    async def collect(self, ids: list[str]) -> list[dict[str, Any]]:
        """Steps until these requests ended, and no step longer."""
        while not all(
            (output := self.outputs[name]) is not None and output.finished for name in ids
        ):
            await self.step(1)
        return [answered(name, self.outputs.pop(name), None) for name in ids]

    async def reset(self) -> bool:
        """Empties vLLM's own prefix cache."""
        return bool(self.engine.reset_prefix_cache())

    async def utility(self, method: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the engine core."""
        return getattr(self.engine.engine_core.engine_core, method)(*args)

    async def rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of every worker (see :mod:`probe`)."""
        return list(self.engine.collective_rpc(method, args=args, kwargs=kwargs))

    async def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """Calls a method of the engine itself."""
        return getattr(self.engine, method)(**kwargs)

    def shutdown(self) -> None:
        """Ends the engine."""
        self.engine.engine_core.shutdown()


def asked(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A request in vLLM's form: the prompt, and its named extras."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=request["tokens"])
    if request.get("salt") is not None:
        prompt["cache_salt"] = request["salt"]
    if request.get("picture") is not None:
        from pictures import shown

        prompt.update(shown(*request["picture"]))
    lora = None
    if request.get("lora") is not None:
        from vllm.lora.request import LoRARequest

        name, number, path = request["lora"]
        lora = LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
    params = SamplingParams(
        n=request.get("sequences", 1),
        temperature=0.0
        if request.get("sequences", 1) == 1
        else 1.0,  # vLLM refuses several of temperature 0
        top_k=1,
        max_tokens=request["max_tokens"],
        min_tokens=request["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        extra_args=request.get("extra_args"),
    )
    return prompt, {
        "sampling_params": params,
        "request_id": request["id"],
        "lora_request": lora,
        "priority": request.get("priority", 0),
    }


def answered(request_id: str, last: Any, first: float | None) -> dict[str, Any]:
    """The result of a request, from its last output."""
    if last is None:
        return {
            "id": request_id,
            "tokens": [],
            "logprobs": [],
            "cached": 0,
            "finish": "none",
            "first": None,
        }
    answer = last.outputs[0]
    tokens = list(answer.token_ids)
    return {
        "id": request_id,
        "tokens": tokens,
        "logprobs": [
            step[token].logprob for token, step in zip(tokens, answer.logprobs or [], strict=False)
        ],
        "cached": last.num_cached_tokens or 0,
        "finish": answer.finish_reason,
        "others": [list(other.token_ids) for other in last.outputs[1:]],
        "params": last.kv_transfer_params,
        "first": first,
    }


def set_environment(environment: dict[str, str]) -> None:
    """Sets the environment, including the module search path, because the process was forked from
    one with another."""
    os.environ.update(environment)
    path = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = path + [place for place in sys.path if place not in path]


async def serve(connection: Connection, first: dict[str, Any]) -> None:
    """Starts the engine and executes commands until ``shutdown``; if the other side disconnects,
    everything ends."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[tuple[int, str, dict[str, Any]]] = asyncio.Queue()

    def read() -> None:
        while True:
            try:
                command = connection.recv()
            except (EOFError, OSError):
                os.killpg(
                    0, signal.SIGKILL
                )  # the test has ended, perhaps during the engine's start
                return
            loop.call_soon_threadsafe(commands.put_nowait, command)
            if command[1] == "shutdown":
                return

    threading.Thread(target=read, name="commands", daemon=True).start()
    set_environment(first["environment"])
    transfer = (
        KVTransferConfig(**first["kv_transfer"]) if first["kv_transfer"] is not None else None
    )
    config = AsyncEngineArgs(**first["args"], kv_transfer_config=transfer).create_engine_config()
    if first["fork"]:
        # Creating the configuration has set "spawn", as for every engine on a CPU.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    if first["in_process"]:
        child: Child = InProcess(LLMEngine.from_vllm_config(config))
    else:
        child = Child(AsyncLLM.from_vllm_config(config, disable_log_stats=False))

    async def answer(number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            reply = (number, True, await getattr(child, name)(**arguments))
        except Exception as error:
            reply = (number, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        connection.send(reply)

    connection.send(("ready", {}))
    running: set[asyncio.Task[None]] = set()
    while (command := await commands.get())[1] != "shutdown":
        task = asyncio.create_task(answer(*command))
        running.add(task)
        task.add_done_callback(running.discard)
    child.shutdown()
    connection.send((command[0], True, None))


def main(descriptor: int) -> None:
    """Serves the connection of that descriptor; an exception before the engine runs is sent to the
    other side."""
    connection = Connection(descriptor)
    try:
        first = connection.recv()
        if "program" in first:
            set_environment(first["environment"])
            module, _, name = first["program"].partition(":")
            connection.send(
                ("ready", getattr(importlib.import_module(module), name)(**first["arguments"]))
            )
        else:
            asyncio.run(serve(connection, first))
    except Exception:
        connection.send(("failed", traceback.format_exc()))
        raise
