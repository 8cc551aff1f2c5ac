"""Hooks around decoder layers and their feed-forward part, by torch's own hooks of modules, in
eager mode only.

vLLM has no such hooks, and hands the model to no plug-in. torch calls a global hook for every
module that is run: the first one to see a step is handed the whole model, hangs hooks on its
layers, and is gone. With a captured graph or a compiled model a layer is not run by Python, so none
of this is called, and that is said at the start.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ucm.integration.vllm.attention.hook_results import fits
from ucm.integration.vllm.connector.guard import logger, throttle
from ucm.sparse.base import EAGER_HOOKS, UcmSparseBase

_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+$")
#: What a decoder layer calls the norm before its feed-forward part, which takes and gives hidden
#: states and residual.
_BEFORE_FFN = ("post_attention_layernorm", "pre_feedforward_layernorm", "ln_2")


class EagerHooks:
    """The hooks of one method in one model."""

    def __init__(self, method: UcmSparseBase, *, eager: bool) -> None:
        """``eager``: whether the model is run by Python, layer by layer."""
        self._method = method
        self._handles: list[RemovableHandle] = []
        wanted = [hook for hook in EAGER_HOOKS if method.overrides(hook)]
        if not wanted:
            return
        if not eager:
            logger.warning(
                "sparse attention: %s of %s are called in eager mode only, and this engine compiles"
                " its model: none is called (--enforce-eager has them called)",
                ", ".join(wanted),
                type(method).__name__,
            )
            return
        logger.info(
            "sparse attention: %s of %s are called: eager mode",
            ", ".join(wanted),
            type(method).__name__,
        )
        self._first = torch.nn.modules.module.register_module_forward_pre_hook(self._found)
        self._handles.append(self._first)

    def remove(self) -> None:
        """Take all hooks away again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _found(self, model: torch.nn.Module, _args: Any) -> None:
        """The first module of a step: the model itself."""
        self._first.remove()
        self._handles.remove(self._first)
        layers = [module for name, module in model.named_modules() if _LAYER.search(name)]
        for layer in layers:
            self._hang(layer)
        if not layers:
            logger.warning(
                "sparse attention: %s has no decoder layers that can be hooked",
                type(model).__name__,
            )

    def _hang(self, layer: torch.nn.Module) -> None:
        method = self._method
        if method.overrides("layer_begin"):
            self._handles.append(
                layer.register_forward_pre_hook(self._layer_begin, with_kwargs=True)
            )
        if method.overrides("ffn_finished") or method.overrides("layer_finished"):
            self._handles.append(
                layer.register_forward_hook(self._layer_finished, with_kwargs=True)
            )
        norm = next((getattr(layer, name) for name in _BEFORE_FFN if hasattr(layer, name)), None)
        if method.overrides("ffn_begin") and norm is not None:
            self._handles.append(norm.register_forward_hook(self._ffn_begin))

    def _layer_begin(self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("positions", "hidden_states", "residual")
        given = dict(zip(names, args, strict=False)) | {
            name: kwargs[name] for name in names if name in kwargs
        }
        if len(given) != len(names):
            return None
        found = dict(zip(names, self._call("layer_begin", *given.values()), strict=True))
        rest = {name: value for name, value in kwargs.items() if name not in names}
        placed = tuple(found.pop(name) for name in names[: len(args)])
        return placed + args[len(names) :], rest | found

    def _layer_finished(
        self, _layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not (isinstance(output, tuple) and len(output) == 2):
            return None
        positions = args[0] if args else kwargs.get("positions")
        # The feed-forward part is the last of a layer: what the layer gives is what that part gave.
        hidden, residual = self._call("ffn_finished", *output)
        _, hidden, residual = self._call("layer_finished", positions, hidden, residual)
        return hidden, residual

    def _ffn_begin(self, _norm: Any, _args: Any, output: Any) -> Any:
        return (
            self._call("ffn_begin", *output)
            if isinstance(output, tuple) and len(output) == 2
            else None
        )

    def _call(self, hook: str, *given: Any) -> tuple[Any, ...]:
        """What a hook returns; what it was given where it raises, or returns something else than as
        much."""
        method = type(self._method).__name__
        try:
            found = getattr(self._method, hook)(*given)
        except Exception as error:
            throttle.warning(f"hook {hook}", "%s of %s failed: %r", hook, method, error)
            return given
        if not fits(found, given):
            throttle.warning(
                f"result {hook}",
                "%s of %s did not return %d tensors as it was given; its result is not used",
                hook,
                method,
                len(given),
            )
            return given
        return tuple(found)
