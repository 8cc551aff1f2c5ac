"""The matrix through vLLM: live engines, vLLM's own cache off, whose roots are harmed between
requests.

One engine of each model runner over block files, and one with memory above segments.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import roots
from _pytest.mark import ParameterSet
from apart import ENGINES, OVER_PC, V1, V2, R, through
from fuse import Fuse
from harm import Victim
from harness import Engine, EngineHost, wait_until
from kinds import EngineRow, FileRow, FuseRow, RootRow
from live import ANSWER, BLOCKS, Kind, Live, Prompt, counted, poll
from pictures import CAT, DOG, TOKENS, write_llava
from rows import BESIDE, FILE_ROWS, FUSE_ROWS, KILLED, MEDIA, ROOT_ROWS, SLEEP, WEIGHTS
from siblings import LOADING, SIBLING, load_of_sibling, several
from specs import Ask, Result

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

#: The block that is harmed, and its neighbour.
VICTIM, OTHER = 1, 2
#: Attempts until a request is affected by the file system's fault.
GOES = 4
#: Counters of waiting: none of them changes while a file is bad.
WAITS = {"timeout", "lookup_late", "busy", "unhealthy", "breaker_opened"}


KINDS = {V1: Kind("v1"), V2: Kind("v2"), OVER_PC: Kind("v1", over_pc=True)}


def each(rows: Sequence[R]) -> list[ParameterSet]:
    """The cells of this run as parameters, engine by engine; one that is skipped if there are
    none."""
    cells = [
        pytest.param(engine, row, id=f"{engine.removeprefix('vLLM ')}-{row.name}")
        for engine in ENGINES
        for row in rows
        if through(row, engine)
    ]
    left = pytest.mark.skip(reason="no engine runs it in the short form: make test-long")
    return cells or [pytest.param(OVER_PC, rows[0], id=rows[0].name, marks=left)]


@pytest.fixture(scope="module")
def live(
    engine: str,
    host: EngineHost,
    model: Path,
    work: Path,
    kv_transfer_config: dict[str, Any] | None,
) -> Iterator[Live]:
    """The engine. As root its root is a small file system of its own, mounted from elsewhere."""
    kind = KINDS[engine]
    if kind.over_pc and kv_transfer_config is not None:
        pytest.skip("--kv-transfer-config names another connector: it has no pipeline of ours")
    base = work / engine.replace(" ", "-").replace("|", "-")
    base.mkdir()
    # A fifth of it is for blocks. That is more than the rows of a minute write: of blocks used in
    # the same minute the last ones of any prompt are evicted first, also of one that was just used.
    with roots.new_root(
        base, "bind" if roots.is_root() else "plain", size="256m", inodes=4000
    ) as root:
        yield Live(host, kind.spec(model, root, kv_transfer_config), root, kind.over_pc)
        host.stop()


@pytest.fixture(autouse=True)
def revived(live: Live) -> None:
    """The engine runs when a row begins."""
    live.revive()


@pytest.mark.parametrize(("engine", "row"), each(FILE_ROWS), scope="module")
def test_file(engine: str, row: FileRow, live: Live) -> None:
    if not (live.ours or row.any_file):
        pytest.skip("this row is about records of ours")
    stored = live.store_prompt()
    at, other = (
        (VICTIM, OTHER) if live.ours else (len(stored.copies) // 2, len(stored.copies) // 2 - 1)
    )
    victim = Victim(stored.copies[at], stored.copies[other], random.Random(row.name))

    row.harm(victim)
    if live.has_memory:
        assert live.is_hit(stored), "blocks in memory are sound"
    live.forget()
    before = live.counts()
    answer = live.ask(stored.tokens)
    assert answer.tokens == stored.right.tokens, "wrong tokens"
    news = counted(before, live.counts())
    if live.ours:
        # The scheduler side reads footers: with the footer all records of a segment are lost.
        gone = ("absent",) if victim.copy.in_segment else ()
        assert set(row.reasons + gone) & set(news), f"counted: {news}"
        assert not WAITS & set(news), f"counted: {news}"

    if row.heals == "left" and not (victim.copy.in_segment and not row.judged):
        kept = victim.path.read_bytes() if victim.path.is_file() else None
        assert live.ask(stored.tokens).tokens == stored.right.tokens
        assert (victim.path.read_bytes() if victim.path.is_file() else None) == kept, (
            "a foreign file was replaced"
        )
        roots.remove(victim.path)
    live.await_hit(stored, "the prompt is stored and found again")
    if live.ours:
        _judge(live, stored)
        assert not WAITS & set(counted(before, live.counts()))


@pytest.mark.parametrize(("engine", "row"), each(ROOT_ROWS), scope="module")
def test_root(engine: str, row: RootRow, live: Live) -> None:
    if row.kind != "plain":
        roots.need_root()
    old, fresh = live.store_prompt(), live.new_prompt()
    right = live.ask(fresh, salt="another key, the same computation")

    before = live.counts()
    harmed = row.harm(live.root)
    next(harmed)
    try:
        hit = live.is_hit(old)
        news = counted(before, live.counts())
        assert hit or not row.reads, f"a block that was stored is no hit any more, counted: {news}"
        for _ in range(2):
            assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
            assert live.ask(old.tokens).tokens == old.right.tokens, "wrong tokens"
        if live.ours:  # dumps end after the request, and the store may make room for some
            more = iter(range(20))

            def refused() -> bool:
                if set(row.reasons) <= set(counted(before, live.counts())):
                    return True
                if next(more, None) is not None:
                    live.ask(live.new_prompt())
                return False

            wait_until(refused, f"{row.reasons} are counted", 60)
            news = counted(before, live.counts())
            assert not {"timeout", "lookup_late"} & set(news), f"counted: {news}"
    finally:
        next(harmed, None)

    live.await_hit(old, "a stored block is a hit again, or was stored again")
    again = live.store_prompt()
    if live.ours:
        _judge(live, again)


@pytest.mark.parametrize(("engine", "row"), each(FUSE_ROWS), scope="module")
def test_file_system(engine: str, row: FuseRow, live: Live) -> None:
    """A faulty file system is mounted over the root and shows its files."""
    roots.need_root()
    system = Fuse(live.root.with_name("export"), live.root)
    try:
        told = []
        for _ in range(GOES):
            old = live.store_prompt()
            live.forget()
            before = live.counts()
            if _meets(row, live, system, old):
                break
            system.behave()
            told.append(counted(before, live.counts()))
        else:
            raise AssertionError(f"{row.reasons} are never counted, but {told}")
    finally:
        system.behave()
        system.close()
    live.await_hit(old, "a stored block is a hit again, or was stored again")


def _judge(live: Live, stored: Prompt) -> None:
    """The second reader accepts every block of it."""
    live.await_stored(stored)
    copies = live.copies_of(stored.tokens)
    assert len(copies) >= BLOCKS
    for copy in copies[:BLOCKS]:
        copy.judge()


def _meets(row: FuseRow, live: Live, system: Fuse, old: Prompt) -> bool:
    """Sends a request while the file system is faulty and checks the result; true if the request
    was affected.

    It is not if the store detected the fault first: then the store is unhealthy for a moment and
    there are no hits.
    """
    fresh = live.new_prompt()
    right = live.ask(fresh, salt="another key, the same computation")
    before = live.counts()
    system.behave(**row.manners)
    if row.believed:  # stored as zeros; read back after the fault has ended
        assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
        live.await_written()
        system.behave()
        live.forget()
        before = live.counts()
    tokens, expected = (fresh, right) if row.call == "dump" else (old.tokens, old.right)
    assert live.ask(tokens).tokens == expected.tokens, "wrong tokens"

    def is_met() -> bool:
        return not live.ours or set(row.reasons) <= set(counted(before, live.counts()))

    met = poll(is_met, 15)
    if live.ours:
        news = counted(before, live.counts())
        assert news.get("load_tasks", 0) <= 1, "a failed load was tried again by its request"
        most = BLOCKS if row.waits else 0
        assert {
            name: news.get(name, 0)
            for name in ("timeout", "lookup_late")
            if news.get(name, 0) > most
        } == {}, news
    assert live.ask(fresh).tokens == right.tokens, "wrong tokens"
    # a request while the store was off was not affected, and the next one was
    return met or is_met()


@pytest.mark.parametrize(("engine", "row"), each([KILLED]), scope="module")
def test_engine(engine: str, row: EngineRow, live: Live) -> None:
    """Blocks stored before an engine was killed are hits for the next one, and right."""
    stored, last = live.store_prompt(), live.new_prompt()
    right = live.ask(last, salt="another key, the same computation")
    live.ask(last)  # its blocks may be in any state
    live.restart()
    live.await_hit(stored, "a stored block is a hit")
    assert live.ask(last).tokens == right.tokens, "wrong tokens"
    _judge(live, stored)


@pytest.mark.parametrize(("engine", "row"), each([WEIGHTS]), scope="module")
def test_weights(engine: str, row: EngineRow, live: Live, model: Path, other_model: Path) -> None:
    """Results of other weights are never used for these, and these are recognised when they
    return."""
    if not live.ours:
        pytest.skip("this row is about our identities")
    stored, fresh = live.store_prompt(), live.new_prompt()
    opened, right = live.opened(), live.ask(fresh, salt="another key, the same computation")

    def others() -> None:
        live.engine.reset()
        answer = live.ask(stored.tokens, salt="another key, the same computation").tokens
        assert answer != stored.right.tokens, "the weights do not matter to this prompt"
        for _ in range(2):
            assert live.ask(stored.tokens).tokens == answer, "wrong tokens"
            live.ask(fresh)

    live.engine.rpc("probe_scale_weights", 1.25)
    others()
    live.engine.rpc("reload_weights", weights_path=str(other_model))
    others()
    live.engine.rpc("reload_weights", weights_path=str(model))
    live.engine.reset()
    live.await_opened(opened, fresh, right)
    assert live.is_hit(stored), "blocks of these weights are no hits any more"
    _judge(live, stored)


@pytest.mark.parametrize(("engine", "row"), each([SLEEP]), scope="module")
def test_sleep(engine: str, row: EngineRow, live: Live) -> None:
    """After a sleep an engine has its old weights, and hits at once."""
    if not live.ours:
        pytest.skip("another connector has other promises")
    stored = live.store_prompt()
    for level in (1, 2):
        live.engine.call("sleep", level=level)
        live.engine.call("wake_up")
        assert live.is_hit(stored), "a stored block is no hit any more"
    _judge(live, stored)


@pytest.mark.parametrize(("engine", "row"), each([BESIDE]), scope="module")
def test_beside(engine: str, row: EngineRow, live: Live) -> None:
    """Blocks stored beside a connector with failing loads are right for the next engine.

    ``kv_load_failure_policy`` is vLLM's own here, which fails a request for a refused block:
    nothing is loaded.
    """
    if not live.ours:
        pytest.skip("this row is about a connector beside ours")
    stored, fresh = live.store_prompt(), [live.new_prompt() for _ in range(3)]
    right = [live.ask(tokens, salt="another key, the same computation") for tokens in fresh]
    with live.instead("beside", transfer=several(SIBLING, live.transfer)) as both:
        answer = live.ask(stored.tokens)
        assert (answer.tokens, answer.cached) == (stored.right.tokens, 0), "loaded, or wrong tokens"
        assert (
            'write "kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"'
            in both.log_text()
        )
        stalled = both.submit(Ask(fresh[0], ANSWER, extra_args=load_of_sibling("stall")))
        wait_until(lambda: both.scheduler_eval(LOADING) == "True", "the other connector loads")
        both.abort(*stalled)
        both.collect(stalled)
        # vLLM's own policy: the request ends with an error, caused by the other connector.
        both.ask(fresh[1], ANSWER, extra_args=load_of_sibling("fail"))
        assert live.ask(fresh[2]).tokens == right[2].tokens, "wrong tokens"
    live.await_hit(stored, "an earlier block is a hit")
    live.await_hit(Prompt(fresh[2], right[2], []), "a block stored beside the other is a hit")
    for tokens, answer in zip(fresh[:2], right[:2], strict=True):
        live.await_hit(Prompt(tokens, answer, []), "the prompt is stored, right, and found")
    _judge(live, stored)


@pytest.mark.parametrize(("engine", "row"), each([MEDIA]), scope="module")
def test_media(engine: str, row: EngineRow, live: Live, work: Path) -> None:
    """Two engines of a vision model: the same name for different pictures."""
    if not live.ours:
        pytest.skip("this row is about our keys")
    llava = write_llava(work / f"llava-{live.root.name}")
    kind: dict[str, Any] = {"model": llava, "args": {"skip_tokenizer_init": False}}

    def ask(seeing: Engine, seed: int, name: str | None, salt: str | None = None) -> Result:
        answer = seeing.generate(Ask(TOKENS, ANSWER, salt=salt, picture=(seed, name)))[0]
        seeing.wait_idle()
        return answer

    with live.instead("media", **kind) as first:
        right = {
            seed: ask(first, seed, None, salt="another key, the same computation")
            for seed in (CAT, DOG)
        }
        assert right[CAT].tokens != right[DOG].tokens, "the picture does not matter to this model"
        assert ask(first, CAT, "holiday").tokens == right[CAT].tokens, "wrong tokens"
        with live.instead("media-again", **kind) as second:
            assert ask(second, DOG, "holiday").tokens == right[DOG].tokens, "wrong tokens"
            assert ask(second, CAT, "another name").tokens == right[CAT].tokens, "wrong tokens"
