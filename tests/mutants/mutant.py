"""What a mutant is: an exact patch of one file of csrc."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    number: int
    stage: str
    name: str
    file: str  # below csrc
    old: str  # occurs once in it
    new: str
    fault: str  # how it comes to be written
    case: str | None = None  # the case from the field, by its heading, that it repeats


def replace_once(text: str, old: str, new: str, what: str) -> str:
    count = text.count(old)
    if count != 1:
        raise ValueError(f"{what}: the text to replace occurs {count} times, not once")
    return text.replace(old, new)


def patched(text: str, mutant: Mutant) -> str:
    """`text`, the content of mutant.file, with the fault."""
    return replace_once(text, mutant.old, mutant.new, f"mutant {mutant.number}, {mutant.file}")
