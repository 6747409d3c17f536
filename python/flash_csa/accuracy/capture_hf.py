"""Makes a capture from a Hugging Face model folder on this machine.

    python -m flash_csa.accuracy.capture_hf FOLDER TEXT --text-license LICENCE
        [--model-license LICENCE] [--layers 0,4,8] [--tokens 4096] [--segment 1024]
        [--out capture.safetensors]

FOLDER: config, weights and tokenizer, as `transformers` loads them; nothing is fetched. TEXT: a
text file. Kept are the hidden states that enter the attention of the layers named (default: eight
in a row from a third of the model on), so that drift along a group is the model's own. The model's
licence is read from the model card (README.md) unless it is given.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from .capture import Capture

ATTENTION = re.compile(r"^(.*\.)?(?:layers?|h|blocks?)\.(\d+)\.(?:self_attn|attention|attn)$")
GROUP = 8  # layers kept by default


def attention_modules(model: nn.Module) -> dict[int, str]:
    """By layer, the name of the module that is its attention.

    Raises:
        ValueError: none has a name that is known.
    """
    found = {}
    for name, _ in model.named_modules():
        match = ATTENTION.match(name)
        if match:
            found[int(match[2])] = name
    if not found:
        raise ValueError(
            "flash_csa.capture_hf: the model has no module layers.N.self_attn or alike"
        )
    return found


def licence_of(folder: Path) -> str:
    """`license:` of the model card's head; "" where there is none."""
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.S)
    found = re.search(r"^license:\s*(\S+)", head[1], re.M) if head else None
    return found[1] if found else ""


def capture(
    model: nn.Module, token_ids: torch.Tensor, layers: Sequence[int], segment: int
) -> Capture:
    """Runs i64 [n] token ids through the model in segments, and keeps the layers' inputs."""
    names = attention_modules(model)
    missing = [layer for layer in layers if layer not in names]
    if missing:
        raise ValueError(
            f"flash_csa.capture_hf: the model has layers {sorted(names)}, not {missing}"
        )
    places = {
        f"layers.{number}.hidden_states": (names[layer], "input")
        for number, layer in enumerate(layers)
    }
    with Capture(model, places) as kept, torch.no_grad():
        for ids in token_ids.split(segment):
            model(input_ids=ids[None])
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    try:
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError:
        sys.exit("flash_csa.capture_hf: needs transformers: pip install transformers")
    licence = options.model_license or licence_of(options.folder)
    if not licence:
        sys.exit("flash_csa.capture_hf: the model card states no licence; give --model-license")
    local = {"local_files_only": True}
    model = AutoModel.from_pretrained(options.folder, **local).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder, **local)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    if len(ids) < options.tokens:
        sys.exit(f"flash_csa.capture_hf: {options.text} has {len(ids)} tokens of {options.tokens}")
    try:
        layers = options.layers or _default_layers(attention_modules(model))
        kept = capture(model, ids[: options.tokens], layers, options.segment)
    except ValueError as error:
        sys.exit(str(error))
    kept.save(
        options.out,
        model=options.folder.resolve().name,
        model_license=licence,
        text=options.text.name,
        text_license=options.text_license,
        origin=f"inputs of attention, layers {', '.join(map(str, layers))}",
    )
    print(f"{options.out}: {len(layers)} layers, {options.tokens} tokens, model {licence}")


def _default_layers(names: dict[int, str]) -> list[int]:
    ordered = sorted(names)
    first = min(len(ordered) // 3, max(0, len(ordered) - GROUP))
    return ordered[first : first + GROUP]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flash_csa.accuracy.capture_hf")
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--text-license", required=True)
    parser.add_argument("--model-license", default="")
    parser.add_argument("--layers", type=lambda s: [int(n) for n in s.split(",")])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--segment", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("capture.safetensors"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
