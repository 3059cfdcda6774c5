"""The small vision transformer: patches, attention as torch has it, and features of one scale."""

import torch
from torch import nn

from topograd.nn.images.config import ImageConfig
from topograd.nn.images.stack import make_image_stack
from topograd.nn.images.vit import Encoder


def test_a_layer_is_torchs_own_encoder_layer() -> None:
    ours = Encoder(8, 2).double().eval()
    theirs = (
        nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True).double().eval()
    )
    pairs = {
        "self_attn.in_proj_weight": ours.queries.weight,
        "self_attn.in_proj_bias": ours.queries.bias,
        "self_attn.out_proj.weight": ours.out.weight,
        "self_attn.out_proj.bias": ours.out.bias,
        "linear1.weight": ours.up.weight,
        "linear1.bias": ours.up.bias,
        "linear2.weight": ours.down.weight,
        "linear2.bias": ours.down.bias,
    }
    missing, _ = theirs.load_state_dict({k: v.detach() for k, v in pairs.items()}, strict=False)
    assert all("norm" in name for name in missing)
    h = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(h, None), theirs(h))


def test_patches_do_not_overlap() -> None:
    stack = make_image_stack(
        ImageConfig(network="vit", widths=(8,), heads=2, shape=(1, 8, 8), patch=4)
    ).double()
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    other = image.clone()
    other[0, 0, 5, 6] = 255
    moved = (stack.embed(image) - stack.embed(other)).abs().sum(-1)[0] > 0
    assert moved.tolist() == [False, False, False, True]
