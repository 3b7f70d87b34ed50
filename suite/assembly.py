"""From settings to a running engine: models, memory plan, caches, decoder and reward.

The order matters: weights first, then the workspace is measured by running the largest forward
passes, and what is left of the memory is the KV budget. Nothing here decides about candidates.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import logging
import platform
from typing import TYPE_CHECKING, Any

import torch

from engine import memory
from engine.decoder import Decoder
from engine.kv_cache import PagedKV
from engine.model import Transformer
from engine.ops import Ops, TorchOps
from engine.plan import (
    REWARD_EXTRA_TOKENS,
    REWARD_PAGE_SIZE,
    Plan,
    Side,
    first_stretch,
    gpu_step_rows,
    make_plan,
)
from engine.reader import Reader
from engine.sampler import SamplingParams
from engine.stepper import EagerStepper, Sampler, Stepper, TorchSampler, padded
from engine.weights import load_model
from engine.workspace import Workspace, measure_decode, measure_read
from rewards.base import Reward
from rewards.function_reward import FunctionReward, load_function
from rewards.loading import RewardModel, load_reward_model
from rewards.model_reward import ModelReward, SelfReward
from suite.chat import Chat, generator_chat, same_vocabulary
from suite.models import resolve
from suite.settings import Settings

if TYPE_CHECKING:
    from suite.processes import Processes

logger = logging.getLogger(__name__)

PAGE_SIZE = {"cpu": 32, "cuda": 64}
READ_CHUNK_TOKENS = {"cpu": 2048, "cuda": 32768}
MAX_ROWS_AT_ONCE = 4096  # in one decode step's forward pass; more rows go in slices
STEPS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 16}
CPU_KV_BYTES = 250_000_000  # on a CPU speed is the limit, not memory: a few hundred short rows
CPU_SHARE = 0.25  # of the free memory, where that is less
LONGEST_TEMPLATE = 512  # tokens that a reward model's template may put around the prompt
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RECORDED_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


@dataclasses.dataclass(slots=True)
class Assembly:
    """What a Generator works with."""

    chat: Chat
    decoder: Decoder
    reward: Reward
    plan: Plan
    device: torch.device
    chunks: list[memory.Chunk]

    def reset_counters(self) -> None:
        """Counters are of one prompt."""
        self.decoder.forget_prompt()
        self.reward.reset_counter()
        for chunk in self.chunks:
            chunk.num_splits = 0

    def measured(self) -> dict[str, Any]:
        """What the prompt's object records of the machine."""
        return {
            "peak_memory_bytes": memory.peak_bytes(self.device),
            "out_of_memory_splits": sum(chunk.num_splits for chunk in self.chunks),
            "plan": dataclasses.asdict(self.plan),
            "versions": versions(),
            "device": device_name(self.device),
        }


def assemble(settings: Settings, processes: Processes) -> Assembly:
    """Load, plan and allocate. Raises ValueError with the reason and the remedy."""
    try:
        return _assemble(settings, processes)
    except (RuntimeError, MemoryError) as error:
        if not memory.is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory while loading: {memory.in_words(error)}; lower --kv_cache_gb or "
            "--gpu_memory_utilization, or take smaller models"
        ) from error


