"""The kinds of layers whose KV is cached, in which forms of an engine, and the tests that show it.

The tables of docs/models.md are made from this one, and the tests that it names take what they run
from here, so no cell of the page says more than a test does. Run it after a change; with
``--check`` it only checks that the page is up to date (a test does that).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
TABLE = page.tables_of("matrix.py")

#: Versions of vLLM besides the one of make test.
OTHER_VERSIONS = ("0.30", "0.31", "0.33")
#: Forms of an engine: its runner, its ranks, another version of vLLM, sparse attention.
FORMS = (
    *("V1", "V2", "TP 2", "PP 2", "TP + PP", "DP 2", "DCP", "PCP", "drafter"),
    *(*OTHER_VERSIONS, "sparse"),
)


@dataclass(frozen=True)
class Cell:
    """Whether KV of a kind is cached in a form: ``test`` shows it, or ``refused`` is how the log
    explains why not."""

    shown: str
    test: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, or several in one model."""

    layers: str
    such_as: str
    #: vLLM's classes.
    specs: tuple[str, ...]
    #: Of ``tests/vllm/models.py``, where engines on a CPU run such a model.
    model: str
    cells: tuple[Cell, ...]

    def in_forms(self) -> Iterator[tuple[str, Cell]]:
        """Every form, with its cell."""
        return zip(FORMS, self.cells, strict=True)


def engines(test: str) -> Cell:
    """Shown by engines of vLLM on a CPU."""
    return Cell("engines", test)


def types(test: str) -> Cell:
    """Shown with vLLM's scheduler and types, without a model."""
    return Cell("types", test)


def refused(text: str) -> Cell:
    """Not cached, or not selected from; the log says this."""
    return Cell("no", refused=text)


ALIKE = engines("tests/vllm/test_forms.py::test_a_prompt_that_comes_again_is_a_hit")
GROUPS = engines("tests/vllm/test_groups.py::test_a_prompt_that_comes_again_is_a_hit")
TOYS = types("tests/vllm_unit/test_toy_groups.py::test_a_restarted_engine_hits_all_it_may")
SHARED = engines("tests/vllm/test_forms.py::test_two_engines_of_one_deployment_share_the_store")
CONTEXT = types(
    "tests/vllm_unit/test_groups.py::"
    "test_the_longest_hit_over_context_parallel_ranks_is_that_of_vllm"
)
TOY_RANKS = types(
    "tests/vllm_unit/test_toy_groups.py::test_engines_of_several_ranks_hit_what_all_of_them_have"
)
TOY_SHARED = types(
    "tests/vllm_unit/test_toy_groups.py::test_two_engines_of_one_deployment_share_the_store"
)
REUSE = engines("tests/vllm/test_reuse.py::test_restarted_engine_reuses")
RANKS = engines("tests/vllm/test_ranks.py::test_both_ranks_load")
UNEVEN = engines(
    "tests/vllm/test_uneven_ranks.py::test_blocks_of_ranks_with_different_layers_are_hit"
)
SELECTED = engines(
    "tests/vllm/test_sparse.py::test_prompts_of_a_dense_engine_are_loaded_and_selected_from"
)
LATENT = types(
    "tests/vllm_unit/test_sparse_latent.py::test_latent_kernels_are_given_the_kept_blocks"
)
DRAFTS = types(
    "tests/vllm_unit/test_toy_groups.py::test_with_a_draft_model_a_hit_is_one_block_shorter"
)
NO_DCP = refused(
    "with decode context parallelism KV of 2 groups is not cached: nothing is claimed or stored;"
    " start vLLM with --decode-context-parallel-size 1"
)
NO_PCP = refused(
    "with prefill context parallelism KV is not cached: nothing is claimed or stored; start vLLM"
    " with --prefill-context-parallel-size 1"
)
NO_DRAFTS = refused(
    "KV of kind MambaSpec with speculative decoding is not cached: nothing is claimed or stored;"
    " start vLLM without --speculative-config"
)
NO_SPARSE = refused("this model has 2 KV cache groups, and blocks are chosen in one")
#: vLLM refuses these itself.
WINDOWS_DCP = refused("DCP not support sliding window.")
WINDOWS_SPARSE = refused(
    "no layer of this model attends to all of its context by a block table alone"
)

