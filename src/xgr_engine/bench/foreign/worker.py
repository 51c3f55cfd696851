"""Drives an engine of others in this process: read requests from standard input, write answers to standard output.

It is run as a program, by an interpreter that may know nothing of xgr: the packages that it drives pin versions of
torch and transformers that do not go together, so each may live in an environment of its own. It therefore imports
nothing but the standard library, torch and the engine.

Requests and answers are one JSON object a line. The first request names the engine and its settings; every further one
has a batch of prompts (token ids), and its answer the lists, the seconds that the engine took, and the peak of memory.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

Lists = list[list[tuple[list[int], float]]]  # a user's SIDs: tokens and score, best first


class Vllm:
    """``LLM.beam_search`` over token ids. The prefix cache, which its beams need, is emptied between batches."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, whose memory is counted
        from vllm import LLM
        from vllm.sampling_params import BeamSearchParams

        options: dict[str, Any] = {}
        if (memory := device_memory()) is not None:
            free, total = memory
            options["gpu_memory_utilization"] = min(settings["device_bytes"] / total, 0.95 * free / total)
        self._llm = LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["context"] + settings["levels"],
            max_logprobs=2 * settings["beam"],
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
        self._top_k = settings["top_k"]
        # no end token: a SID has a known number of codes
        self._params = BeamSearchParams(
            beam_width=settings["beam"], max_tokens=settings["levels"], ignore_eos=True, temperature=0.0
        )

    def run(self, prompts: list[list[int]]) -> Lists:
        """The best ``top_k`` sequences of each prompt."""
        found = self._llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], self._params)
        return [
            [(list(one.tokens[len(prompt) :]), float(one.cum_logprob)) for one in user.sequences[: self._top_k]]
            for prompt, user in zip(prompts, found, strict=True)
        ]

    def notes(self) -> list[str]:
        """Nothing to say."""
        return []

    def forget(self) -> None:
        """A benchmark repeats its prompts: what the last batch left behind would make the next one cheaper."""
        if self._llm.reset_prefix_cache() is False:  # old versions return nothing
            raise RuntimeError("vLLM did not empty its prefix cache")


