"""Text to token ids and back: chat templates, BOS, turn ends.

A `Chat` belongs to one tokenizer and one format. It renders a prompt (and, for reward models, an
answer with what closes it) and tokenises the whole text at once, as the reference implementations
do. Text that happens to contain control tokens is tokenised apart from the template, so that it
stays text and can never move a header. Exactly one BOS: the template's own, or the one added here.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from suite.model_files import NotAModel, read_json

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{prompt}\n\n### Response:"
)
# The paper's models that speak the Alpaca format, and the chat models we name: keyed exactly.
ALPACA_MODELS = frozenset(
    ("sft10k", "alpaca-7b", "dpo-human", "dpo-sim", "ppo-human", "ppo-sim", "reward-model-human")
    + ("reward-model-sim",)
)
CHAT_MODELS = frozenset(
    ("SmolLM2-135M-Instruct", "Meta-Llama-3-8B-Instruct", "Llama-3.1-8B-Instruct")
    + ("Llama-3.2-1B-Instruct", "Llama-3.2-3B-Instruct", "Mistral-7B-Instruct-v0.3")
    + ("Qwen2.5-0.5B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-0.6B", "Qwen3-8B")
)
HOLE = "\u241e"  # stands for a text in a rendered template; a symbol that no template contains
LEFT, RIGHT = "\n ", " \n"  # put around it to see what the template strips
RENDER_SEC = 20.0  # milliseconds are usual; more is a template that does not end
LARGEST_ID = 2**31
Trim = tuple[str | None, str | None]  # characters to strip left and right; None: all white space
KEEP: Trim = ("", "")


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Text around prompt and answer: `before` prompt `between` answer `after`."""

    before: str
    between: str
    after: str
    prompt_trim: Trim = KEEP  # what the template strips off the texts
    answer_trim: Trim = KEEP
    adds_bos: bool = False  # a BOS token stands before all, outside of the text

    def pieces(self, prompt: str, answer: str | None) -> list[tuple[str, bool]]:
        """(text, is it the user's or model's own) from first to last."""
        parts = [(self.before, False), (_strip(prompt, self.prompt_trim), True)]
        parts.append((self.between, False))
        if answer is not None:
            parts += [(_strip(answer, self.answer_trim), True), (self.after, False)]
        return [part for part in parts if part[0]]


def _strip(text: str, trim: Trim) -> str:
    return text.lstrip(trim[0]).rstrip(trim[1])


