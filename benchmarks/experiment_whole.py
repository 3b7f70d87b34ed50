"""Whether a stored line has what the tables and the export read of it.

Files get damaged, and a damaged number must not become a table. Beyond types, numbers must lie
where runs can have them, so that no sum or ratio of them is infinite.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.experiment_plan import PARTIAL, POOL, SELF_POOL, Size
from postprocess.reading import count_of, finite

LARGEST = 10**15  # of any number: of tokens, bytes, seconds or a score
COUNTS = ("tokens_generated", "tokens_scored")
SECONDS = ("generation_sec", "reward_sec")
ROUND_FIELDS = (
    *("rows", "stop_length", "kept", "cutoff", "tokens_generated", "tokens_scored"),
    *("kv_bytes", "reward_kv_bytes"),
)
ROUND_COUNTS = tuple(name for name in ROUND_FIELDS if name != "cutoff")


def is_whole(line: dict[str, Any]) -> bool:
    config = line.get("config")
    if not _count(line.get("JSON_idx")) or not isinstance(config, str):
        return False
    if "failed" in line:
        return isinstance(line["failed"], str)
    if not _costs(line) or not _best(line.get("best")):
        return False
    if config in (POOL, SELF_POOL):
        return _pool(line)
    if config.startswith(("alpha ", "self alpha ")):
        return _rejection(line)
    return config != PARTIAL or _partials(line.get("partials"))


def is_whole_session(line: dict[str, Any]) -> bool:
    """Whether the entry of one call has what the report says of it."""
    return (
        all(isinstance(line.get(name), str) for name in ("date", "device"))
        and isinstance(line.get("versions"), dict)
        and _number(line.get("seconds"))
        and _count(line.get("just_fit_bytes"))
    )


def wrong_settings(stored: dict[str, Any]) -> list[str]:
    """Names in the settings file that the report needs and that are missing or of a wrong type;
    of the size, those of a wrong type."""
    texts = ("llm_name", "reward_model_name", "reward_cache")
    sound = {name: isinstance(stored.get(name), str) for name in texts}
    sound |= {name: _count(stored.get(name)) for name in ("top_k", "max_gen_tokens")}
    sound["temperature"] = _number(stored.get("temperature"))
    size = asdict(Size()).items()
    sound |= {name: _alike(stored[name], usual) for name, usual in size if name in stored}
    return [name for name, is_sound in sound.items() if not is_sound]


def _alike(value: Any, usual: Any) -> bool:
    """A count where the usual value is one, else a list of numbers."""
    if isinstance(usual, int):
        return _count(value)
    return isinstance(value, list) and all(map(_number, value))


def _count(value: Any) -> bool:
    count = count_of(value)
    return count is not None and count <= LARGEST


def _number(value: Any) -> bool:
    number = finite(value)
    return number is not None and abs(number) <= LARGEST


def _costs(line: dict[str, Any]) -> bool:
    """Tokens and seconds of generation and scoring; ratios are taken of their sums."""
    return (
        all(_count(line.get(name)) for name in COUNTS)
        and sum(line[name] for name in COUNTS) > 0
        and all(_number(line.get(name)) and line[name] >= 0 for name in SECONDS)
        and sum(line[name] for name in SECONDS) > 0
    )


def _best(best: Any) -> bool:
    return isinstance(best, dict) and isinstance(best.get("output"), str) and _number(
        best.get("score")
    )  # fmt: skip


def _scores(scores: Any) -> bool:
    return isinstance(scores, list) and bool(scores) and all(map(_number, scores))


def _pool(line: dict[str, Any]) -> bool:
    """A length for each score, and winners from the first candidate on."""
    lengths, winners = line.get("num_tokens"), line.get("winners")
    if not _scores(line.get("scores")) or not _objects(winners):
        return False
    places = [entry.get("place") for entry in winners]
    return (
        isinstance(lengths, list)
        and _count(line.get("num_failed_rows"))
        and all(map(_count, lengths))
        and len(lengths) == len(line["scores"])
        and places[:1] == [0]
        and all(_count(place) and place < len(lengths) for place in places)
        and all(isinstance(entry.get("output"), str) for entry in winners)
    )


def _rejection(line: dict[str, Any]) -> bool:
    """Scores of the finished answers, the best's among them, and the rounds."""
    rounds = line.get("rounds")
    return (
        _scores(line.get("scores"))
        and round(line["best"]["score"], 4) in line["scores"]
        and all(_count(line.get(name)) for name in ("start_rows", "num_completed"))
        and _objects(rounds)
        and all(_count(entry.get(name)) for entry in rounds for name in ROUND_COUNTS)
        and all(_pair(entry["partial"]) for entry in rounds if "partial" in entry)
    )


def _partials(partials: Any) -> bool:
    return isinstance(partials, dict) and all(
        length.isdecimal() and length.isascii() and _pair(pair) for length, pair in partials.items()
    )


def _pair(pair: Any) -> bool:
    """[pairs, rank correlation or None]."""
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and _count(pair[0])
        and (pair[1] is None or (_number(pair[1]) and abs(pair[1]) < 1.001))
    )


def _objects(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
