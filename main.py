"""Best-of-N and Speculative Rejection on a file of prompts: parse, build, loop, write, close.

`accelerate launch main.py --help` lists the flags. Each prompt becomes one JSON file of the output
folder; run the same command again to resume. Exit codes: 0 every prompt is done, 1 a prompt or a
process failed, 2 a mistake in the command or its files, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from suite import arguments
from suite.files import NotJson, NotWritten
from suite.settings import Settings, output_folder, settings_for_record
from suite.stopping import Stopped, Stopping

if TYPE_CHECKING:
    from generator import Generator
    from suite.processes import Processes
    from suite.progress import Progress
    from suite.prompts import Prompt
    from suite.records import RunFolder

log = logging.getLogger("main")

Outcome = tuple[str, Any]  # ("ok", this process's object) or ("failed", the reason)


def main(argv: Sequence[str] | None = None) -> int:
    """One run, from its command line to its exit code."""
    settings = arguments.parse(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with Stopping() as stopping:
            return run(settings, stopping)
    except Stopped as stopped:
        if _speaks_for_machine():
            _say(f"{stopped.reason}; what is stored stays, the same command resumes")
        return stopped.exit_code
    except NotWritten as e:
        _say(f"error: {e}")
    except Exception:
        traceback.print_exc()
        _say("error: ended by the exception above; the same command resumes")
    return 1


def run(settings: Settings, stopping: Stopping) -> int:
    """What a user can get wrong comes first and costs seconds; then models load, and the loop."""
    processes = None
    with ExitStack() as stack:
        try:
            prompts = check(settings)
            processes = stack.enter_context(start(stopping))
            folder = stack.enter_context(open_folder(settings, processes))
            todo = agree(folder, prompts, processes)
            stack.enter_context(record_memory(settings, folder, processes))
            generator = build(settings, processes) if todo else None
            processes.barrier()  # nobody begins a prompt before every process has its models
        except (ValueError, OSError) as e:
            return _refuse(e, processes)
        return loop(generator, prompts, todo, settings, folder, processes)


def check(settings: Settings) -> list[Prompt]:
    """Reads the prompts and finds both models, without loading any."""
    from suite.models import resolve
    from suite.prompts import load_prompts

    sys.path.append(os.getcwd())  # a module:function reward may lie where the command is typed
    where = settings.model_dir, settings.local_files_only
    resolve(settings.llm_name, *where, role="generator")
    if not settings.self_reward:
        source = resolve(settings.reward_model_name, *where, role="reward")
        if source.kind == "function":
            from rewards.function_reward import load_function

            load_function(source.name)
    return load_prompts(settings.data_filename, settings.num_prompts, settings.local_files_only)


def start(stopping: Stopping) -> Processes:
    from suite.processes import Processes

    return Processes.start(stopping)


def open_folder(settings: Settings, processes: Processes) -> RunFolder:
    """The run's folder, locked by the first process."""
    from suite.records import RunFolder

    path = output_folder(settings, processes.world_size)
    folder = RunFolder(path, settings, processes.world_size, processes.rank)
    if processes.is_main:
        folder.open()
    return folder


def agree(folder: RunFolder, prompts: list[Prompt], processes: Processes) -> set[int]:
    """The JSON_idx that are left, the same on every process: the first one has looked."""
    left = None
    if processes.is_main:
        done = folder.finished(prompts)
        left = [prompt.json_idx for prompt in prompts if prompt.json_idx not in done]
        _say(f"{len(prompts)} prompts, {len(done)} done before; answers go to {folder.folder}")
    return set(processes.broadcast(left))


def record_memory(
    settings: Settings, folder: RunFolder, processes: Processes
) -> AbstractContextManager[None]:
    from suite.memory_history import recorded

    return recorded(settings.record_memory, folder.folder, processes)


def build(settings: Settings, processes: Processes) -> Generator:
    """The models; the memory plan that building them prints goes to stdout in one piece."""
    import generator

    said = io.StringIO()
    with redirect_stdout(said):
        made = generator.build(settings, processes)
    try:
        print(said.getvalue(), end="", flush=True)
    except OSError as e:
        with suppress(OSError):  # else what it still holds is tried, and complained of, at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ValueError(
            f"the memory plan can't be written to stdout ({e.strerror or e}); no prompt was "
            "begun: send stdout elsewhere, or to /dev/null, and run the same command again"
        ) from e
    return made


