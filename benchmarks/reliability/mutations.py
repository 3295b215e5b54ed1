"""Ways to spoil bytes, text, JSON and command lines, each from a random generator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

MARKUP = "<script>canary</script>"  # must not reach a page as markup
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "1.5",
    "-0.0",
    "1e-320",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "2147483648",
    "18446744073709551616",
    "9e99",
    "1_000",
    "٣",
    "0x10",
    "1e3",
]
WORDS = ["", " ", "none", "null", "true", "off", "auto", "cuda", "🜁", "é" * 300, "a" * 5000, "../../etc/passwd"]
WORDS += ["/dev/null", "file:///etc/passwd", "__import__('os')", "%s%n", "{0}", "a\nb", "\x1b[2J", "\u202e", MARKUP]
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 17, 10**6, 2**63, 10**400, 0.5, -1.5, 1e308, float("nan")]
VALUES += [float("inf"), [], {}, [[]], [None], {"": None}, [1, 2, 3], "softmax", *WORDS]


def number(dice: Random) -> str:
    return (
        dice.choice(NUMBERS) if dice.random() < 0.7 else str(dice.choice([dice.randrange(-9, 99), dice.uniform(-2, 2)]))
    )


def spoil_bytes(dice: Random, data: bytes) -> bytes:
    """One to three changes at random places; those near the start, where headers are, are more likely."""
    for _ in range(dice.choice([1, 1, 2, 3])):
        data = _spoil_once(dice, bytearray(data))
    return data


def _spoil_once(dice: Random, data: bytearray) -> bytes:
    size = len(data)
    at = dice.randrange(min(size, 128) if dice.random() < 0.4 else size) if size else 0
    length = dice.choice([1, 2, 4, 8, 64, 1024])
    piece = bytes(data[at : at + length])
    match dice.randrange(10):
        case 0 | 1 if size:
            data[at] ^= 1 << dice.randrange(8)
        case 2 if size:
            data[at : at + length] = dice.randbytes(len(piece))
        case 3:
            del data[at:]
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = piece
        case 6:
            data[at:at] = dice.randbytes(length)
        case 7:
            data[at : at + length] = dice.choice([b"\0", b"\xff", b"\x7f"]) * len(piece)
        case 8:
            data = dice.choice([bytearray(), data + data, bytearray(dice.randbytes(size or 1)), data[::-1]])
        case 9:
            digits = [m.start() for m in re.finditer(rb"[0-9]", data[:4096])]
            for place in dice.sample(digits, min(len(digits), 3)):
                data[place] = ord(dice.choice("0123456789-"))
    return bytes(data)


def spoil_text(dice: Random, text: str) -> bytes:
    """Words, numbers and lines of a text file are replaced, or its bytes are."""
    if dice.random() < 0.3:
        return spoil_bytes(dice, text.encode())
    for _ in range(dice.choice([1, 1, 2, 3])):
        tokens = list(re.finditer(r"[\w.+-]+", text)) or [re.match("", text)]
        token = dice.choice(tokens)
        lines = text.splitlines(keepends=True) or [""]
        line = dice.randrange(len(lines))
        match dice.randrange(6):
            case 0 | 1 | 2:
                new = number(dice) if dice.random() < 0.5 else dice.choice(WORDS)
                text = text[: token.start()] + new + text[token.end() :]  # type: ignore[union-attr]
            case 3:
                text = "".join(lines[:line] + lines[line + 1 :])
            case 4:
                text = "".join([*lines[:line], lines[line], *lines[line:]])
            case 5:
                place = dice.randrange(len(text) + 1)
                text = text[:place] + dice.choice([*",;:|\"'\t\0[]{}=#\ufeff", '"""', "\r"]) + text[place:]
    return text.encode("utf-8", "surrogatepass")


def spoil_json(dice: Random, text: str) -> bytes:
    """Values are replaced, removed or renamed; the rest is as it was. Or it is spoilt as text."""
    if dice.random() < 0.2:
        return spoil_text(dice, text)
    if dice.random() < 0.04:
        return (dice.choice(["[", '{"a":']) * 100_000).encode()
    tree = json.loads(text)
    for _ in range(dice.choice([1, 1, 2, 4])):
        places = list(_places(tree))
        if not places:
            break
        holder, key = dice.choice(places)
        match dice.randrange(6):
            case 0 | 1 | 2:
                holder[key] = dice.choice(VALUES)
            case 3:
                del holder[key]
            case 4 if isinstance(holder, dict):
                holder[dice.choice([*WORDS, key + "x"])] = holder.pop(key)
            case _:
                holder[key] = [holder[key]] * dice.choice([1, 2, 1000])
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def spoil_lines(dice: Random, text: str) -> bytes:
    """One line of a JSON-lines file, or their order."""
    lines = text.splitlines()
    if dice.random() < 0.2 or not lines:
        return spoil_text(dice, text)
    at = dice.randrange(len(lines))
    spoilt = [line.encode() for line in lines]
    spoilt[at] = spoil_json(dice, lines[at])
    if dice.random() < 0.2:
        dice.shuffle(spoilt)
    return b"".join(line + b"\n" for line in spoilt)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree as (its holder, its key)."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def spoil_safetensors(dice: Random, data: bytes) -> bytes:
    """The header, which is JSON behind its length, or any byte."""
    if dice.random() < 0.4:
        return spoil_bytes(dice, data)
    size = int.from_bytes(data[:8], "little")
    header = spoil_json(dice, data[8 : 8 + size].decode())
    header += b" " * (-len(header) % 8)
    length = len(header) if dice.random() < 0.9 else dice.choice([0, 1, 2**40, 2**63])
    return length.to_bytes(8, "little") + header + data[8 + size :]


def spoil_spec(dice: Random, text: str) -> str:
    """One character or one token of a spec."""
    spoilt = spoil_text(dice, text).decode("utf-8", "replace") if dice.random() < 0.5 else text
    if dice.random() < 0.5:
        at = dice.randrange(len(spoilt) + 1)
        spoilt = spoilt[:at] + dice.choice("=:,@+-. x0\t'\"(){}[]é") + spoilt[at + dice.randrange(2) :]
    return spoilt.replace("\0", "")[:20_000]


Spoil = Callable[[Random, bytes], bytes]


def as_bytes(spoil: Callable[[Random, str], bytes]) -> Spoil:
    return lambda dice, data: spoil(dice, data.decode())
