"""The two helpers for operators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ucm.errors import ConfigError, InvalidInputError
from ucm.utils import estimate_storage_requirements, kv_bytes_per_token, validate_config

LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}


def test_llama_70b_is_320_kib_a_token_and_10_gib_for_32k() -> None:
    for model in (LLAMA_70B, SimpleNamespace(**LLAMA_70B), 70):
        assert kv_bytes_per_token(model) == 320 * 1024
        found = estimate_storage_requirements(model, 32 * 1024, 1)
        assert found["kv_cache_size_gb"] == 10
        assert found["recommended_storage_gb"] == 100
        assert found["recommended_memory_gb"] == 15


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        # vLLM's --dtype auto makes a float32 model bfloat16
        (LLAMA_70B | {"torch_dtype": "float32"}, "auto", 320 * 1024),
        (LLAMA_70B | {"torch_dtype": "float32"}, "float32", 640 * 1024),
        (LLAMA_70B | {"torch_dtype": "float16"}, "auto", 320 * 1024),
        (LLAMA_70B | {"dtype": "torch.bfloat16"}, "auto", 320 * 1024),
        (LLAMA_70B, "fp8", 160 * 1024),
        # no grouped queries: all heads have their own keys
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64},
            "auto",
            2 * 2 * 4 * 16 * 2,
        ),
        # head size said, not derived
        (LLAMA_70B | {"head_dim": 256}, "auto", 640 * 1024),
        # one latent vector for all heads
        (
            {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            "auto",
            61 * 576 * 2,
        ),
        # a model of text and images keeps its text's shape inside
        ({"text_config": LLAMA_70B}, "auto", 320 * 1024),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, "auto", 12 * 2 * 768 * 2),
    ],
)
def test_bytes_come_from_real_head_counts(model: dict[str, Any], dtype: str, expected: int) -> None:
    assert kv_bytes_per_token(model, dtype) == expected


def test_lengths_are_rounded_up_to_blocks() -> None:
    exact = estimate_storage_requirements(LLAMA_70B, 128, 2, block_size=128)
    rounded = estimate_storage_requirements(LLAMA_70B, 1, 2, block_size=128)
    assert exact == rounded


@pytest.mark.parametrize(
    ("model", "length", "requests", "block"),
    [
        (LLAMA_70B, 0, 1, 16),
        (LLAMA_70B, 1, 0, 16),
        (LLAMA_70B, 1, 1, 0),
        (LLAMA_70B, 1.5, 1, 16),
        (0, 1, 1, 16),
        (float("nan"), 1, 1, 16),
        (True, 1, 1, 16),
        ({}, 1, 1, 16),
        ({"num_hidden_layers": 2}, 1, 1, 16),
    ],
)
def test_wrong_numbers_are_refused(model: Any, length: Any, requests: int, block: int) -> None:
    with pytest.raises(InvalidInputError):
        estimate_storage_requirements(model, length, requests, block)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="fp4"):
        kv_bytes_per_token(LLAMA_70B, "fp4")


def test_validate_config_shows_the_environment_with_origins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCM_STORAGE_PATH", "/data")
    assert (
        'storage_backends = ["/data"]  (environment UCM_STORAGE_PATH)'
        in str(validate_config()).splitlines()
    )


def test_validate_config_of_a_dictionary_and_of_a_file(tmp_path: Path) -> None:
    assert validate_config({"storage_path": "/data"}).storage_backends == ("/data",)
    file = tmp_path / "ucm.yaml"
    file.write_text("storage_path: /data\nhash_method: blake3\n")
    for path in (file, str(file)):
        assert validate_config(path).hash_method == "blake3"
    with pytest.raises(ConfigError, match="did you mean"):
        validate_config({"storage_pth": "/data"})