KINDS = (
    Kind(
        "full attention",
        "Llama, Qwen",
        ("FullAttentionSpec",),
        "llama",
        (
            REUSE,
            REUSE,
            RANKS,
            UNEVEN,
            ALIKE,
            SHARED,
            CONTEXT,
            NO_PCP,
            DRAFTS,
            *[REUSE] * 3,
            SELECTED,
        ),
    ),
    Kind(
        "latent attention (MLA)",
        "DeepSeek",
        ("MLAAttentionSpec",),
        "",
        (
            *(TOYS, TOYS, *[TOY_RANKS] * 3, TOY_SHARED),
            *(CONTEXT, NO_PCP, DRAFTS, *[TOYS] * 3, LATENT),
        ),
    ),
    Kind(
        "windows beside full attention",
        "Gemma 3",
        ("SlidingWindowSpec", "FullAttentionSpec"),
        "gemma3",
        (GROUPS, GROUPS, *[ALIKE] * 3, SHARED, NO_DCP, NO_PCP, DRAFTS, *[ALIKE] * 3, NO_SPARSE),
    ),
    Kind(
        "windows and sinks beside full attention and sinks",
        "gpt-oss",
        ("SlidingWindowSpec", "FullAttentionSpec"),
        "gpt_oss",
        # The attention of 0.30 on a CPU computes no sinks in float32, and there engines of one
        # deployment cannot exchange what goes to experts: no engines of these.
        (
            *(*[ALIKE] * 5, TOY_SHARED),
            *(NO_DCP, NO_PCP, DRAFTS),
            *(TOYS, ALIKE, ALIKE),
            NO_SPARSE,
        ),
    ),
    Kind(
        "windows alone",
        "Mistral",
        ("SlidingWindowSpec",),
        "mistral",
        (
            *(GROUPS, GROUPS, *[ALIKE] * 3, SHARED, WINDOWS_DCP, NO_PCP, DRAFTS),
            *(*[ALIKE] * 3, WINDOWS_SPARSE),
        ),
    ),
    Kind(
        "chunks beside full attention",
        "Llama 4",
        ("ChunkedLocalAttentionSpec", "FullAttentionSpec"),
        "llama4",
        (
            *(*[ALIKE] * 5, SHARED),
            *(NO_DCP, NO_PCP, DRAFTS, *[ALIKE] * 3, NO_SPARSE),
        ),
    ),
    Kind(
        "states (Mamba, linear attention, short convolutions) beside full attention",
        "Qwen3-Next, LFM2",
        ("MambaSpec", "FullAttentionSpec"),
        "lfm2",
        # 0.30 and 0.31 do not start this model on a CPU: no engines of them
        (
            *(*[ALIKE] * 5, SHARED),
            *(NO_DCP, NO_PCP, NO_DRAFTS),
            *(TOYS, TOYS, ALIKE),
            NO_SPARSE,
        ),
    ),
)

#: What the log says where nothing can be changed.
THE_MODELS = "vLLM's own prefix cache goes on as it does without ucm"
#: vLLM's other classes of KV, what they are, and what to do about them.
OTHERS = {
    "SlidingWindowMLASpec": (
        "latent attention with windows",
        "start vLLM with --disable-hybrid-kv-cache-manager, if it can then",
    ),
    "CircularBufferSpec": ("keys that wait to be compressed, in a ring", THE_MODELS),
    "CrossAttentionSpec": ("cross-attention to an encoder, as of Whisper", THE_MODELS),
    "EncoderOnlyAttentionSpec": ("encoders, which keep no KV", THE_MODELS),
    "HiSparseHotSpec": ("the hot pages of HiSparse", "start vLLM without HiSparse"),
    "HiSparseResidentSpec": ("the pages of HiSparse on the device", "start vLLM without HiSparse"),
    "HiddenStateCacheSpec": (
        "hidden states",
        "start vLLM with another speculative method than extract_hidden_states",
    ),
    "KpoolTailSpec": ("keys that wait to be pooled, in a ring (vLLM 0.30 and 0.31)", THE_MODELS),
    "RSWASpec": ("windows over the output alone (R-SWA)", THE_MODELS),
    "SinkFullAttentionSpec": ("full attention with sinks in the cache", THE_MODELS),
}


def forms_of(test: str) -> Iterator[tuple[str, str]]:
    """The models and forms that this test of engines shows."""
    for kind in KINDS:
        for form, cell in kind.in_forms():
            if cell.test == test:
                yield kind.model, form


def models_of(test: str) -> list[str]:
    """The models of these forms, each once."""
    return list(dict.fromkeys(model for model, _ in forms_of(test)))


def kinds() -> Iterator[str]:
    """The table of kinds and forms."""
    yield f"| layers | such as | {' | '.join(FORMS)} |"
    yield "|---" * (len(FORMS) + 2) + "|"
    for kind in KINDS:
        yield f"| {kind.layers} | {kind.such_as} | {' | '.join(c.shown for c in kind.cells)} |"


def proofs() -> Iterator[str]:
    """For each test, what it shows, and for each refusal, where it is."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind in KINDS:
        for form, cell in kind.in_forms():
            key = f"`{cell.test}`" if cell.test else f"“{cell.refused}”"
            found.setdefault(key, {}).setdefault(kind.such_as, []).append(form)
    yield "| test, or what the log says | of |"
    yield "|---|---|"
    for key, where in found.items():
        alike: dict[str, list[str]] = {}
        for name, forms in where.items():
            alike.setdefault(", ".join(forms), []).append(name)
        shown = "; ".join(f"{', '.join(names)}: {forms}" for forms, names in alike.items())
        yield f"| {key} | {shown} |"


def others() -> Iterator[str]:
    """The table of what is not cached."""
    yield "| vLLM's name | what it is | what to do |"
    yield "|---|---|---|"
    for name, (what, instead) in OTHERS.items():
        yield f"| `{name}` | {what} | {'nothing' if instead == THE_MODELS else instead} |"


def written(text: str) -> str:
    """The page with its tables as they are here."""
    made = {"kinds": kinds, "proofs": proofs, "others": others}

    def table(match: re.Match[str]) -> str:
        lines = made.pop(match["name"])()
        return match[1] + "".join(f"{line}\n" for line in lines) + match[4]

    new = TABLE.sub(table, text)
    if made:
        raise LookupError(f"there is no place for the table of {', '.join(made)}")
    return new


if __name__ == "__main__":
    sys.exit(page.run(__doc__, [PAGE], "matrix.py", written))
