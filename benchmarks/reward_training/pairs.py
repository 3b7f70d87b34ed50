"""Preference pairs as token ids: reading, splitting, cutting, batching.

A pair is a prompt (chat-templated, generation prompt included) and two answers; a scored sequence
is prompt + answer + the one token that ends the assistant's turn. Pairs can be kept in one
safetensors file, so that tokenising is done once and elsewhere. Nothing here knows about models.
Invariant: batches and cuts are a function of (seed, epoch) alone, so that a resumed run sees them
again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

MIN_CUT_TOKENS = 8
WINDOW_BATCHES = 16  # batches are cut from windows this long, sorted by length


@dataclass(frozen=True, slots=True)
class Facts:
    """What a sequence needs of the tokenizer and its template."""

    turn_end: str
    turn_end_id: int
    pad_id: int
    template: str = "chat"  # the only one; token files and packages have it written


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: np.ndarray  # [tokens] int32
    chosen: np.ndarray
    rejected: np.ndarray
    group: str  # pairs of one group share a prompt and are never split
    source: str
    kind: str
    chosen_chars: int
    rejected_chars: int


def read_records(path: Path) -> list[dict[str, Any]]:
    """Reads `.jsonl` or `.jsonl.gz` with `prompt` or `messages`, `chosen` and `rejected`."""
    opener = gzip.open if path.suffix == ".gz" else open
    records = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            missing = [
                key for key in ("chosen", "rejected") if not isinstance(record.get(key), str)
            ]
            if missing or not ("messages" in record or "prompt" in record):
                raise ValueError(
                    f"{path}, line {number}: a pair needs 'chosen', 'rejected' and 'prompt' or "
                    f"'messages', got {sorted(record)}"
                )
            records.append(record)
    return records


def encode_records(
    records: Sequence[dict[str, Any]], tokenizer: Any, max_length: int
) -> tuple[list[Pair], int]:
    """Returns the pairs and how many were left out because their prompt fills `max_length`."""
    prompts = [encode_prompt(messages_of(r), tokenizer, max_length) for r in records]
    chosen = encode_texts([r["chosen"] for r in records], tokenizer)
    rejected = encode_texts([r["rejected"] for r in records], tokenizer)
    pairs = []
    for index, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        room = max_length - len(prompt) - 1
        if room < MIN_CUT_TOKENS:
            continue
        pairs.append(
            Pair(
                prompt=prompt,
                chosen=chosen[index][:room],
                rejected=rejected[index][:room],
                group=str(record.get("gid", record.get("prompt", index))),
                source=str(record.get("source", "all")),
                kind=str(record.get("kind", "all")),
                chosen_chars=len(record["chosen"]),
                rejected_chars=len(record["rejected"]),
            )
        )
    return pairs, len(records) - len(pairs)


def messages_of(record: dict[str, Any]) -> list[dict[str, str]]:
    return record.get("messages") or [{"role": "user", "content": record["prompt"]}]


def encode_prompt(messages: list[dict[str, str]], tokenizer: Any, max_length: int) -> np.ndarray:
    """The ids up to where the answer begins; the oldest exchanges go while it is too long."""
    while True:
        ids = _prompt_ids(messages, tokenizer)
        if len(ids) < max_length - MIN_CUT_TOKENS or len(messages) < 3:
            return np.asarray(ids, dtype=np.int32)
        first = 1 if messages[0]["role"] == "system" else 0
        messages = messages[:first] + messages[first + 2 :]


def _prompt_ids(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_texts(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


def save_pairs(pairs: Sequence[Pair], facts: Facts, path: Path) -> None:
    parts = [part for p in pairs for part in (p.prompt, p.chosen, p.rejected)]
    tokens = np.concatenate(parts)
    if tokens.max() < 1 << 16:
        tokens = tokens.astype(np.uint16)
    lengths = np.asarray([len(part) for part in parts], dtype=np.int32).reshape(-1, 3)
    described = [[p.group, p.source, p.kind, p.chosen_chars, p.rejected_chars] for p in pairs]
    metadata = {"facts": json.dumps(asdict(facts)), "pairs": json.dumps(described)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tokens": tokens, "lengths": lengths}, path, metadata)


def load_pairs(path: Path) -> tuple[list[Pair], Facts]:
    with safe_open(path, "numpy") as file:
        tokens = file.get_tensor("tokens").astype(np.int32)
        lengths = file.get_tensor("lengths")
        metadata = file.metadata()
    parts = iter(np.split(tokens, np.cumsum(lengths.reshape(-1))[:-1]))
    pairs = [
        Pair(next(parts), next(parts), next(parts), *described)
        for described in json.loads(metadata["pairs"])
    ]
    return pairs, Facts(**json.loads(metadata["facts"]))


def split_by_group(
    pairs: Sequence[Pair], fraction: float, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """(training, held out): whole groups, together about `fraction` of the pairs."""
    groups = sorted({p.group for p in pairs})
    order = np.random.default_rng([seed, 1]).permutation(len(groups))
    sizes: dict[str, int] = dict.fromkeys(groups, 0)
    for pair in pairs:
        sizes[pair.group] += 1
    held: set[str] = set()
    count = 0
    for index in order:
        if count >= fraction * len(pairs):
            break
        held.add(groups[index])
        count += sizes[groups[index]]
    return [p for p in pairs if p.group not in held], [p for p in pairs if p.group in held]


def cut_pairs(pairs: Sequence[Pair], fraction: float, seed: int, epoch: int) -> list[Pair]:
    """Cuts both answers of a random `fraction` of the pairs at one token count, as rejection does.

    The count is log-uniform from 8 to the longer answer, so an answer that is shorter stays whole.
    """
    draws = np.random.default_rng([seed, 2, epoch]).random((len(pairs), 2))
    return [
        _cut(pair, position) if chance < fraction else pair
        for pair, (chance, position) in zip(pairs, draws, strict=True)
    ]


def _cut(pair: Pair, position: float) -> Pair:
    longest = max(len(pair.chosen), len(pair.rejected))
    if longest <= MIN_CUT_TOKENS:
        return pair
    count = int(MIN_CUT_TOKENS * (longest / MIN_CUT_TOKENS) ** position)
    chosen, rejected = pair.chosen[:count], pair.rejected[:count]
    if np.array_equal(chosen, rejected):  # a shared opening says nothing about preference
        return pair
    described = (pair.group, pair.source, pair.kind, pair.chosen_chars, pair.rejected_chars)
    return Pair(pair.prompt, chosen, rejected, *described)


def epoch_batches(pairs: Sequence[Pair], size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Batches of pair indices of similar length, in random order; every pair once."""
    rng = np.random.default_rng([seed, 3, epoch])
    lengths = np.asarray([pair_length(p) for p in pairs])
    order = rng.permutation(len(pairs))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), size * WINDOW_BATCHES):
        window = order[start : start + size * WINDOW_BATCHES]
        window = window[np.argsort(lengths[window], kind="stable")]
        batches += [window[i : i + size] for i in range(0, len(window), size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def pair_length(pair: Pair) -> int:
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) + 1


def sequences(pairs: Sequence[Pair], facts: Facts) -> list[np.ndarray]:
    """Chosen and rejected in turn: rows 2i and 2i + 1 are pair i."""
    end = np.asarray([facts.turn_end_id], dtype=np.int32)
    return [
        np.concatenate((pair.prompt, answer, end))
        for pair in pairs
        for answer in (pair.chosen, pair.rejected)
    ]


def micro_batches(lengths: Sequence[int], max_tokens: int, unit: int = 1) -> Iterator[np.ndarray]:
    """Indices of rows of similar length, at most `max_tokens` with padding, in groups of `unit`.

    With `unit` 2 the rows of a pair stay together. One group larger than the bound goes alone.
    """
    tops = np.asarray(lengths).reshape(-1, unit).max(axis=1)
    order = np.argsort(tops, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * unit * tops[order[stop]] <= max_tokens:
            stop += 1
        groups = np.sort(order[start:stop])
        yield (groups[:, None] * unit + np.arange(unit)).reshape(-1)
        start = stop
