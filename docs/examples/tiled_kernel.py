"""An attention kernel of one's own in the place of a built-in one: `--preload` this file."""

import torch


def tiled(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, tile=128):
    """Online softmax over tiles of keys. Returns the output and the log-sum-exp, as the aten op does."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rows = torch.arange(query.shape[-2])[:, None]
    top = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)[..., None]
    total, output = torch.zeros_like(top), torch.zeros(*query.shape[:-1], value.shape[-1])
    for start in range(0, key.shape[-2], tile):
        part = slice(start, start + tile)
        scores = query.float() @ key[:, :, part].float().transpose(-1, -2) * scale
        if attn_mask is not None:  # a bool mask arrives as numbers to add
            scores = scores + attn_mask[..., part].float()
        if is_causal:
            scores = scores.masked_fill(torch.arange(start, start + scores.shape[-1]) > rows, -torch.inf)
        larger = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = larger.masked_fill(larger == -torch.inf, 0.0)
        weights, shrink = (scores - safe).exp(), (top - safe).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        output, top = output * shrink + weights @ value[:, :, part].float(), larger
    return (output / total.clamp(min=1e-38)).to(query.dtype), (top + total.log()).squeeze(-1)


LIBRARY = torch.library.Library("aten", "IMPL")  # keep it: the kernel is gone when the object is
LIBRARY.impl("_scaled_dot_product_flash_attention_for_cpu", tiled, "CPU")
