"""FlashAttention-2 in Triton: the functions that a user imports."""

from .architecture import Architecture, effective_architecture
from .attention import flash_attention
from .attention_varlen import flash_attention_varlen

__all__ = ["Architecture", "effective_architecture", "flash_attention", "flash_attention_varlen"]