class FlashRec:
    """``BeamRecEngine.generate_many`` over token ids, in the dtype of the checkpoint."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from flashrec.config import BeamRecConfig
        from flashrec.core import BeamRequest
        from flashrec.scheduler.scheduler import BeamRecEngine

        users, beam, wave = settings["users"], settings["beam"], settings["wave"]
        rows = wave * beam
        options: dict[str, Any] = {}
        if (memory := device_memory()) is not None:
            # what it takes of the free memory for keys and values is 0.45 of this share
            options["mem_fraction_static"] = settings["kv_bytes"] / (0.45 * memory[0])
        config = BeamRecConfig(
            model_path=settings["model"],
            quantization=None,
            kv_cache_dtype=settings["dtype"],
            compute_dtype=settings["dtype"],
            sid_vocab_file=settings["catalog"],
            sid_token_range=settings["token_range"],
            sid_codebook_sizes=settings["codebook_sizes"],
            sid_boundary_tokens="0,1",  # stripped again below; its requests are made without them
            beam_width=beam,
            max_tokens=settings["levels"],
            max_seq_len=settings["context"] + settings["levels"] + 1,
            # one request of W rows more than there are: prompts take rows of the same table
            max_running_requests=users + 2 + users // beam,
            cuda_graph_max_bs=rows,
            batch_slots=rows,
            cuda_graph_capture_sizes=[rows],
            target_batch_requests=wave,
            max_batch_requests=wave,
            enable_radix=False,  # a benchmark repeats its prompts
            enable_warmup=False,
            **options,
        )
        self._engine = BeamRecEngine(config)
        self._request = BeamRequest
        self._beam, self._top_k, self._levels = beam, settings["top_k"], settings["levels"]

    def run(self, prompts: list[list[int]]) -> Lists:
        """The best ``top_k`` SIDs of each prompt; beams that died (score -inf) are none."""
        requests = [
            self._request(input_ids=list(prompt), beam_width=self._beam, max_new_tokens=self._levels)
            for prompt in prompts
        ]
        found = self._engine.generate_many(requests)
        if len(found) != len(prompts):
            raise RuntimeError(f"FlashRec answered {len(found)} of {len(prompts)} requests")
        alive = ([one for one in user.sequences if one.cum_logprob != -math.inf] for user in found)
        return [[(list(one.tokens[1:-1]), float(one.cum_logprob)) for one in user[: self._top_k]] for user in alive]

    def forget(self) -> None:
        """Nothing is kept between batches: the prefix cache is off."""

    def notes(self) -> list[str]:
        """What it computes with instead of what it ships for, which it says in its log alone. Known after a batch."""
        try:
            from flashrec.kernel import beam_trie, sglops

            runner = self._engine.runner
            missing = {
                "sgl-kernel: norms and SwiGLU are plain PyTorch": sglops.SGL is None,
                "FlashInfer: attention is PyTorch's, row by row": runner.attn._fi_decode is None,
                "CUDA graphs": runner.graph is None,
                "its compiled trie search": not beam_trie.try_load_beam_trie(),
            }
        except (ImportError, AttributeError) as error:  # names of 0.1.2, which are nobody's promise
            return [f"whether FlashRec ran on its own kernels could not be told: {error}"]
        return [f"FlashRec ran without {what}" for what, absent in missing.items() if absent]


ENGINES: dict[str, type[Vllm | FlashRec]] = {"vllm": Vllm, "flashrec": FlashRec}
# How the engines say that a batch does not fit, beside torch's own words.
_NO_MEMORY = (
    "OutOfMemory",
    "out of memory",
    "No available memory",
    "available KV cache memory",
    "Free memory on device",
    "out of KV tokens",
)


def device_memory() -> tuple[int, int] | None:
    """Free bytes and all bytes of the GPU; None without one."""
    import torch

    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


class Meter:
    """Peaks of memory: of torch's allocator on the GPU, and of the process on the host (where Linux tells)."""

    def begin(self) -> None:
        """Forget earlier peaks."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._host = False
        else:
            self._host = True

    def read(self) -> dict[str, int | None]:
        """Bytes since :meth:`begin`."""
        import torch

        device = int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None
        return {"device_bytes": device, "host_bytes": _status("VmHWM") if self._host else None}


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _answer(engine: Vllm | FlashRec, meter: Meter, prompts: list[list[int]]) -> dict[str, Any]:
    engine.forget()
    meter.begin()
    start = time.perf_counter()
    lists = engine.run(prompts)
    seconds = time.perf_counter() - start
    return {"lists": lists, "seconds": seconds, **meter.read(), "notes": engine.notes()}


def _failure(error: BaseException) -> dict[str, Any]:
    traceback.print_exc()  # to the log
    text = f"{type(error).__name__}: {error}"
    return {"error": text, "out_of_memory": any(words in text for words in _NO_MEMORY)}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end. An error is answered too; one of the first request ends it."""

    def reply(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    first = json.loads(requests.readline())
    try:
        before = _status("VmRSS")
        engine = ENGINES[first["engine"]](first["settings"])
    except BaseException as error:  # engines leave with SystemExit as well
        reply(_failure(error))
        return
    meter = Meter()
    reply({"ready": True, "host_before": before})
    for line in requests:
        try:
            reply(_answer(engine, meter, json.loads(line)["prompts"]))
        except Exception as error:
            reply(_failure(error))


def main() -> None:
    """Keep the pipe to ourselves: whatever the engine prints goes to the log (standard error)."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
    answers.flush()
    os._exit(0)  # threads of an engine must not keep the process


if __name__ == "__main__":
    main()
