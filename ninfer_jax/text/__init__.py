"""Text in, text out: tokenizer, chat template, and what happens to generated text on its way to the reader."""

from ninfer_jax.text.checkpoint_text import CheckpointText, NoTokenizer, open_text
from ninfer_jax.text.detokenize import IncrementalDecoder
from ninfer_jax.text.generation_config import GenerationDefaults
from ninfer_jax.text.messages import normalize_messages, normalize_tools
from ninfer_jax.text.prompt import Prompt, render_prompt, render_to_ids
from ninfer_jax.text.reasoning import Piece, ReasoningSplitter, starts_in_reasoning
from ninfer_jax.text.stop import StopMatcher
from ninfer_jax.text.template import ChatTemplate
from ninfer_jax.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "CheckpointText",
    "GenerationDefaults",
    "IncrementalDecoder",
    "NoTokenizer",
    "Piece",
    "Prompt",
    "ReasoningSplitter",
    "StopMatcher",
    "Tokenizer",
    "normalize_messages",
    "normalize_tools",
    "open_text",
    "render_prompt",
    "render_to_ids",
    "starts_in_reasoning",
]
