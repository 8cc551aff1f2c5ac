"""Pictures count by content: a client's name never leads to another picture's KV.

The model is a tiny LLaVA, which vLLM's CPU build runs; with ``mm_processor_kwargs`` vLLM's hash of
the picture depends on the client's name only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from checks import assert_same
from harness import Engine, EngineHost
from lives import Disk, new_disk
from pictures import CAT, DOG, FULL_BLOCKS, TOKENS, shown, write_llava
from specs import BLOCK, Ask, EngineSpec, Result


@pytest.fixture(scope="module")
def llava(work: Path) -> Path:
    return write_llava(work / "llava")


@pytest.fixture(scope="module")
def disk(work: Path) -> Disk:
    return new_disk(work, "media")


def spec_of(llava: Path, disk: Disk, label: str, **args: Any) -> EngineSpec:
    """An engine of this model."""
    settings = {"skip_tokenizer_init": False} | args
    return EngineSpec(llava, store=disk.store(), args=settings, label=label)


def look(engine: Engine, seed: int, name: str | None, salt: str | None = None) -> Result:
    """The model's answer to a picture under a name."""
    answer = engine.generate(Ask(TOKENS, picture=(seed, name), salt=salt))[0]
    engine.wait_idle()
    return answer


@pytest.fixture(scope="module")
def right(host: EngineHost, llava: Path, disk: Disk) -> dict[int, Result]:
    """An engine's answer for each picture, with unique names and unused keys."""
    engine = host.get(spec_of(llava, disk, "media-first"))
    answers = {seed: look(engine, seed, None, f"another key {seed}") for seed in (CAT, DOG)}
    assert [answer.cached for answer in answers.values()] == [0, 0]
    assert answers[CAT].tokens != answers[DOG].tokens, "the picture does not matter to this model"
    return answers


def test_vllm_takes_the_clients_name_for_a_content_hash(llava: Path) -> None:
    """The real preprocessing of vLLM: two pictures, one hash of 64 digits. Our keys distinguish
    them."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.multimodal.cache import engine_receiver_cache_from_config
    from vllm.renderers import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.request import Request

    from ucm.integration.vllm.connector.identity.keys import ExtraKeys

    features, frames = [], []
    for seed, name in ((CAT, "cat"), (DOG, "cat"), (CAT, None)):
        # A renderer each, like API servers of different hosts, or a cache after eviction.
        config = EngineArgs(
            model=str(llava), dtype="float32", max_model_len=512, enforce_eager=True
        ).create_engine_config()
        processor = InputProcessor(config, renderer_from_config(config))
        asked = TokensPrompt(prompt_token_ids=list(TOKENS), **shown(seed, name))
        made = processor.process_inputs("r", asked, SamplingParams(), ("generate",))
        cache = engine_receiver_cache_from_config(config)
        assert cache is not None
        made.mm_features = cache.get_and_update_features(made.mm_features)
        request = Request.from_engine_core_request(made, None)
        features.append(request.mm_features[0])
        frames.append(ExtraKeys(BLOCK).of(request))
    assert features[0].identifier == features[1].identifier != features[2].identifier
    assert re.fullmatch("[0-9a-f]{64}", features[0].identifier), (
        "vLLM does no longer what this is about"
    )
    assert len(frames[0]) == 3, "the picture lies in three blocks"
    assert frames[0] != frames[1]
    assert frames[0] == frames[2], "the name does not count"


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_another_picture_under_the_same_name(
    runner: str, host: EngineHost, llava: Path, disk: Disk, right: dict[int, Result]
) -> None:
    """One engine stores a picture under a name; a new one gets another picture under that name, and
    then the first one."""
    engine = host.get(spec_of(llava, disk, "media-first"))
    assert_same(look(engine, CAT, "holiday"), right[CAT])
    engine = host.get(spec_of(llava, disk, "media-second"))
    other = look(engine, DOG, "holiday")
    assert_same(other, right[DOG])
    assert other.cached_blocks == 1, (
        "all that the two have in common is the text before the picture"
    )
    engine.reset()
    same = look(engine, CAT, "another name")
    assert_same(same, right[CAT])
    assert same.cached_blocks == FULL_BLOCKS, (
        "the same picture under another name is the same picture"
    )


@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_what_vllm_computed_from_another_picture_is_not_stored(
    runner: str, host: EngineHost, llava: Path, work: Path, right: dict[int, Result]
) -> None:
    """Without its processor cache vLLM uses each request's own picture, and the encoder's output by
    name.

    So its own answer may be the first picture's; a new engine never gets that for the second.
    """
    disk = new_disk(work, "media-encoder")
    spec = spec_of(llava, disk, "media-encoder", mm_processor_cache_gb=0)
    engine = host.get(spec)
    assert_same(look(engine, CAT, "holiday"), right[CAT])
    stored = len(disk.files())
    assert stored >= FULL_BLOCKS
    engine.reset()
    mixed = look(engine, DOG, "holiday")
    assert mixed.tokens == right[CAT].tokens, (
        "vLLM keeps the encoder's output no longer by name: this proves nothing"
    )
    assert len(disk.files()) == stored, "nothing of it is stored"
    engine = host.get(spec.but(label="media-fresh"))
    fresh = look(engine, DOG, None)
    assert_same(fresh, right[DOG])
    assert fresh.cached_blocks == 1
