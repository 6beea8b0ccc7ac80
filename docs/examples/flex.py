"""Judge flex_attention on the calls of a dump: it answers in FLASH_ATTENTION's place on the CPU."""

import torch
from torch.nn.attention.flex_attention import flex_attention


def flex(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """SDPA's arguments as flex_attention takes them: an additive mask becomes a score_mod."""
    mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])

    def modified(score, batch, head, row, column):
        score = score if mask is None else score + mask[batch, head, row, column]
        return torch.where(row >= column, score, -torch.inf) if is_causal else score

    output = flex_attention(query, key, value, score_mod=modified, scale=scale)
    return output, output.new_zeros(query.shape[:-1], dtype=torch.float32)


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("_scaled_dot_product_flash_attention_for_cpu", flex, "CPU")