class Chat:
    """A tokenizer with its format. Raises ValueError where the text can't be encoded."""

    def __init__(self, tokenizer: Any, form: Format, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer, self.form = tokenizer, form
        self._backend = _backend(tokenizer)
        self.stop_ids = sorted(set(stop_ids))
        self._control = [token for token in tokenizer.all_special_tokens if token]
        self._control += [t for t in tokenizer.get_added_vocab() if t not in self._control]
        self._control_starts = {token[0] for token in self._control}
        self._after_ids = self._encode(form.after, split=False) if form.after else []

    def prompt_ids(self, prompt: str) -> list[int]:
        """Everything before the answer's first token."""
        return self._ids(self.form.pieces(prompt, None))

    def conversation_ids(self, prompt: str, answers: Sequence[str]) -> list[list[int]]:
        """The whole of each conversation, closed as the template closes it."""
        safe = [self._is_safe(answer) for answer in answers]
        if not self._is_safe(prompt):
            safe = [False] * len(answers)
        texts = [
            "".join(text for text, _ in self.form.pieces(prompt, answer))
            for answer, ok in zip(answers, safe, strict=True)
            if ok
        ]
        whole = iter(self._encode_batch(texts))
        bos = self._bos()
        return [
            bos + next(whole) if ok else self._ids(self.form.pieces(prompt, answer))
            for answer, ok in zip(answers, safe, strict=True)
        ]

    @property
    def after_ids(self) -> list[int]:
        """What closes an answer, for callers that carry the answer's ids themselves."""
        return self._after_ids

    @property
    def header_ids(self) -> list[int]:
        """What stands between the prompt and the answer."""
        return self._encode(self.form.between, split=False)

    def decode(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each answer, control tokens left out."""
        listed = [np.asarray(ids).tolist() for ids in answers]
        if self._backend is not None:
            return self._backend.decode_batch(listed, skip_special_tokens=True)
        return self.tokenizer.batch_decode(
            listed, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _is_safe(self, text: str) -> bool:
        if not any(start in text for start in self._control_starts):
            return True  # most texts, and there can be hundreds of control tokens
        return not any(token in text for token in self._control)

    def _bos(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [bos] if self.form.adds_bos and bos is not None else []

    def _ids(self, pieces: list[tuple[str, bool]]) -> list[int]:
        if all(self._is_safe(text) for text, own in pieces if own):
            return self._bos() + self._encode("".join(text for text, _ in pieces), split=False)
        ids = self._bos()
        for text, own in pieces:
            ids += self._encode(text, split=own)
        return ids

    def _encode(self, text: str, *, split: bool) -> list[int]:
        """Token ids without any added; with `split`, control tokens are text like any other."""
        return self._encode_batch([text], split=split)[0]

    def _encode_batch(self, texts: list[str], *, split: bool = False) -> list[list[int]]:
        if not texts:
            return []
        try:
            if self._backend is None:
                return self.tokenizer(
                    texts, add_special_tokens=False, split_special_tokens=split, verbose=False
                )["input_ids"]
            self._backend.encode_special_tokens = split
            encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(f"the tokenizer can't encode the text ({error})") from error
        return [encoding.ids for encoding in encoded]


def _backend(tokenizer: Any) -> Any:
    """The tokenizers library's object, which works through a batch in its own threads.

    transformers' methods around it decode row by row and keep offsets that nobody reads: 2 to 4
    times as slow. None for a tokenizer in Python.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # what a tokenizer.json may ask for, and transformers turns off too
        backend.no_truncation()
        backend.no_padding()
    return backend


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; never runs code from it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # a corrupt file raises whatever the libraries' parsers raise
        raise ValueError(f"{folder}: the tokenizer can't be loaded ({error})") from error


def generator_chat(folder: Path, name: str, template: str = "auto") -> Chat:
    """The generator's tokenizer and format. `template` is auto, chat, plain or alpaca."""
    tokenizer = load_tokenizer(folder)
    kind = _kind(tokenizer, name, template)
    if kind == "chat":
        form = chat_format(tokenizer, generation=True)
        stops = stop_ids(folder, tokenizer, turn_end=_turn_end(tokenizer))
    else:
        form = Format("", "", "", adds_bos=True) if kind == "plain" else alpaca_format()
        stops = stop_ids(folder, tokenizer)
    if not stops:
        raise ValueError(f"{folder}: no eos token in its generation config or tokenizer; add one")
    return Chat(tokenizer, form, stops)


def reward_chat(folder: Path, name: str, architecture: str, *, cut_after: bool = False) -> Chat:
    """A reward model's tokenizer and format, by its architecture.

    `cut_after`: the score is read at the turn's end, without white space behind it.
    """
    tokenizer = load_tokenizer(folder)
    if architecture == "EurusRewardModel":
        return Chat(tokenizer, Format("[INST] ", " [/INST] ", "", adds_bos=True))
    if architecture == "RewardModel" or name in ALPACA_MODELS:
        return Chat(tokenizer, alpaca_format())
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder}: this reward model's tokenizer has no chat template, so how it reads a "
            "conversation is unknown; add chat_template to its tokenizer_config.json"
        )
    form = chat_format(tokenizer, generation=False)
    if cut_after:
        form = dataclasses.replace(form, after=form.after.rstrip())
    return Chat(tokenizer, form)


def alpaca_format() -> Format:
    before, between = ALPACA.split("{prompt}")
    return Format(before, between, "", adds_bos=True)


def chat_format(tokenizer: Any, *, generation: bool) -> Format:
    """What the tokenizer's template writes around one user turn and one answer."""
    before, between, after = _split(_render(tokenizer, HOLE, HOLE), 3)
    spaced = LEFT + HOLE + RIGHT
    left, right, _ = _split(_render(tokenizer, spaced, HOLE), 3)
    prompt_trim = _trim(left.removeprefix(before), right.removesuffix(between))
    _, left, right = _split(_render(tokenizer, HOLE, spaced), 3)
    answer_trim = _trim(left.removeprefix(between), right.removesuffix(after))
    if generation:
        before, between = _split(_render(tokenizer, HOLE), 2)
    return Format(before, between, after, prompt_trim, answer_trim)


