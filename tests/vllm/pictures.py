"""A tiny LLaVA: a CLIP with 64 tokens per picture, a Llama, and vLLM's processor of pictures.

Random weights, large on purpose, so that another picture gives other tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import HEAD_SIZE, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, MAX_LEN, VOCAB
from PIL import Image
from safetensors.torch import save_file
from specs import BLOCK, prompt

#: The token that stands for a picture in a prompt.
PICTURE = VOCAB - 1
#: Tokens with which vLLM replaces it.
PICTURE_TOKENS = 64
_SIZE, _PATCH = 64, 8

#: A prompt with a picture: 37 tokens, those of the picture, 43 more; the last block is not full.
TOKENS = [*prompt(90, 37), PICTURE, *prompt(91, 43)]
FULL_BLOCKS = (len(TOKENS) - 1 + PICTURE_TOKENS) // BLOCK
#: Seeds of two pictures.
CAT, DOG = 1, 2


def write_llava(directory: Path, seed: int = 11) -> Path:
    """Writes config, weights, tokenizer and processor; the weights depend on the seed alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=_SIZE,
            patch_size=_PATCH,
            projection_dim=64,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=MAX_LEN,
            bos_token_id=1,
            eos_token_id=2,
        ),
        image_token_index=PICTURE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=PICTURE_TOKENS,
    )
    model = LlavaForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (2.0 / fan_in**0.5)
                )
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(str(directory))
    # Named as checkpoints of LLaVA are, which is how vLLM knows them; transformers 5 has one level
    # less.
    weights = {
        name.replace("vision_tower.vision_model.", "vision_tower.").replace(
            "vision_tower.", "vision_tower.vision_model."
        ): value.contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    words = {f"w{number}": number for number in range(VOCAB - 1)} | {"<image>": PICTURE}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": _SIZE}, crop_size={"height": _SIZE, "width": _SIZE}
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="w1",
            eos_token="w2",
            unk_token="w0",
            pad_token="w0",
            extra_special_tokens={"image_token": "<image>"},
        ),
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(str(directory))
    return directory


def shown(seed: int, name: str | None) -> dict[str, Any]:
    """The picture of a prompt; ``name`` is the client's own for it.

    vLLM includes these settings of the processor in its hash, and then uses the name instead of the
    picture.
    """
    said: dict[str, Any] = {
        "multi_modal_data": {"image": picture(seed)},
        "mm_processor_kwargs": {"do_center_crop": True},
    }
    return said if name is None else said | {"multi_modal_uuids": {"image": [name]}}


def picture(seed: int) -> Image.Image:
    """Noise that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(
        torch.randint(0, 256, (_SIZE, _SIZE, 3), generator=generator, dtype=torch.uint8).numpy()
    )
