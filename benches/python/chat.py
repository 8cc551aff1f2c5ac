"""A chat of many turns over a real server: ``python benches/python/chat.py --json chat.json``.

Several clients talk to a vLLM server at the same time; every turn sends the whole history and adds
to it. vLLM's own cache is too small for all of them, so without ucm a turn computes most of its
history again. For each turn: time to first token, reused tokens, memory, descriptors and threads of
the server (without helper processes of other connectors). The last line has the growth after
warm-up.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from variants import BLOCK, VARIANTS, why  # isort: split

from chat_server import SPECIAL, Answer, Server, serve, write_tokenizer
from harness import EngineError
from peer_connectors import UnavailableError

import model as demo_model


def words(client: int, turn: int, count: int) -> str:
    """A client's text in a turn; all texts differ."""
    source = random.Random(1000 * client + turn)
    return " ".join(
        f"w{source.randrange(len(SPECIAL), demo_model.VOCABULARY)}" for _ in range(count)
    )


def talk(server: Server, chosen: argparse.Namespace) -> dict[str, Any]:
    """All turns of all clients; a client without a reply is an error and sends nothing more."""
    chats: dict[int, list[dict[str, str]]] = {client: [] for client in range(chosen.clients)}
    turns: list[dict[str, Any]] = []
    errors: list[str] = []

    def one(client: int, turn: int) -> Answer | str:
        chats[client].append({"role": "user", "content": words(client, turn, chosen.words)})
        try:
            answer = server.ask(chats[client], chosen.answer)
        except (OSError, EngineError) as error:
            return f"client {client}, turn {turn}: {type(error).__name__}: {error}"
        chats[client].append({"role": "assistant", "content": answer.text})
        return answer

    with ThreadPoolExecutor(chosen.clients) as pool:
        for turn in range(1, chosen.turns + 1):
            talking = list(chats)
            results = list(pool.map(lambda client, turn=turn: one(client, turn), talking))
            answers = [result for result in results if isinstance(result, Answer)]
            for client, result in zip(talking, results, strict=True):
                if isinstance(result, str):
                    errors.append(result)
                    print(f"  {result}", flush=True)
                    del chats[client]
            if not answers:
                break
            turns.append(
                {
                    "turn": turn,
                    "first_token_s": [round(answer.first_s, 4) for answer in answers],
                    "prompt_tokens": statistics.mean(answer.prompt_tokens for answer in answers),
                    "cached_tokens": statistics.mean(answer.cached_tokens for answer in answers),
                    **server.usage(),
                }
            )
            print(
                f"  turn {turn}: {statistics.median(turns[-1]['first_token_s']):.3f} s", flush=True
            )
    return {"turns": turns, "errors": errors}


def growth(turns: list[dict[str, Any]]) -> dict[str, float] | None:
    """The growth of the last turns relative to those right after warm-up (the first fifth)."""
    warm = max(1, len(turns) // 5)
    settled = turns[warm:]
    part = max(1, len(settled) // 4)
    if len(settled) < 2 * part:
        return None
    keys = ("memory_mib", "descriptors", "threads")

    def level(some: list[dict[str, Any]], key: str) -> float:
        return float(statistics.median(turn[key] for turn in some))

    return {key: level(settled[-part:], key) / level(settled[:part], key) - 1 for key in keys}


def report(run: dict[str, Any]) -> str:
    """A line or two about one server."""
    if "failed" in run:
        return f"{run['variant']}: {run['failed']}"
    last = run["turns"][-1] if run["turns"] else None
    said = f"{run['variant']}: {len(run['turns'])} turns, {len(run['errors'])} errors"
    if last is not None:
        said += f"; last turn {statistics.median(last['first_token_s']):.3f} s to the first token, "
        said += f"{last['cached_tokens']:.0f} of {last['prompt_tokens']:.0f} prompt tokens reused"
    if run["growth"] is not None:
        said += "; after warm-up " + ", ".join(
            f"{key} {value:+.1%}" for key, value in run["growth"].items()
        )
    return "\n".join([said, *(f"  {error}" for error in run["errors"][:5])])


def main() -> None:
    """Talks, prints, writes."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--variant", nargs="+", choices=VARIANTS, default=["none", "file"])
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--turns", type=int, default=20)
    arguments.add_argument("--words", type=int, default=96, help="a client says in a turn")
    arguments.add_argument("--answer", type=int, default=32, help="words of an answer")
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    history = chosen.turns * (chosen.words + chosen.answer)
    # A word has up to six characters with its space; vLLM refuses text of more than five for each
    # token it could read.
    length = (history * 6 // 5 // BLOCK + 2) * BLOCK
    if length > demo_model.MAX_TOKENS:
        arguments.error(
            f"the model reads {demo_model.MAX_TOKENS} tokens, these chats need {length}"
        )
    blocks = max(2, chosen.clients // 2) * (history // BLOCK + 2)  # half of the chats, at the end
    runs = []
    with tempfile.TemporaryDirectory(prefix="chat-") as folder:
        work = Path(folder)
        demo_model.write(work / "model")
        write_tokenizer(work / "model", demo_model.VOCABULARY)
        for variant in chosen.variant:
            print(variant, flush=True)
            root, log = work / f"blocks-{variant}", work / f"{variant}.log"
            root.mkdir()
            run: dict[str, Any] = {"variant": variant}
            try:
                with serve(variant, work / "model", root, blocks, length, log) as server:
                    run |= talk(server, chosen)
                run["growth"] = growth(run["turns"])
            except UnavailableError as error:
                run["failed"] = str(error)
            except EngineError as error:
                run["failed"] = f"{error}: {why(log.read_text(errors='replace'))}"
            runs.append(run)
    settings = {key: getattr(chosen, key) for key in ("clients", "turns", "words", "answer")} | {
        "blocks": blocks
    }
    figures = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "settings": settings,
        "runs": runs,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    print("\n".join(report(run) for run in runs))


if __name__ == "__main__":
    main()
