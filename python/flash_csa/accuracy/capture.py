"""Captures: hooks on a PyTorch module that keep what passes, and a file of it."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn


class Capture:
    """Keeps tensors of modules while it is active.

        places = {f"layers.{n}.hidden_states": (f"model.layers.{n}.self_attn", "input")
                  for n in range(8)}
        with Capture(model, places) as capture, torch.no_grad():
            model(tokens)
        capture.save("capture.safetensors", model="...", model_license="...",
                     text="...", text_license="...")

    places: by tensor name (see inputs.py) the module's name in `model`, and "input" or "output".
    Of several tensors the first is kept, of an input by keyword `hidden_states` that. A batch
    dimension is laid out as one sequence, and calls are joined in order.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, tuple[str, str]]) -> None:
        modules = dict(model.named_modules())
        for name, (module, side) in places.items():
            if module not in modules:
                raise _error(f"{name}: a module of the model", module)
            if side not in ("input", "output"):
                raise _error(f"{name}: input or output", side)
        self._places = [(name, modules[module], side) for name, (module, side) in places.items()]
        self._kept: dict[str, list[Tensor]] = {name: [] for name in places}
        self._handles: list = []

    def __enter__(self) -> "Capture":
        for name, module, side in self._places:
            if side == "input":
                hook = module.register_forward_pre_hook(self._input(name), with_kwargs=True)
            else:
                hook = module.register_forward_hook(self._output(name))
            self._handles.append(hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """bf16 [tokens, ...] by name.

        Raises:
            ValueError: nothing passed one of the places.
        """
        for name, kept in self._kept.items():
            if not kept:
                raise _error(f"{name}: a call of its module", "none")
        return {name: torch.cat(kept) for name, kept in self._kept.items()}

    def save(
        self,
        path: str | Path,
        *,
        model: str,
        model_license: str,
        text: str,
        text_license: str,
        origin: str = "",
    ) -> None:
        """Writes a safetensors file. A capture says what it was made from and under which terms."""
        from safetensors.torch import save_file

        facts = {
            "model": model,
            "model_license": model_license,
            "text": text,
            "text_license": text_license,
        }
        for name, fact in facts.items():
            if not fact:
                raise _error(f"{name} stated", repr(fact))
        save_file(self.tensors, path, facts | ({"origin": origin} if origin else {}))

    def _input(self, name: str):
        def hook(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            self._keep(name, keywords.get("hidden_states", arguments))

        return hook

    def _output(self, name: str):
        def hook(module: nn.Module, arguments: tuple, result: object) -> None:
            self._keep(name, result)

        return hook

    def _keep(self, name: str, found: object) -> None:
        if isinstance(found, tuple | list):
            found = next((x for x in found if isinstance(x, Tensor)), None)
        if not isinstance(found, Tensor) or found.dim() < 2:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise _error(f"{name}: a tensor [..., tokens, width]", got)
        rows = found.detach().to("cpu", torch.bfloat16)
        self._kept[name].append(rows.flatten(0, -2).contiguous())


def _error(expected: str, got: object) -> ValueError:
    return ValueError(f"flash_csa.Capture: needs {expected}, got {got}")