def _trim(left: str, right: str) -> Trim:
    """What was stripped, by what is left of LEFT and RIGHT around the hole."""
    kinds = {"": None, " ": "\n", LEFT: "", RIGHT: ""}
    if left not in kinds or right not in kinds:
        raise ValueError("the chat template changes the white space around its texts")
    return kinds[left], kinds[right]


def _split(rendered: str, parts: int) -> list[str]:
    pieces = rendered.split(HOLE)
    if len(pieces) != parts:
        raise ValueError("the chat template does not render a user turn and an answer as text")
    return pieces


def stop_ids(folder: Path, tokenizer: Any, turn_end: int | None = None) -> list[int]:
    """Every id that ends an answer: generation config, tokenizer, and the template's turn end."""
    found = [tokenizer.eos_token_id, turn_end]
    files = [Path(folder) / name for name in ("generation_config.json", "config.json")]
    path = next((file for file in files if file.is_file()), None)
    if path is not None:  # a model without a generation config has its eos ids in its config
        try:
            listed = read_json(path).get("eos_token_id")
        except NotAModel as error:
            raise ValueError(str(error)) from error
        found += listed if isinstance(listed, list) else [listed]
    return sorted({i for i in found if type(i) is int and 0 <= i < LARGEST_ID})


def _kind(tokenizer: Any, name: str, template: str) -> str:
    base = name.rstrip("/").rsplit("/", 1)[-1]
    if template == "auto" and base in ALPACA_MODELS:
        return "alpaca"
    has_template = bool(tokenizer.chat_template)
    if not has_template and (template == "chat" or (template == "auto" and base in CHAT_MODELS)):
        raise ValueError(
            f"{name} needs a chat template and its tokenizer has none; add chat_template to "
            "tokenizer_config.json, or give --prompt_template plain or alpaca"
        )
    if template == "auto":
        return "chat" if has_template else "plain"
    return template


def _turn_end(tokenizer: Any) -> int | None:
    """The control token right behind an answer, by the template itself."""
    after = chat_format(tokenizer, generation=False).after.lstrip()
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    control = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    return ids[0] if ids and ids[0] in control else None


def _render(tokenizer: Any, prompt: str, answer: str | None = None) -> str:
    """The conversation as text; without an answer, up to where the model goes on."""
    turns = [{"role": "user", "content": prompt}]
    if answer is not None:
        turns.append({"role": "assistant", "content": answer})
    try:
        return _within(
            RENDER_SEC,
            lambda: tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=answer is None
            ),
        )
    except Exception as error:  # a template is a program, and transformers' sandbox bounds no time
        reason = str(error) or type(error).__name__
        raise ValueError(f"the chat template can't render a conversation ({reason})") from error


def _within(seconds: float, work: Callable[[], str]) -> str:
    """NOTE: a thread that goes on can't be stopped; as a daemon it ends with the process."""
    outcome: queue.Queue[tuple[str, Exception | None]] = queue.Queue(1)

    def run() -> None:
        try:
            outcome.put((work(), None))
        except Exception as error:  # handed over to the thread that waits
            outcome.put(("", error))

    threading.Thread(target=run, name="template", daemon=True).start()
    try:
        text, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"it does not end within {seconds:g} s") from None
    if error is not None:
        raise error
    return text


def same_vocabulary(generator: Any, reward: Any) -> bool:
    """Whether the generator's ids mean the same text to the reward model.

    The reward model's tokenizer may have more added tokens (ArmoRM's has one for padding).
    """
    if generator is reward:
        return True
    (own, own_added), (other, other_added) = _fingerprint(generator), _fingerprint(reward)
    return own == other and own_added <= other_added


def _fingerprint(tokenizer: Any) -> tuple[Any, set[tuple[int, str]]]:
    """What decides over ids without added tokens, and the added tokens."""
    added = {(index, token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer.get_vocab(), added
    model = json.loads(backend.to_str())
    return {k: model.get(k) for k in ("model", "normalizer", "pre_tokenizer")}, added