def loop(
    generator: Generator | None,
    prompts: list[Prompt],
    todo: set[int],
    settings: Settings,
    folder: RunFolder,
    processes: Processes,
) -> int:
    """Answers and stores every prompt that is left; the exit code says whether one failed."""
    from suite.progress import Progress

    shared = folder.is_shared
    # A share goes by place in the file, so that a resumed run gives each process the same prompts.
    mine = prompts if shared else prompts[processes.rank :: processes.world_size]
    left = [prompt for prompt in mine if prompt.json_idx in todo]
    num_failed = 0
    with Progress(len(mine), len(mine) - len(left), processes.is_main) as progress:
        for prompt in left:
            try:
                outcome = answer(generator, prompt, settings, processes, progress)
                outcomes = processes.gather(outcome) if shared else [outcome]
                if outcomes is not None and not write(folder, prompt, outcomes, progress):
                    num_failed += 1
            except (Exception, Stopped) as e:
                _note_end(e, prompt, folder, processes)
                raise
    total = sum(processes.gather(num_failed) or ())
    if total:
        _say(f"{total} prompts failed, see {folder.folder / 'failures.jsonl'}; a rerun tries them")
    return 1 if total else 0


def answer(
    generator: Generator | None,
    prompt: Prompt,
    settings: Settings,
    processes: Processes,
    progress: Progress,
) -> Outcome:
    """This process's object for a prompt; a failure of this prompt alone is an outcome too."""
    from generator import PromptFailed

    if prompt.skip is not None:
        return "ok", _skipped(prompt, settings, processes)
    try:
        return "ok", generator.run(prompt, progress)
    except PromptFailed as e:
        return "failed", str(e)


def write(folder: RunFolder, prompt: Prompt, outcomes: list[Outcome], progress: Progress) -> bool:
    """Stores the objects of all processes in rank order, or why there are none."""
    reasons = [f"process {rank}: {x}" for rank, (kind, x) in enumerate(outcomes) if kind != "ok"]
    objects = [x for _, x in outcomes]
    if not reasons:
        try:
            folder.write(prompt, objects)
            progress.finish(prompt.json_idx, objects)
            return True
        except NotJson as e:
            reasons = [str(e)]
    reason = "; ".join(reasons)
    folder.record_failure(prompt, reason)
    progress.fail(prompt.json_idx, reason)
    return False


def _note_end(
    error: BaseException, prompt: Prompt, folder: RunFolder, processes: Processes
) -> None:
    """The run ends inside a prompt: tell the others, and leave the reason in the folder."""
    alone = isinstance(error, Exception)
    if alone:
        reason = f"process {processes.rank}, prompt {prompt.json_idx}: {_in_words(error)}"
        processes.abort(reason)
    else:
        code, reason = processes.why_stopped() or (error.exit_code, error.reason)
        error.exit_code, error.reason = code, reason
        if code >= 128:
            return  # told to stop from outside; nothing is wrong with the prompt
    # Of a prompt that all share, the first process keeps the books; otherwise each of its own.
    keeps_books = processes.is_main if folder.is_shared else alone
    if keeps_books:
        with suppress(NotWritten):
            folder.record_failure(prompt, reason)


def _skipped(prompt: Prompt, settings: Settings, processes: Processes) -> dict[str, Any]:
    shared = settings.parallel == "candidates"
    return {
        **settings_for_record(settings),
        "process_seed": settings.seed + processes.rank if shared else settings.seed,
        "process_rank": processes.rank,
        "num_processes": processes.world_size,
        "prompt": prompt.record,
        "skipped": prompt.skip,
        "elapsed_sec": 0.0,
        "clock": [],
        "trajectories": [],
    }


def _refuse(error: Exception, processes: Processes | None) -> int:
    """A user's mistake: one message a machine, exit code 2."""
    if processes is not None:
        processes.abort(str(error), exit_code=2)
    if not _speaks_for_machine():
        time.sleep(3)  # a launcher ends all with the first; let that be the one that speaks
    _say(f"error: {error}")
    log.debug("raised here", exc_info=error)
    return 2


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _speaks_for_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a log that is gone ends no run
        print(f"main.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    code = main()
    if code > 128:
        os._exit(code)  # stopped by a signal: no library's farewell may delay the end
    sys.exit(code)
