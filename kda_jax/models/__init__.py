"""Kimi-Linear and Kimi-K3: published checkpoints, prefill and decode, in Flax."""

from .cache import Checkpoints, ModelCache, empty_cache, put_rows, resume, take_rows
from .config import ModelConfig
from .decoder import LanguageModel, Outputs, forward
from .generation import decode_step, generate, mixed_step, prefill, sample
from .hf_config import from_config, to_config
from .kimi_k3 import KimiK3
from .kimi_linear import KimiLinear
from .names import WeightsError
from .weights import abstract_model, from_pretrained, save_pretrained

__all__ = [
    "Checkpoints",
    "KimiK3",
    "KimiLinear",
    "LanguageModel",
    "ModelCache",
    "ModelConfig",
    "Outputs",
    "WeightsError",
    "abstract_model",
    "decode_step",
    "empty_cache",
    "forward",
    "from_config",
    "from_pretrained",
    "generate",
    "mixed_step",
    "prefill",
    "put_rows",
    "resume",
    "sample",
    "save_pretrained",
    "take_rows",
    "to_config",
]