def _assemble(settings: Settings, processes: Processes) -> Assembly:
    device = processes.device
    dtype = DTYPES[settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    places = settings.model_dir, settings.local_files_only
    source = resolve(settings.llm_name, *places, role="generator")
    folder = source.ready()
    chat = generator_chat(folder, source.name, settings.prompt_template)
    model, _ = load_model(folder, dtype, device)
    judge = _load_judge(settings, dtype, device)
    parts = put_together(settings, chat, model, judge)
    if processes.is_main:
        print(describe(parts.plan, model), flush=True)
    return parts


def put_together(
    settings: Settings, chat: Chat, model: Transformer, judge: RewardModel | str | None
) -> Assembly:
    """Plan the memory that is left beside loaded models, and allocate the caches."""
    ops = make_ops(model.device, model.dtype)
    sampler = make_sampler(settings, model)
    plan = _plan(settings, model, _reward_side(settings, chat, model, judge), ops, sampler)
    decoder = _decoder(settings, model, ops, sampler, plan, chat)
    reward, reader = _reward(settings, chat, decoder, judge, plan, ops)
    readers = [decoder, reader] if reader else [decoder]
    chunks = [chunk for each in readers for chunk in (each.chunk, each.prompt_chunk)]
    return Assembly(chat, decoder, reward, plan, model.device, chunks)


def is_fast(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our GPU kernels can run: an NVIDIA GPU, a 16-bit dtype, and Triton."""
    if device.type != "cuda" or dtype == torch.float32:
        return False
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logger.warning(
            "triton is not installed: decoding goes through PyTorch, several times slower"
        )
    return found


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The fastest backend for the device."""
    if not is_fast(device, dtype):
        return TorchOps()
    from engine.triton_ops import TritonOps

    return TritonOps()


def make_sampler(settings: Settings, model: Transformer) -> Sampler:
    """The sampler of the backend."""
    params = SamplingParams(settings.temperature, settings.top_k, settings.top_p)
    if not is_fast(model.device, model.dtype):
        return TorchSampler(params)
    from engine.triton_ops import TritonSampler

    return TritonSampler(params, model.config.vocab_size, MAX_ROWS_AT_ONCE, model.device)


def make_stepper(device: torch.device, dtype: torch.dtype) -> type[Stepper]:
    """How decode steps are launched."""
    if not is_fast(device, dtype):
        return EagerStepper
    from engine.cuda_graph import GraphStepper

    return GraphStepper


def _load_judge(
    settings: Settings, dtype: torch.dtype, device: torch.device
) -> RewardModel | str | None:
    """The reward model, a function's name, or None where the generator rewards itself."""
    if settings.self_reward:
        return None
    source = resolve(
        settings.reward_model_name, settings.model_dir, settings.local_files_only, role="reward"
    )
    if source.kind == "function":
        return source.name
    return load_reward_model(source, dtype, device)


def _shares_ids(chat: Chat, model: Transformer, judge: RewardModel) -> bool:
    """Whether the reward model can read the generator's ids as they are, each one of them."""
    if model.config.vocab_size > judge.backbone.config.vocab_size:
        return False
    if judge.chat.form.between.endswith(" "):
        return False  # in text, this space and the answer's first word are one token
    return same_vocabulary(chat.tokenizer, judge.chat.tokenizer)


def _reward_side(
    settings: Settings, chat: Chat, model: Transformer, judge: RewardModel | str | None
) -> tuple[Transformer, int] | None:
    """The model that the reward reads with and its longest prompt; None for a function."""
    bound = min(settings.max_tokens, model.config.max_positions)
    if isinstance(judge, str):
        return None
    if judge is None:
        return model, bound
    same = _shares_ids(chat, model, judge)
    longest = (bound if same else 2 * bound) + LONGEST_TEMPLATE
    return judge.backbone, min(judge.backbone.config.max_positions, longest)


def _plan(
    settings: Settings,
    model: Transformer,
    judge: tuple[Transformer, int] | None,
    ops: Ops,
    sampler: Sampler,
) -> Plan:
    """The cut of the memory that is left after weights, prompts' buffers and workspace."""
    device = model.device
    value_bytes = torch.finfo(model.dtype).bits // 8
    bound = min(settings.max_tokens, model.config.max_positions)
    generator = Side(model.config, value_bytes, bound)
    reward = Side(judge[0].config, value_bytes, judge[1]) if judge else None
    weights = model.weight_bytes
    if judge and judge[0] is not model:
        weights += judge[0].weight_bytes
    prompts = generator.prompt_bytes + (reward.prompt_bytes if reward else 0)
    rows = min(MAX_ROWS_AT_ONCE, _most_rows(settings, generator, PAGE_SIZE[device.type]))
    space = _workspace(model, judge[0] if judge else None, ops, sampler, rows)
    cache, why = _reward_cache(settings)
    plan = make_plan(
        _budget_bytes(settings, device, prompts, space),
        generator,
        reward,
        page_size=PAGE_SIZE[device.type],
        max_answer_tokens=min(settings.max_gen_tokens, bound - 1),
        max_rows=_max_rows(settings),
        alpha=_planned_alpha(settings),
        reward_cache=cache,
        step_rows=gpu_step_rows(model.config) if device.type == "cuda" else 0.0,
    )
    return dataclasses.replace(
        plan,
        why=why if why and plan.keep_reward_cache else plan.why,
        weight_bytes=weights,
        workspace_bytes=max(space.decode_bytes, space.read_bytes),
        predicted_peak_bytes=weights
        + plan.generator_kv_bytes
        + plan.reward_kv_bytes
        + max(space.decode_bytes, space.read_bytes),
    )


def _workspace(
    model: Transformer, reader: Transformer | None, ops: Ops, sampler: Sampler, rows: int
) -> Workspace:
    """Bytes of the largest forward passes; measured on a GPU, of no account on a CPU."""
    if model.device.type != "cuda":
        return Workspace()
    decode = measure_decode(model, ops, sampler, rows, PAGE_SIZE["cuda"])
    read = measure_read(reader or model, ops, READ_CHUNK_TOKENS["cuda"])
    return Workspace(decode, read)


def _planned_alpha(settings: Settings) -> float | None:
    """The rejection rate to plan with; None where every answer is read once."""
    if not settings.speculative_rejection:
        return 0.5 if settings.log_partial else None
    return 0.5 if settings.alpha == "auto" else float(settings.alpha)


def _reward_cache(settings: Settings) -> tuple[str, str | None]:
    """--reward_cache for the plan, and why, where it is not the flag's or the plan's own doing.

    The plan weighs the rounds that memory makes; scheduled rounds come more often, forks share what
    was read, and partial scores read each answer many times.
    """
    often = settings.log_partial or settings.refill or settings.schedule != "memory"
    if settings.reward_cache == "auto" and often and settings.alpha != 0.0:
        return "on", "many rounds read the same texts"
    return settings.reward_cache, None


def _most_rows(settings: Settings, generator: Side, page_size: int) -> int:
    """Rows that a step can have at the most, padding included: what the workspace is for."""
    rows = _max_rows(settings) or MAX_ROWS_AT_ONCE
    if settings.kv_cache_gb is not None:
        rows = min(rows, int(settings.kv_cache_gb * 1e9 / (page_size * generator.token_bytes)))
    return padded(max(1, rows))


def _max_rows(settings: Settings) -> int | None:
    if not settings.speculative_rejection:
        return settings.batch_size
    return settings.init_batch_size or settings.max_batch_size


def _budget_bytes(
    settings: Settings, device: torch.device, prompt_bytes: int, space: Workspace
) -> int:
    """Bytes for answers' KV: what the user said, or what is left after all else."""
    if settings.kv_cache_gb is not None:
        return int(settings.kv_cache_gb * 1e9)
    free = memory.free_bytes(device)
    if device.type == "cpu":
        return min(CPU_KV_BYTES, int(free * CPU_SHARE))
    # Decoding takes its workspace twice: once in the pool of the graphs, once to rehearse them.
    free -= prompt_bytes + 2 * space.decode_bytes + space.read_bytes
    return int(free - (1 - settings.gpu_memory_utilization) * memory.total_bytes(device))


def _decoder(
    settings: Settings, model: Transformer, ops: Ops, sampler: Sampler, plan: Plan, chat: Chat
) -> Decoder:
    bound = min(settings.max_tokens, model.config.max_positions)
    cache = PagedKV(
        model.config,
        num_pages=plan.pages,
        page_size=plan.page_size,
        max_rows=padded(plan.max_rows),
        max_row_tokens=plan.max_answer_tokens,
        max_prompt=bound,
        dtype=model.dtype,
        device=model.device,
    )
    return Decoder(
        model,
        ops,
        cache,
        sampler,
        chat.stop_ids,
        max_rows=plan.max_rows,
        look_every=STEPS_BETWEEN_LOOKS[model.device.type],
        ignore_stop=settings.ignore_stop,
        max_rows_at_once=MAX_ROWS_AT_ONCE,
        stepper=make_stepper(model.device, model.dtype),
    )


def _reward(
    settings: Settings,
    chat: Chat,
    decoder: Decoder,
    judge: RewardModel | str | None,
    plan: Plan,
    ops: Ops,
) -> tuple[Reward, Reader | None]:
    """The reward over its reader (None for a function)."""
    if isinstance(judge, str):
        function = load_function(judge)
        return FunctionReward(judge, function, chat.decode, settings.reward_timeout), None
    if judge is None:
        reader = _reader(decoder.model, ops, plan, same_text=True)
        return SelfReward(reader, chat.prompt_ids), reader
    same = _shares_ids(chat, decoder.model, judge)
    reader = _reader(judge.backbone, ops, plan, same_text=same)
    decode = None if same else chat.decode
    return ModelReward(reader, judge.head, judge.chat, decode), reader


def _reader(model: Transformer, ops: Ops, plan: Plan, *, same_text: bool) -> Reader:
    """A reader with its part of the plan; another tokenizer may need twice the tokens."""
    stretch = 1 if same_text else 2
    bound = plan.max_answer_tokens * stretch + REWARD_EXTRA_TOKENS
    cache = PagedKV(
        model.config,
        num_pages=plan.reward_pages,
        page_size=REWARD_PAGE_SIZE,
        max_rows=plan.max_rows if plan.keep_reward_cache else 0,
        max_row_tokens=bound,
        max_prompt=plan.reward_max_prompt,
        dtype=model.dtype,
        device=model.device,
    )
    chunk = READ_CHUNK_TOKENS[model.device.type]
    return Reader(model, ops, cache, keep=plan.keep_reward_cache, chunk_tokens=chunk)


def describe(plan: Plan, model: Transformer) -> str:
    """The plan in words, printed before the first prompt."""
    stretch = first_stretch(plan.page_size, plan.max_answer_tokens)
    lines = [
        f"plan: weights {plan.weight_bytes / 1e9:.2f} GB, KV budget {plan.budget_bytes / 1e9:.2f} "
        f"GB = {plan.pages} pages of {plan.page_size} tokens",
        f"plan: {plan.rows_for(stretch)} rows fit at {stretch} answer tokens, "
        f"{plan.rows_for(plan.max_answer_tokens)} at {plan.max_answer_tokens}",
    ]
    if plan.reward_params:
        kept = "kept" if plan.keep_reward_cache else "not kept"
        lines.append(f"plan: the reward model's cache is {kept} between rounds ({plan.why})")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what computed the numbers."""
    found = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        found[package] = importlib.metadata.version(package)
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
